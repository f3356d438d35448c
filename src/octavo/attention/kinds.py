"""Kinds of cache: layers that need the same tokens share blocks; those with a sliding window let go of old ones.

`CacheLayout` says which layers of a model form which kind, `CacheKinds` what a backend keeps of each. A step has a block table for each
kind (`StepBatch.of_kind`), in which blocks are numbered within the kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.attention.base import LayerSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CacheLayout:
    """The kinds of a model's cache."""

    first: tuple[int, ...]
    """Layers of the first kind."""
    window: int | None = None
    """Of the first kind: no layer of it reads more."""
    sliding: tuple[int, ...] = ()
    """Layers of the second kind, if there is one."""
    sliding_window: int = 0
    wasted: int = 0
    """Layers that keep tokens which their window has left behind, because there can be no second kind."""


def cache_layout(layers: tuple[LayerSpec, ...], max_model_len: int, margin: int | None, *, two_kinds: bool) -> CacheLayout:
    """The layout of a model.

    What kernels load and ignore must not be anybody else's either: a number that is none gets through a weight of zero.

    Args:
        margin: the backend's `reads_before_window`.
        two_kinds: the backend can do with two. Otherwise a model in which some layers see everything keeps everything for all.
    """
    every = tuple(range(len(layers)))
    # A window that no sequence outgrows is none.
    short = [layer.sliding_window is not None and layer.sliding_window + (margin or 0) < max_model_len for layer in layers]
    if margin is None:
        return CacheLayout(every, wasted=sum(short))
    sliding = tuple(i for i in every if short[i])
    window = max(((layers[i].sliding_window or 0) + margin for i in sliding), default=0)
    if not sliding:
        return CacheLayout(every)
    if len(sliding) == len(layers):
        return CacheLayout(every, window)
    if not two_kinds:
        return CacheLayout(every, wasted=len(sliding))
    return CacheLayout(tuple(i for i in every if not short[i]), None, sliding, window)


@dataclass(frozen=True)
class SlidingBlocks:
    """A second kind of cache, as a backend is told of it."""

    layers: frozenset[int]
    """Whose keys and values it keeps."""
    num_blocks: int


@dataclass(frozen=True)
class CacheKinds:
    """What a backend keeps: blocks of the first kind of cache, and of a second one if there is one."""

    num_blocks: int
    sliding: SlidingBlocks | None = None

    def of(self, layer: int) -> int:
        """The kind that a layer's keys and values are in: 0 or 1."""
        return int(self.sliding is not None and layer in self.sliding.layers)

    def blocks(self, layer: int) -> int:
        """How many blocks there are of a layer's kind."""
        return self.sliding.num_blocks if self.sliding is not None and layer in self.sliding.layers else self.num_blocks

    def copies(self, kind: int, src: torch.Tensor, dst: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is to be copied in one kind, as its own block numbers.

        Copies of the other kind become the null block's onto itself: to leave them out would take waiting for the device.

        Args:
            src, dst: [copies] as plans name blocks: those of the second kind from `num_blocks` on.
        """
        src, dst = src.long(), dst.long()
        if self.sliding is None:
            return src, dst
        mine = (src >= self.num_blocks) == bool(kind)
        first = self.num_blocks if kind else 0
        return (src - first) * mine, (dst - first) * mine
