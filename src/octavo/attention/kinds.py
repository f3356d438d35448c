"""Kinds of cache: layers that need the same tokens share blocks; those with a sliding window let go of old ones.

`CacheLayout` says which layers of a model form which kind. `TwoKinds` is the backend of a model that has both: a backend of its own for
each, with tables of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from octavo.attention.base import Attend, AttentionBackend, LayerSpec, StepBatch


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


def cache_layout(layers: tuple[LayerSpec, ...], max_model_len: int, margin: int | None, *, two_kinds: bool) -> CacheLayout:
    """The layout of a model.

    What kernels load and ignore must not be anybody else's either: a number that is none gets through a weight of zero.

    Args:
        margin: the backend's `reads_before_window`.
        two_kinds: the backend can do with two. Otherwise a model in which some layers see everything keeps everything for all.
    """
    every = tuple(range(len(layers)))
    # A window that no sequence outgrows is none.
    reads = [None if layer.sliding_window is None or margin is None else layer.sliding_window + margin for layer in layers]
    windows = [None if read is None or read >= max_model_len else read for read in reads]
    sliding = tuple(i for i in every if windows[i] is not None)
    window = max((w for w in windows if w is not None), default=0)
    if not sliding:
        return CacheLayout(every)
    if len(sliding) == len(layers):
        return CacheLayout(every, window)
    if not two_kinds:
        return CacheLayout(every)
    return CacheLayout(tuple(i for i in every if windows[i] is None), None, sliding, window)


class TwoKinds:
    """Attention over two caches. Implements `AttentionBackend`.

    Args:
        make: a backend for some layers with a number of blocks.
        num_blocks: of each kind. Workers number the blocks of the second behind those of the first.
    """

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        layout: CacheLayout,
        num_blocks: tuple[int, int],
        block_size: int,
        make: Callable[[tuple[LayerSpec, ...], int], AttentionBackend],
    ) -> None:
        kinds = (layout.first, layout.sliding)
        self._backends = [make(tuple(layers[i] for i in kind), blocks) for kind, blocks in zip(kinds, num_blocks, strict=True)]
        self._places = {layer: (number, place) for number, kind in enumerate(kinds) for place, layer in enumerate(kind)}
        """Layer -> its backend, and its place there."""
        self._first_block = num_blocks[0]
        self._block_size = block_size
        self.name = self._backends[0].name

    def plan(self, batch: StepBatch) -> Attend:
        tables = batch.sliding_tables
        assert tables is not None
        tables = (tables - self._first_block).clamp_(min=0)  # entries 0 are padding
        blocks = tables[batch.row_of_token, batch.positions // self._block_size].long()
        slots = blocks * self._block_size + batch.positions % self._block_size
        attends = [
            backend.plan(part)
            for backend, part in zip(self._backends, (batch, replace(batch, block_tables=tables, cache_slots=slots)), strict=True)
        ]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            number, place = self._places[layer]
            return attends[number](place, q, k, v)

        return attend

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole blocks in every layer; all reads happen before any write."""
        second = src >= self._first_block
        self._backends[0].copy_blocks(src[~second], dst[~second])
        self._backends[1].copy_blocks(src[second] - self._first_block, dst[second] - self._first_block)
