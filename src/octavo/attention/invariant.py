"""Paged attention for `batch_invariant`: what a token gets is the same bits alone, in any batch, decoded or part of any chunk.

One kernel (`ops.triton.invariant_attention`) computes every row of a step, whatever it is. Cache and writes to it are those of
`attention/triton.py`; captured steps replay with the plan as data, as there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from octavo.attention.base import Attend, GraphShape, KindTables, KvScales, LayerSpec, SharedPrefixes, StepBatch
from octavo.attention.kinds import CacheKinds, SlidingBlocks
from octavo.attention.kv_calibration import FLOAT8
from octavo.attention.paged_cache import PagedCache
from octavo.layers.attention import QkNorm
from octavo.layers.rope import Rotation
from octavo.ops.transfer import upload_many
from octavo.ops.triton.invariant_attention import InvariantWorkspace, invariant_attention, tile_rows
from octavo.ops.triton.invariant_plan import ITEM_FIELDS, SEGMENT, plan_invariant, spare_items
from octavo.ops.triton.launch import overlap_supported, sm_count
from octavo.protocol.step import Int32


@dataclass(frozen=True)
class Geometry:
    """What a plan depends on; layers that share it share the plan."""

    num_heads: int
    num_kv_heads: int
    sliding_window: int | None
    kind: int
    """Of cache."""

    @staticmethod
    def of(layer: LayerSpec, kind: int) -> Geometry:
        return Geometry(layer.num_heads, layer.num_kv_heads, layer.sliding_window, kind)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def tokens_per_tile(self) -> int:
        return tile_rows(self.group) // self.group

    def plan(self, start: Int32, count: Int32, sms: int) -> Int32:
        """[items, ITEM_FIELDS] for rows that compute `count` tokens from `start` on."""
        per_tile, window = self.tokens_per_tile, self.sliding_window
        return plan_invariant(start, count, per_tile, self.group, self.num_kv_heads, sms, sliding_window=window).items


class InvariantAttention:
    """Owns the KV cache of all layers. Implements `GraphAttention`.

    Args:
        dtype: of the cache: bfloat16, float16 or float8_e4m3fn.
        scales: of a float8 cache, by layer; default 1.0.
        sliding: a second kind of cache, for some of the layers.
    """

    name = "triton-invariant"
    reads_before_window = SEGMENT

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scales: Mapping[int, KvScales] | None = None,
        sliding: SlidingBlocks | None = None,
    ) -> None:
        kinds = CacheKinds(num_blocks, sliding)
        self.cache = PagedCache(layers, kinds, block_size, dtype, device, scales, batch_invariant=True)
        self._layers = layers
        self._geometries = [Geometry.of(layer, kinds.of(i)) for i, layer in enumerate(layers)]
        self._device = device
        self._overlap = overlap_supported(device)
        self._sms = sm_count(device)
        shapes = dict.fromkeys((layer.num_kv_heads, layer.head_dim) for layer in layers)
        self._workspaces = {shape: InvariantWorkspace.allocate(*shape, device) for shape in shapes}

    @staticmethod
    def bytes_per_block(layers: tuple[LayerSpec, ...], block_size: int, dtype: torch.dtype) -> int:
        return PagedCache.bytes_per_block(layers, block_size, dtype)

    @staticmethod
    def supports(layers: tuple[LayerSpec, ...], dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
        """Whether the kernel can run these layers: a 16-bit model with a cache like it or of float8, heads that fill a tile."""
        fits = dtype in (torch.bfloat16, torch.float16) and cache_dtype in (dtype, FLOAT8)
        return fits and all(16 <= layer.head_dim <= 256 for layer in layers)

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self.cache.copy_blocks(src, dst)

    def plan(self, batch: StepBatch) -> Attend:
        geometries = list(dict.fromkeys(self._geometries))
        plans = upload_many([g.plan(batch.cpu_start, batch.cpu_count, self._sms) for g in geometries], self._device)
        work = dict(zip(geometries, plans, strict=True))
        tables = [KindTables(b.block_tables, b.cache_slots) for b in (batch.of_kind(g.kind) for g in self._geometries)]
        return InvariantAttend(self, [work[g] for g in self._geometries], tables)

    # Graphs

    def _capacity(self, g: Geometry, shape: GraphShape) -> int:
        """Items of any plan that fits the shape."""
        tiles = shape.rows + (shape.tokens // g.tokens_per_tile if shape.chunks else 0)
        return tiles + spare_items(g.num_kv_heads, self._sms)

    def graph_plan_size(self, shape: GraphShape) -> int:
        return sum(self._capacity(g, shape) * ITEM_FIELDS for g in dict.fromkeys(self._geometries))

    def graph_plan(self, start: Int32, count: Int32, shape: GraphShape, out: Int32, shared: SharedPrefixes | None = None) -> None:
        """See `GraphAttention.graph_plan`. Every row reads its own keys: what rows have in common must not change their bits."""
        place = 0
        for g in dict.fromkeys(self._geometries):
            items = g.plan(start, count, self._sms)
            end = place + self._capacity(g, shape) * ITEM_FIELDS
            out[place : place + items.size] = items.reshape(-1)
            out[place + items.size : end] = 0
            place = end

    def graph_attend(self, plan: torch.Tensor, shape: GraphShape, tables: Sequence[KindTables]) -> Attend:
        work, place = {}, 0
        for g in dict.fromkeys(self._geometries):
            size = self._capacity(g, shape) * ITEM_FIELDS
            work[g] = plan[place : place + size].view(-1, ITEM_FIELDS)
            place += size
        return InvariantAttend(self, [work[g] for g in self._geometries], [tables[g.kind] for g in self._geometries])

    # One layer

    def run(self, layer: int, items: torch.Tensor, q: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
        """Attend over what is cached. q: [tokens, heads, head_dim]; the same shape comes back."""
        spec, (keys, values), stored = self._layers[layer], self.cache.of(layer), self.cache.scale(layer)
        return invariant_attention(
            q,
            keys,
            values,
            block_tables,
            items,
            self._workspaces[spec.num_kv_heads, spec.head_dim],
            torch.empty(q.shape, dtype=q.dtype, device=q.device),
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
            k_scale=stored.k,
            v_scale=stored.v,
            overlap=self._overlap,
        )


@dataclass(frozen=True)
class InvariantAttend:
    """Implements `Attend` and `layers.attention.FusedAttend`."""

    backend: InvariantAttention
    items: list[torch.Tensor]
    """By layer."""
    tables: list[KindTables]
    """By layer."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.backend.cache.write(layer, k, v, self.tables[layer].cache_slots)
        return self.backend.run(layer, self.items[layer], q, self.tables[layer].block_tables)

    def attend_qkv(self, layer: int, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None) -> torch.Tensor:
        q = self.backend.cache.write_qkv(layer, qkv, rotation, qk_norm, self.tables[layer].cache_slots)
        return self.backend.run(layer, self.items[layer], q, self.tables[layer].block_tables).view(len(qkv), -1)
