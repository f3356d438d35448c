"""What goes to a worker that pools, and what comes back. There are no tokens to sample, no slots and no KV cache."""

from __future__ import annotations

import msgspec

from octavo.protocol.params import PoolingParams


class Pooled(msgspec.Struct, array_like=True, gc=False):
    """A vector, or one vector a token."""

    data: bytes
    """float32, little-endian, row by row."""
    shape: list[int]


class PoolRow(msgspec.Struct):
    """One prompt to be pooled."""

    token_ids: list[int]
    second_from: int
    """First token of the second text of a pair; 0: there is only one text."""
    params: PoolingParams
