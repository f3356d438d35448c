"""`KvCalibration`: the scales of a float8 KV cache, found while the first tokens are computed (`--calculate-kv-scales`).

The steps of those tokens run operation by operation: before a layer's keys and values are cached, the largest of each head is looked
at. After them the scales stay as they are for good, so that everything cached keeps its meaning, and graphs, which read them from
where they lie, may be replayed.

Scales are powers of two. So a scale may still grow between the first step and the last: what is cached follows by having its exponents
lowered, which loses nothing but numbers too small to matter. Float8 has the same precision over a range of 2**14, so a power of two costs
none either.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from octavo.attention.base import KvScales
from octavo.attention.kinds import CacheKinds

logger = logging.getLogger(__name__)

FLOAT8: Final = torch.float8_e4m3fn
LARGEST_FLOAT8: Final = 448.0
ENOUGH_TOKENS: Final = 512
ENOUGH_STEPS: Final = 32
"""After so many, fewer tokens must do: while they are looked at, decoding has no graphs."""
HEADROOM: Final = 2.0
"""Later tokens may be so much larger than the largest of the first before they are clipped; rounding up may double it."""


class KvCalibration:
    """Finds the scales of some layers.

    Args:
        scales: by layer, [kv_heads] each; overwritten in place, for others read them from where they are.
        kinds: of the cache whose blocks are written.
    """

    def __init__(self, scales: Mapping[int, KvScales], kinds: CacheKinds, device: torch.device) -> None:
        self._scales = scales
        self._kinds = kinds
        self._largest = {layer: torch.zeros(2, len(s.k), device=device) for layer, s in scales.items()}
        """Of keys and of values, by head."""
        counts = [kinds.num_blocks, *([] if kinds.sliding is None else [kinds.sliding.num_blocks])]
        self._written = [torch.zeros(count, dtype=torch.bool, device=device) for count in counts]
        """By kind, blocks that hold something of a request's."""
        self._tokens = self._steps = 0
        self._counts = True
        self.running = False
        """Steps are to be computed operation by operation, and under `observing`."""
        self.watching = False
        """Such a step is under way."""

    def begin(self) -> None:
        """From now on steps are those of requests. What was found before is forgotten."""
        for scales, largest in zip(self._scales.values(), self._largest.values(), strict=True):
            scales.k.fill_(1.0), scales.v.fill_(1.0), largest.zero_()
        for written in self._written:
            written.zero_()
        self._tokens = self._steps = 0
        self.running = bool(self._scales)

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Steps that are made up, so that nothing is compiled when the first request comes; then it begins."""
        self.running, self._counts = bool(self._scales), False
        try:
            yield
        finally:
            self._counts = True
            self.begin()

    @contextlib.contextmanager
    def observing(self, tokens: int) -> Iterator[None]:
        """A step of so many tokens. It is the last one if these are enough."""
        self.watching = True
        try:
            yield
            if not self._counts:
                return
            self._tokens += tokens
            self._steps += 1
            if self._tokens >= ENOUGH_TOKENS or self._steps >= ENOUGH_STEPS:
                self.running = False
                self._report()
        finally:
            self.watching = False

    def watches(self, layer: int) -> bool:
        """Whether a layer's keys and values are to be shown before they are written."""
        return self.watching and layer in self._scales

    def see(self, layer: int, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, cache_slots: torch.Tensor) -> None:
        """Have the scales of a layer reach what is about to be cached.

        Args:
            k, v: [tokens, kv_heads, head_dim]
            cache: [2, blocks, kv_heads, block_size, head_dim] float8: the layer's, whose numbers follow.
            cache_slots: [tokens] int64, block * block_size + offset.
        """
        scales, largest, written = self._scales[layer], self._largest[layer], self._written[self._kinds.of(layer)]
        for place, (x, scale) in enumerate(((k, scales.k), (v, scales.v))):
            size = x.float().abs()
            # What is not a number fails its own request; the others must not inherit it.
            torch.maximum(largest[place], torch.where(size.isfinite(), size, 0.0).amax((0, 2)), out=largest[place])
            wanted = scale_for(largest[place])
            if bool((wanted != scale).any()):
                self._rescale(cache[place], written, scale / wanted)
                scale.copy_(wanted)
        written[cache_slots // cache.shape[3]] = True

    def copied(self, kind: int, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Blocks `src` of a kind have been copied to `dst`."""
        if self.running:
            self._written[kind][dst.long()] |= self._written[kind][src.long()]

    def _rescale(self, cache: torch.Tensor, written: torch.Tensor, factor: torch.Tensor) -> None:
        """cache: [blocks, kv_heads, block_size, head_dim]; written: [blocks]; factor: [kv_heads]."""
        blocks = written.nonzero().flatten()
        raw = cache.view(torch.uint8)
        numbers = raw.index_select(0, blocks).view(FLOAT8).float() * factor[:, None, None]
        raw.index_copy_(0, blocks, numbers.clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8).view(torch.uint8))

    def _report(self) -> None:
        found = torch.cat(list(self._largest.values()), 1)
        keys, values = found.amax(1).tolist()
        logger.info("FP8 KV cache: scales found over %d tokens, with keys up to %.3g and values up to %.3g.", self._tokens, keys, values)


def scale_for(largest: torch.Tensor) -> torch.Tensor:
    """The power of two with which a float8 holds numbers up to `largest` and some more; 1 where nothing was seen."""
    mantissa, exponent = torch.frexp(largest * (HEADROOM / LARGEST_FLOAT8))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-60, 60)
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), 1.0)
