"""Tensors of a file on their way to a device before their turn: while one is packed there, the next are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final, TypeVar

import torch

from octavo.weights.parallel_read import Arrival, ParallelReader
from octavo.weights.stored import StoredTensor

T = TypeVar("T")

AHEAD_BYTES: Final = 256 << 20
"""On their way at most, beside the tensor whose turn it is."""
AHEAD_TENSORS: Final = 64
"""The same, counted."""
LARGEST_BYTES: Final = 256 << 20
"""Of a tensor that is read ahead. Larger ones are better read to where they stay: little of their time is spent on waiting for the last
piece, and they would take their memory twice."""


def in_advance(items: Iterable[tuple[T, int]]) -> Iterator[T]:
    """Items, each made before those in front of it are asked for: as many as `AHEAD_BYTES` and `AHEAD_TENSORS` allow.

    Args:
        items: and the bytes of each that are on their way from when it is made.
    """
    waiting: deque[tuple[T, int]] = deque()
    ahead = 0
    for item, nbytes in items:
        waiting.append((item, nbytes))
        ahead += nbytes
        while ahead > AHEAD_BYTES or len(waiting) > AHEAD_TENSORS:
            ahead -= waiting[0][1]
            yield waiting.popleft()[0]
    while waiting:
        yield waiting.popleft()[0]


def begun(stored: StoredTensor, begin: int, reader: ParallelReader) -> tuple[StoredTensor, int]:
    """`stored`, on its way to the reader's device from now on, and its bytes; as it is, and none, where it is not read ahead.

    Args:
        begin: where in its file it lies.
    """
    if stored.dtype is None or not 0 < stored.nbytes <= LARGEST_BYTES:
        return stored, 0
    place = torch.empty(stored.shape, dtype=stored.dtype, device=reader.device)
    return _arriving(stored, reader.begin(stored.file, begin, place)), stored.nbytes


def _arriving(stored: StoredTensor, arrival: Arrival) -> StoredTensor:
    def raw(device: torch.device) -> torch.Tensor:
        return arrival.wait().to(device)

    if stored.copy_region is None:  # of a dtype that is refused as a weight
        return replace(stored, raw=raw)

    def copy_into(destination: torch.Tensor) -> None:
        destination.copy_(arrival.wait())

    def copy_region(region: tuple[slice, ...], destination: torch.Tensor) -> None:
        destination.copy_(arrival.wait()[region])

    return replace(stored, copy_into=copy_into, copy_region=copy_region, raw=raw)
