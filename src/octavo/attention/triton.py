"""Paged attention by this project's Triton kernels, for 16-bit caches on NVIDIA GPUs.

Layout: all layers of one shape in one allocation, [layers, 2, blocks, kv_heads, block_size, head_dim] (keys, then values), so
that one launch copies a block in every layer. A step is planned once on the CPU from lengths known there: work items for the
decodes, tiles for the prompt chunks, and where many queries read each key, lines to gather the pages into. One upload carries
all of it. A layer then is one launch for norm, rotation and cache write, one for its decodes and one (or two) for its chunks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from octavo.attention.base import Attend, GraphShape, LayerSpec, StepBatch
from octavo.layers.attention import QkNorm
from octavo.layers.rope import Rotation
from octavo.ops.transfer import upload_many
from octavo.ops.triton.decode_plan import ITEM_FIELDS, decode_capacity, plan_decode
from octavo.ops.triton.gather_cache import LINE_ALIGNMENT, GatheredCache, gather_cache, plan_gather
from octavo.ops.triton.launch import overlap_supported
from octavo.ops.triton.paged_decode import DecodeTuning, DecodeWorkspace, decode_tuning, paged_decode
from octavo.ops.triton.paged_prefill import (
    GATHER_FROM,
    PrefillTuning,
    PrefillWorkspace,
    paged_prefill,
    prefill_tuning,
    queries_per_key,
)
from octavo.ops.triton.prefill_plan import ITEM_FIELDS as CHUNK_FIELDS
from octavo.ops.triton.prefill_plan import ROW as CHUNK_ROW
from octavo.ops.triton.prefill_plan import max_prefill_parts, plan_prefill
from octavo.ops.triton.rope_cache import rope_cache
from octavo.protocol.step import Int32

GATHERED_TOKENS = 32768
"""Most tokens of a step's prompts that are gathered into lines; longer prefixes are read page by page."""
EMULATED_SMS = 8
"""Where there is no GPU, for the interpreter."""


@dataclass(frozen=True)
class Geometry:
    """What a plan depends on; layers that share it share the plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None

    @staticmethod
    def of(layer: LayerSpec) -> Geometry:
        return Geometry(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.sliding_window)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class DecodeWork:
    workspace: DecodeWorkspace
    """Its items are the plan."""
    tuning: DecodeTuning


@dataclass(frozen=True)
class ChunkWork:
    items: torch.Tensor
    tuning: PrefillTuning
    gather_chunks: torch.Tensor | None
    gather_starts: torch.Tensor | None
    gathered: GatheredCache | None


@dataclass(frozen=True)
class LayerWork:
    """A step, seen by the layers of one geometry."""

    decodes: DecodeWork | None
    chunks: ChunkWork | None


@dataclass(frozen=True)
class SelectedWork:
    """The last layer of a step that wants only the last tokens of some rows."""

    work: LayerWork
    block_tables: torch.Tensor
    """[wanted, max_blocks] int32."""


class TritonAttention:
    """Owns the KV cache of all layers. Implements `GraphAttention`.

    Args:
        dtype: of the cache and of the model: bfloat16 or float16.
        max_gathered: most tokens that prompts of a step can have; bounds the scratch for gathered pages.
    """

    name = "triton"

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_gathered: int = GATHERED_TOKENS,
    ) -> None:
        self._layers = layers
        self._geometries = [Geometry.of(layer) for layer in layers]
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._overlap = overlap_supported(device)
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else EMULATED_SMS
        self._allocations: list[torch.Tensor] = []
        self._caches: list[torch.Tensor] = [torch.empty(0)] * len(layers)
        shapes = [(layer.num_kv_heads, layer.head_dim) for layer in layers]
        for shape in dict.fromkeys(shapes):
            members = [i for i, s in enumerate(shapes) if s == shape]
            whole = torch.empty(len(members), 2, num_blocks, shape[0], block_size, shape[1], dtype=dtype, device=device)
            self._allocations.append(whole)
            for place, layer in enumerate(members):
                self._caches[layer] = whole[place]
        limit = min(GATHERED_TOKENS, -(-max_gathered // LINE_ALIGNMENT) * LINE_ALIGNMENT)
        # The tensor memory accelerator, which gathered lines are for, came with compute capability 9.
        self._gathered = {
            shape: GatheredCache.allocate(shape[0], limit, shape[1], dtype, device) for shape in dict.fromkeys(shapes) if self._overlap
        }
        self._decode_parts = {g: self._decode_workspace(g) for g in dict.fromkeys(self._geometries)}
        self._chunk_parts = {
            g: PrefillWorkspace.allocate(g.num_kv_heads, g.head_dim, self._sms, device) for g in dict.fromkeys(self._geometries)
        }

    @staticmethod
    def bytes_per_block(layers: tuple[LayerSpec, ...], block_size: int, dtype: torch.dtype) -> int:
        return sum(2 * block_size * layer.num_kv_heads * layer.head_dim * dtype.itemsize for layer in layers)

    @staticmethod
    def supports(layers: tuple[LayerSpec, ...], dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
        """Whether the kernels can run these layers: one 16-bit dtype, and heads that fill a tensor-core tile."""
        return dtype == cache_dtype and dtype in (torch.bfloat16, torch.float16) and all(16 <= layer.head_dim <= 256 for layer in layers)

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        for whole in self._allocations:
            whole.index_copy_(2, dst.long(), whole.index_select(2, src))

    # Eager steps

    def plan(self, batch: StepBatch) -> Attend:
        arrays: list[Int32] = []
        drafts = {g: self._draft(batch, g, arrays) for g in dict.fromkeys(self._geometries)}
        planned = len(arrays)
        if (wanted := batch.cpu_wanted) is not None and len(wanted):
            # Each is one query over its whole context, whether it ends a chunk or not: a decode.
            g = self._geometries[-1]
            capacity = decode_capacity(len(wanted), g.num_kv_heads, self._sms)
            contexts = (batch.cpu_start + batch.cpu_count)[wanted]
            plan = plan_decode(contexts, g.num_kv_heads, self._sms, capacity, sliding_window=g.sliding_window)
            arrays += [plan.items, wanted]
        on_device = upload_many(arrays, self._device)
        work = {g: finish(on_device) for g, finish in drafts.items()}
        tables, decodes, selected = batch.block_tables, batch.num_decodes, None
        if wanted is not None:
            items, rows = on_device[planned:] or (None, None)
            last = None if items is None else self._decode_work(self._geometries[-1], len(wanted), items)
            its_tables = tables if rows is None or len(wanted) == len(batch.cpu_count) else tables.index_select(0, rows)
            selected = SelectedWork(LayerWork(last, None), its_tables)
        return TritonAttend(self, [work[g] for g in self._geometries], tables, tables[decodes:], batch.cache_slots, decodes, selected)

    def _draft(self, batch: StepBatch, g: Geometry, arrays: list[Int32]) -> functools.partial[LayerWork]:
        """Plan for one geometry; what the device needs is appended to `arrays`, whose uploads the returned function takes."""
        decodes, first = batch.num_decodes, len(arrays)
        if decodes:
            capacity = decode_capacity(decodes, g.num_kv_heads, self._sms)
            plan = plan_decode(batch.cpu_start[:decodes] + 1, g.num_kv_heads, self._sms, capacity, sliding_window=g.sliding_window)
            arrays.append(plan.items)
        tuning, gather = None, False
        if decodes < len(batch.cpu_count):
            start, count = batch.cpu_start[decodes:], batch.cpu_count[decodes:]
            reuse, most = queries_per_key(start, count), int(count.max())
            lines = plan_gather(start + count)
            scratch = self._gathered.get((g.num_kv_heads, g.head_dim))
            gather = scratch is not None and reuse >= GATHER_FROM and lines.tokens <= scratch.keys.shape[1]
            tuning = prefill_tuning(g.head_dim, g.group, most, reuse, gathered=gather)
            per_tile = tuning.tokens_per_tile(g.group)
            items = plan_prefill(start, count, decodes, per_tile, g.num_kv_heads, self._sms, sliding_window=g.sliding_window).items
            arrays += [items, lines.chunks, lines.starts] if gather else [items]
        return functools.partial(self._work, g, first, decodes, tuning, gather)

    def _work(
        self, g: Geometry, first: int, decodes: int, tuning: PrefillTuning | None, gather: bool, arrays: list[torch.Tensor]
    ) -> LayerWork:
        mine = iter(arrays[first:])
        decode_work = self._decode_work(g, decodes, next(mine)) if decodes else None
        if tuning is None:
            return LayerWork(decode_work, None)
        items = next(mine)
        if not gather:
            return LayerWork(decode_work, ChunkWork(items, tuning, None, None, None))
        return LayerWork(decode_work, ChunkWork(items, tuning, next(mine), next(mine), self._gathered[g.num_kv_heads, g.head_dim]))

    def _decode_work(self, g: Geometry, rows: int, items: torch.Tensor) -> DecodeWork:
        parts = self._decode_parts[g]
        capacity = decode_capacity(rows, g.num_kv_heads, self._sms)
        workspace = DecodeWorkspace(items, parts.sums, parts.stats, parts.counters, capacity)
        tuning = decode_tuning(g.head_dim, self._dtype.itemsize, rows, g.num_kv_heads, self._sms, overlap=self._overlap)
        return DecodeWork(workspace, tuning)

    def _decode_workspace(self, g: Geometry) -> DecodeWorkspace:
        """Room for the parts of any plan: their number depends on the number of rows, but not beyond this."""
        most = max((decode_capacity(rows, g.num_kv_heads, self._sms) for rows in (1, 2 * self._sms, 8 * self._sms)), key=lambda c: c.parts)
        return DecodeWorkspace.allocate(most, g.num_heads, g.num_kv_heads, g.head_dim, self._device)

    # Graphs

    def _chunk_tuning(self, g: Geometry, shape: GraphShape) -> PrefillTuning:
        """One for all steps of a shape. They are too short for gathering pages to pay, or for the largest tiles."""
        return prefill_tuning(g.head_dim, g.group, shape.tokens, 0.0, gathered=False)

    def _graph_items(self, g: Geometry, shape: GraphShape) -> tuple[int, int]:
        """Items for decodes and for chunks."""
        decodes = decode_capacity(shape.rows, g.num_kv_heads, self._sms).items
        if not shape.chunks:
            return decodes, 0
        per_tile = self._chunk_tuning(g, shape).tokens_per_tile(g.group)
        return decodes, shape.tokens // per_tile + shape.chunks + max_prefill_parts(g.num_kv_heads, self._sms)

    def graph_plan_size(self, shape: GraphShape) -> int:
        sizes = [self._graph_items(g, shape) for g in dict.fromkeys(self._geometries)]
        return sum(decodes * ITEM_FIELDS + chunks * CHUNK_FIELDS for decodes, chunks in sizes)

    def graph_plan(self, start: Int32, count: Int32, shape: GraphShape, out: Int32) -> None:
        place = 0
        num_decodes = int(np.count_nonzero(count == 1)) if shape.chunks else len(start)
        contexts = start[:num_decodes] + 1
        for g in dict.fromkeys(self._geometries):
            decodes, chunks = self._graph_items(g, shape)
            capacity = decode_capacity(shape.rows, g.num_kv_heads, self._sms)
            plan = plan_decode(contexts, g.num_kv_heads, self._sms, capacity, sliding_window=g.sliding_window)
            out[place : place + plan.items.size] = plan.items.reshape(-1)
            place += decodes * ITEM_FIELDS
            if chunks:
                items = self._graph_chunks(g, start, count, num_decodes, shape).reshape(-1)
                out[place : place + len(items)] = items
                out[place + len(items) : place + chunks * CHUNK_FIELDS] = 0
                place += chunks * CHUNK_FIELDS

    def _graph_chunks(self, g: Geometry, start: Int32, count: Int32, num_decodes: int, shape: GraphShape) -> Int32:
        """[items, CHUNK_FIELDS] of the rows after the decodes, numbered as in the whole step."""
        per_tile = self._chunk_tuning(g, shape).tokens_per_tile(g.group)
        begin, chunk = start[num_decodes:], count[num_decodes:]
        items = plan_prefill(begin, chunk, num_decodes, per_tile, g.num_kv_heads, self._sms, sliding_window=g.sliding_window).items
        items[:, CHUNK_ROW] += num_decodes
        return items

    def graph_attend(self, plan: torch.Tensor, shape: GraphShape, block_tables: torch.Tensor, cache_slots: torch.Tensor) -> Attend:
        work, place = {}, 0
        for g in dict.fromkeys(self._geometries):
            decodes, chunks = self._graph_items(g, shape)
            items = plan[place : place + decodes * ITEM_FIELDS].view(-1, ITEM_FIELDS)
            place += decodes * ITEM_FIELDS
            chunk_work = None
            if chunks:
                chunk_items = plan[place : place + chunks * CHUNK_FIELDS].view(-1, CHUNK_FIELDS)
                chunk_work = ChunkWork(chunk_items, self._chunk_tuning(g, shape), None, None, None)
                place += chunks * CHUNK_FIELDS
            work[g] = LayerWork(self._decode_work(g, shape.rows, items), chunk_work)
        return TritonAttend(self, [work[g] for g in self._geometries], block_tables, block_tables, cache_slots, shape.rows)

    # One layer

    def cache_of(self, layer: int) -> torch.Tensor:
        """[2, blocks, kv_heads, block_size, head_dim]"""
        return self._caches[layer]

    def run(
        self, layer: int, work: LayerWork, q: torch.Tensor, block_tables: torch.Tensor, chunk_tables: torch.Tensor, decodes: int
    ) -> torch.Tensor:
        """Attend over what is cached. q: [tokens, heads, head_dim]; the same shape comes back."""
        spec, (keys, values) = self._layers[layer], self._caches[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if work.decodes is not None:
            paged_decode(
                q[:decodes],
                keys,
                values,
                block_tables[:decodes],
                work.decodes.workspace,
                out[:decodes],
                scale=spec.scale,
                sliding_window=spec.sliding_window,
                soft_cap=spec.soft_cap,
                tuning=work.decodes.tuning,
            )
        if (chunks := work.chunks) is not None:
            if chunks.gathered is not None and chunks.gather_chunks is not None:
                gather_cache(keys, values, chunk_tables, chunks.gather_chunks, chunks.gathered)
            paged_prefill(
                q,
                keys,
                values,
                chunk_tables,
                chunks.items,
                self._chunk_parts[self._geometries[layer]],
                out,
                scale=spec.scale,
                tuning=chunks.tuning,
                sliding_window=spec.sliding_window,
                soft_cap=spec.soft_cap,
                gathered=chunks.gathered,
                gathered_starts=chunks.gather_starts,
            )
        return out

    @property
    def block_size(self) -> int:
        return self._block_size


@dataclass(frozen=True)
class TritonAttend:
    """Implements `Attend` and `layers.attention.WantedAttend`."""

    backend: TritonAttention
    work: list[LayerWork]
    """By layer."""
    block_tables: torch.Tensor
    chunk_tables: torch.Tensor
    """The block tables that the items of chunks count rows of."""
    cache_slots: torch.Tensor
    decodes: int
    """At most so many rows, the first, are decodes."""
    selected: SelectedWork | None = None

    @property
    def can_select(self) -> bool:
        return self.selected is not None

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self.backend.cache_of(layer)
        size = self.backend.block_size
        block, offset = self.cache_slots // size, self.cache_slots % size
        keys[block, :, offset] = k.to(keys.dtype)
        values[block, :, offset] = v.to(values.dtype)
        return self.backend.run(layer, self.work[layer], q, self.block_tables, self.chunk_tables, self.decodes)

    def attend_qkv(self, layer: int, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None) -> torch.Tensor:
        q = self._store(layer, qkv, rotation, qk_norm)
        return self.backend.run(layer, self.work[layer], q, self.block_tables, self.chunk_tables, self.decodes).flatten(1)

    def attend_wanted(
        self, layer: int, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, wanted: torch.Tensor
    ) -> torch.Tensor:
        assert self.selected is not None
        q = self._store(layer, qkv, rotation, qk_norm).index_select(0, wanted)
        tables = self.selected.block_tables
        return self.backend.run(layer, self.selected.work, q, tables, tables, len(wanted)).flatten(1)

    def _store(self, layer: int, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None) -> torch.Tensor:
        """Norm, rotate, write keys and values into the cache. Returns q, [tokens, heads, head_dim]."""
        keys, values = self.backend.cache_of(layer)
        num_heads = qkv.shape[1] // keys.shape[3] - 2 * keys.shape[1]
        return rope_cache(
            qkv,
            rotation.positions,
            rotation.table,
            self.cache_slots,
            keys,
            values,
            num_heads,
            q_weight=None if qk_norm is None else qk_norm.q,
            k_weight=None if qk_norm is None else qk_norm.k,
            eps=1e-6 if qk_norm is None else qk_norm.eps,
        )
