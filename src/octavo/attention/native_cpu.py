"""Paged attention by the compiled CPU kernels.

What a query gets is the same bits in any batch, and the same whether it is decoded or part of a prompt chunk.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from octavo.attention.base import Attend, LayerSpec, StepBatch
from octavo.attention.kinds import CacheKinds, SlidingBlocks
from octavo.attention.native_memory import NativeCacheMemory
from octavo.errors import ConfigError
from octavo.ops.cpu import abi
from octavo.ops.cpu.paged import PagedStep
from octavo.protocol.step import Int32


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
        self._kinds = CacheKinds(num_blocks, sliding)
        numbers = np.float16 if dtype == torch.float16 else np.float32
        self.memory = NativeCacheMemory(layers, self._kinds, block_size, numbers)
        self._keys = [torch.from_numpy(keys) for keys in self.memory.keys]
        self._values = [torch.from_numpy(values) for values in self.memory.values]
        self.caches = self.memory.caches
        """By layer."""
        self._engine = functools.cache(lambda: abi.Engine(threads))

    @staticmethod
    def bytes_per_block(layers: tuple[LayerSpec, ...], block_size: int, dtype: torch.dtype) -> int:
        return NativeCacheMemory.bytes_per_block(layers, block_size, dtype.itemsize)

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
        self.memory.copy_blocks(src.numpy(), dst.numpy())
