"""The oracle backend: walks block tables token by token in Python and computes in float64. Slow on purpose, for tests."""

from __future__ import annotations

import torch

from octavo.attention.base import Attend, LayerSpec, StepBatch
from octavo.ops.reference.attention import causal_attention


class ReferenceAttention:
    """Owns one [2, num_blocks, block_size, kv_heads, head_dim] cache a layer. Implements `AttentionBackend`."""

    name = "reference"

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._block_size = block_size
        self._caches = [
            torch.zeros(2, num_blocks, block_size, layer.num_kv_heads, layer.head_dim, dtype=dtype, device=device) for layer in layers
        ]

    @staticmethod
    def bytes_per_block(layers: tuple[LayerSpec, ...], block_size: int, dtype: torch.dtype) -> int:
        return sum(2 * block_size * layer.num_kv_heads * layer.head_dim * dtype.itemsize for layer in layers)

    def plan(self, batch: StepBatch) -> Attend:
        tables = batch.block_tables.tolist()
        cache_slots = batch.cache_slots.tolist()

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            spec, cache = self._layers[layer], self._caches[layer]
            for token, slot in enumerate(cache_slots):
                block, offset = divmod(slot, self._block_size)
                cache[0, block, offset] = k[token].to(cache.dtype)
                if spec.value_dim is None:
                    cache[1, block, offset] = v[token].to(cache.dtype)
            out = q.new_empty(*q.shape[:2], spec.value_dim or q.shape[2])
            begin = 0
            for row, (start, count) in enumerate(zip(batch.cpu_start.tolist(), batch.cpu_count.tolist(), strict=True)):
                where = [(tables[row][p // self._block_size], p % self._block_size) for p in range(start + count)]
                keys = torch.stack([cache[0, block, offset] for block, offset in where])
                values = torch.stack([cache[1, block, offset] for block, offset in where])
                if spec.value_dim is not None:
                    values = keys[..., : spec.value_dim]
                out[begin : begin + count] = causal_attention(
                    q[begin : begin + count],
                    keys,
                    values,
                    scale=spec.scale,
                    sliding_window=spec.sliding_window,
                    soft_cap=spec.soft_cap,
                    sinks=spec.sinks,
                )
                begin += count
            return out

        return attend

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        for cache in self._caches:
            cache[:, dst.long()] = cache[:, src.long()].clone()
