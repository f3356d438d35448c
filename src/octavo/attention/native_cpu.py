"""Paged attention by the compiled CPU kernels.

Layout of a layer's cache: keys [num_blocks, kv_heads, head_dim, padded block], so that a vector of scores is made without a
horizontal sum; values [num_blocks, kv_heads, block_size, padded head_dim], so that their weighted sum is too. Both paddings are
to whole vectors. Only places that hold a token of a row are ever read into its result, whatever lies beside them.

All layers of a block lie together, a layer's values behind its keys. Large pages were tried: reading is 3% faster, but a virtual
machine that is handed its memory by the host pays ten times as much for the first touch of each.

What a query gets is the same bits in any batch, and the same whether it is decoded or part of a prompt chunk.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

from octavo.attention.base import Attend, LayerSpec, StepBatch
from octavo.attention.kinds import CacheKinds, SlidingBlocks
from octavo.errors import ConfigError
from octavo.ops.cpu import abi
from octavo.ops.cpu.paged import PagedStep
from octavo.protocol.step import Int32

LANES = 16
"""Numbers in the widest vector that the kernels are compiled for."""


@dataclass(frozen=True)
class _Owned:
    """What a step's structures point into."""

    tensors: tuple[torch.Tensor, ...]
    arrays: tuple[Int32, ...]


class NativeCpuAttention:
    """Owns the KV cache of all layers. Implements `AttentionBackend`.

    Args:
        dtype: of the cache: float32 or float16.
        threads: for layers that are called one by one; a compiled decoder brings its own.
        sliding: a second kind of cache, for some of the layers.

    Raises:
        ConfigError: another dtype.
    """

    name = "native-cpu"
    reads_before_window = 0

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        threads: int = 1,
        *,
        sliding: SlidingBlocks | None = None,
    ) -> None:
        if dtype not in (torch.float32, torch.float16):
            raise ConfigError(
                f"--kv-cache-dtype {str(dtype).removeprefix('torch.')} does not go with the native CPU kernels. Use float16 or float32."
            )
        self._kinds = kinds = CacheKinds(num_blocks, sliding)
        sizes = [_numbers(s, block_size) for s in layers]
        # A block is what all layers of its kind have of it. Never written means never touched: the system hands out these pages only
        # when a block is first used.
        strides = [sum(sum(size) for i, size in enumerate(sizes) if kinds.of(i) == kind) for kind in (0, 1)]
        counts = (num_blocks, 0 if sliding is None else sliding.num_blocks)
        memory = [torch.empty(count, stride, dtype=dtype, device=device) for count, stride in zip(counts, strides, strict=True)]
        self._keys, self._values, at = [], [], [0, 0]
        for i, (spec, (keys, values)) in enumerate(zip(layers, sizes, strict=True)):
            kind = kinds.of(i)
            whole, first = memory[kind], at[kind]
            shape = (spec.num_kv_heads, spec.head_dim, _padded(block_size))
            self._keys.append(whole[:, first : first + keys].view(len(whole), *shape))
            shape = (spec.num_kv_heads, block_size, _padded(spec.head_dim))
            self._values.append(whole[:, first + keys : first + keys + values].view(len(whole), *shape))
            at[kind] += keys + values
        described = [
            abi.Cache(
                keys=keys.data_ptr(),
                values=values.data_ptr(),
                block_stride=strides[kinds.of(i)],
                heads=spec.num_heads,
                kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                padded_dim=_padded(spec.head_dim),
                block_size=block_size,
                padded_block=_padded(block_size),
                half=int(dtype == torch.float16),
                window=spec.sliding_window or 0,
                scale=spec.scale,
                soft_cap=spec.soft_cap or 0.0,
                sliding=kinds.of(i),
            )
            for i, (spec, keys, values) in enumerate(zip(layers, self._keys, self._values, strict=True))
        ]
        self.caches: ctypes.Array[Any] = abi.array_of(abi.Cache, described)
        """By layer; points into this object's tensors."""
        self._engine = functools.cache(lambda: abi.Engine(threads))

    @staticmethod
    def bytes_per_block(layers: tuple[LayerSpec, ...], block_size: int, dtype: torch.dtype) -> int:
        return sum(sum(_numbers(s, block_size)) for s in layers) * dtype.itemsize

    def plan(self, batch: StepBatch) -> Attend:
        second = batch.of_kind(1) if self._kinds.sliding is not None else batch
        places = (batch.cache_slots, batch.block_tables, second.cache_slots, second.block_tables)
        tensors = tuple(t.contiguous() for t in (batch.token_ids, batch.positions, *places))
        arrays = (batch.cpu_start.astype("int32", copy=False), batch.cpu_count.astype("int32", copy=False))
        tokens, positions, slots, tables, sliding_slots, sliding_tables = tensors
        step = abi.Step(
            token_ids=tokens.data_ptr(),
            positions=positions.data_ptr(),
            cache_slots=slots.data_ptr(),
            sliding_slots=sliding_slots.data_ptr(),
            row_start=arrays[0].ctypes.data,
            row_count=arrays[1].ctypes.data,
            block_tables=tables.data_ptr(),
            sliding_tables=sliding_tables.data_ptr(),
            table_stride=tables.shape[1],
            num_tokens=batch.num_tokens,
            num_rows=len(batch.cpu_count),
        )
        return PagedStep(step, self.caches, _Owned(tensors, arrays), self._engine)

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        copies = [self._kinds.copies(kind, src, dst) for kind in (0, 1)]
        for caches in (self._keys, self._values):
            for layer, cache in enumerate(caches):
                source, destination = copies[self._kinds.of(layer)]
                cache.index_copy_(0, destination, cache.index_select(0, source))


def _padded(count: int) -> int:
    return -(-count // LANES) * LANES


def _numbers(spec: LayerSpec, block_size: int) -> tuple[int, int]:
    """Of a block's keys, and of its values."""
    return spec.num_kv_heads * spec.head_dim * _padded(block_size), spec.num_kv_heads * block_size * _padded(spec.head_dim)
