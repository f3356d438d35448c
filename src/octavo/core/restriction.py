"""Tokens that a request forbids by lists (allowed_token_ids, bad_words, min_tokens): whether they leave any.

The sampler applies the lists itself. What they leave together with a grammar, or with words that end where the text has come to, is not known
before it has come there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from octavo.protocol.params import SamplingParams
from octavo.protocol.step import Int32

if TYPE_CHECKING:
    from octavo.core.request import Request


class Restriction:
    """The lists of one request, for masks of `num_words` words."""

    def __init__(self, sampling: SamplingParams, num_words: int) -> None:
        self._bad = sampling.bad_words_token_ids or []
        self._allowed: Int32 | None = None
        self.fields = ["bad_words"] if self._bad else []
        """Names of the lists."""
        if sampling.allowed_token_ids is not None:
            self.fields.insert(0, "allowed_token_ids")
            bits = np.zeros(32 * num_words, np.uint8)
            ids = np.asarray(sampling.allowed_token_ids, np.int64)
            bits[ids[ids < len(bits)]] = 1
            self._allowed = np.packbits(bits, bitorder="little").view(np.int32)

    @classmethod
    def of(cls, sampling: SamplingParams, num_words: int) -> Restriction | None:
        """None for a request without such lists."""
        return cls(sampling, num_words) if sampling.allowed_token_ids is not None or sampling.bad_words_token_ids else None

    def narrow(self, words: Int32, outputs: Sequence[int]) -> None:
        """Take what is forbidden after `outputs` out of a mask [num_words]."""
        if self._allowed is not None:
            words &= self._allowed
        bits = words.view(np.uint32)
        for token in _ending(self._bad, outputs):
            if token // 32 < len(bits):
                bits[token // 32] &= ~np.uint32(1 << (token % 32))


def _ending(bad: Sequence[Sequence[int]], outputs: Sequence[int]) -> set[int]:
    """The last tokens of bad words all of whose other tokens are the last of `outputs`."""
    longest = max((len(ids) for ids in bad), default=0)
    tail = list(outputs[max(0, len(outputs) - longest) :])
    return {ids[-1] for ids in bad if len(ids) - 1 <= len(tail) and tail[len(tail) - len(ids) + 1 :] == list(ids[:-1])}


def nothing_left(request: Request) -> str:
    """Why a request without a grammar has no token to go on with; "" if it has, as far as its lists go."""
    sampling = request.sampling
    if sampling.allowed_token_ids is None:
        return ""
    left = set(sampling.allowed_token_ids) - _ending(sampling.bad_words_token_ids or [], request.tokens[request.num_prompt :])
    if not left:
        return f"After {request.num_outputs} tokens bad_words forbids every one of allowed_token_ids: no token is left."
    if request.num_outputs < sampling.min_tokens and not left - set(request.stop_token_ids):
        return f"After {request.num_outputs} tokens min_tokens and bad_words forbid every one of allowed_token_ids: no token is left."
    return ""
