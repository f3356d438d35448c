"""Paged attention by this project's Triton kernels, for 16-bit and float8 caches on NVIDIA GPUs.

A step is planned once on the CPU from lengths known there: work items for the decodes, tiles for the prompt chunks, and where
many queries read each key, lines to gather the pages into. One upload carries all of it. A layer then is one launch for norm,
rotation and cache write, one for its decodes and one (or two) for its chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.attention.base import Attend, GraphShape, KindTables, KvScales, LayerSpec, SharedPrefixes, StepBatch
from octavo.attention.decodes import CudaDecodes, Decodes, Geometry, LayerCache, TritonDecodes
from octavo.attention.kinds import CacheKinds, SlidingBlocks
from octavo.attention.kv_calibration import FLOAT8, KvCalibration
from octavo.attention.paged_cache import PagedCache
from octavo.layers.attention import QkNorm
from octavo.layers.rope import Rotation
from octavo.ops.transfer import upload_many
from octavo.ops.triton.decode_plan import Bundles, bundle_rows
from octavo.ops.triton.gather_cache import LINE_ALIGNMENT, GatheredCache, gather_cache, plan_gather
from octavo.ops.triton.launch import overlap_supported, sm_count
from octavo.ops.triton.paged_prefill import (
    GATHER_FROM,
    PrefillTuning,
    PrefillWorkspace,
    paged_prefill,
    prefill_tuning,
    queries_per_key,
)
from octavo.ops.triton.prefill_plan import ITEM_FIELDS as CHUNK_FIELDS
from octavo.ops.triton.prefill_plan import PART_ALIGNMENT, max_prefill_parts, plan_prefill
from octavo.ops.triton.prefill_plan import ROW as CHUNK_ROW
from octavo.protocol.step import Int32

GATHERED_TOKENS = 32768
"""Most tokens of a step's prompts that are gathered into lines; longer prefixes are read page by page."""


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

    decodes: TritonDecodes | CudaDecodes | None
    chunks: ChunkWork | None


@dataclass(frozen=True)
class LayerTables:
    """Where a step's rows are, seen by the layers of one kind of cache."""

    block_tables: torch.Tensor
    chunk_tables: torch.Tensor
    """The block tables that the items of chunks count rows of."""
    cache_slots: torch.Tensor


@dataclass(frozen=True)
class SelectedWork:
    """The last layer of a step that wants only the last tokens of some rows."""

    work: LayerWork
    block_tables: torch.Tensor
    """[wanted, max_blocks] int32."""


class TritonAttention:
    """Owns the KV cache of all layers. Implements `GraphAttention`.

    Args:
        dtype: of the cache: bfloat16, float16 or float8_e4m3fn.
        model_dtype: bfloat16 or float16; default that of the cache.
        scales: of a float8 cache, by layer; default 1.0.
        calibrate: see `PagedCache`.
        max_gathered: most tokens that prompts of a step can have; bounds the scratch for gathered pages.
        sliding: a second kind of cache, for some of the layers.
    """

    name = "triton"
    reads_before_window = PART_ALIGNMENT

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        model_dtype: torch.dtype | None = None,
        scales: Mapping[int, KvScales] | None = None,
        calibrate: bool = False,
        max_gathered: int = GATHERED_TOKENS,
        sliding: SlidingBlocks | None = None,
    ) -> None:
        kinds = CacheKinds(num_blocks, sliding)
        self.cache = PagedCache(layers, kinds, block_size, dtype, device, scales, calibrate=calibrate)
        self._layers = layers
        self._geometries = [Geometry.of(layer, kinds.of(i)) for i, layer in enumerate(layers)]
        self._dtype = dtype
        self._device = device
        self._overlap = overlap_supported(device)
        self._sms = sm_count(device)
        shapes = dict.fromkeys((layer.num_kv_heads, layer.head_dim) for layer in layers)
        limit = min(GATHERED_TOKENS, -(-max_gathered // LINE_ALIGNMENT) * LINE_ALIGNMENT)
        # The tensor memory accelerator, which gathered lines are for, came with compute capability 9.
        self._gathered = {
            shape: GatheredCache.allocate(shape[0], limit, shape[1], model_dtype or dtype, device) for shape in shapes if self._overlap
        }
        self._bundles: dict[int, tuple[SharedPrefixes, Bundles | None]] = {}
        """By rows a bundle: the last, which stay the same from step to step while no request comes or goes."""
        self._decodes = {g: Decodes(g, dtype, model_dtype or dtype, block_size, device) for g in dict.fromkeys(self._geometries)}
        self._chunk_parts = {
            g: PrefillWorkspace.allocate(g.num_kv_heads, g.head_dim, self._sms, device) for g in dict.fromkeys(self._geometries)
        }

    @staticmethod
    def bytes_per_block(layers: tuple[LayerSpec, ...], block_size: int, dtype: torch.dtype) -> int:
        return PagedCache.bytes_per_block(layers, block_size, dtype)

    @staticmethod
    def supports(layers: tuple[LayerSpec, ...], dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
        """Whether the kernels can run these layers: a 16-bit model with a cache like it or of float8, heads that fill a tile."""
        fits = dtype in (torch.bfloat16, torch.float16) and cache_dtype in (dtype, FLOAT8)
        return fits and all(16 <= layer.head_dim <= 256 for layer in layers)

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self.cache.copy_blocks(src, dst)

    @property
    def calibration(self) -> KvCalibration | None:
        """See `attention.base.Calibrated`."""
        return self.cache.calibration

    # Eager steps

    def plan(self, batch: StepBatch) -> Attend:
        arrays: list[Int32] = []
        drafts = {g: self._draft(batch, g, arrays) for g in dict.fromkeys(self._geometries)}
        planned = len(arrays)
        if (wanted := batch.cpu_wanted) is not None and len(wanted):
            # Each is one query over its whole context, whether it ends a chunk or not: a decode.
            g = self._geometries[-1]
            contexts = (batch.cpu_start + batch.cpu_count)[wanted]
            arrays += [self._decodes[g].plan(contexts, len(wanted), None), wanted]
        on_device = upload_many(arrays, self._device)
        work = {g: finish(on_device) for g, finish in drafts.items()}
        decodes, selected = batch.num_decodes, None
        if wanted is not None:
            numbers, rows = on_device[planned:] or (None, None)
            last = None if numbers is None else self._decodes[self._geometries[-1]].work(len(wanted), numbers)
            its_tables = batch.of_kind(self._geometries[-1].kind).block_tables
            if rows is not None and len(wanted) < len(batch.cpu_count):
                its_tables = its_tables.index_select(0, rows)
            selected = SelectedWork(LayerWork(last, None), its_tables)
        # Items of chunks count rows from the first of them.
        where = [LayerTables(b.block_tables, b.block_tables[decodes:], b.cache_slots) for b in map(batch.of_kind, self._kinds)]
        return self._attend_with(work, where, decodes, selected)

    @property
    def _kinds(self) -> range:
        return range(1 + max((g.kind for g in self._geometries), default=0))

    def _attend_with(
        self, work: Mapping[Geometry, LayerWork], tables: Sequence[LayerTables], decodes: int, selected: SelectedWork | None = None
    ) -> TritonAttend:
        """tables: by kind."""
        return TritonAttend(self, [work[g] for g in self._geometries], [tables[g.kind] for g in self._geometries], decodes, selected)

    def _draft(self, batch: StepBatch, g: Geometry, arrays: list[Int32]) -> functools.partial[LayerWork]:
        """Plan for one geometry; what the device needs is appended to `arrays`, whose uploads the returned function takes."""
        decodes, first = batch.num_decodes, len(arrays)
        if decodes:
            arrays.append(self._decode_plan(g, batch.cpu_start[:decodes] + 1, decodes, batch.shared))
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
        decode_work = self._decodes[g].work(decodes, next(mine)) if decodes else None
        if tuning is None:
            return LayerWork(decode_work, None)
        items = next(mine)
        if not gather:
            return LayerWork(decode_work, ChunkWork(items, tuning, None, None, None))
        return LayerWork(decode_work, ChunkWork(items, tuning, next(mine), next(mine), self._gathered[g.num_kv_heads, g.head_dim]))

    def _decode_plan(self, g: Geometry, context_lens: Int32, rows: int, shared: SharedPrefixes | None) -> Int32:
        bundles = None if shared is None or g.most_bundled == 1 else self._bundled(shared, g.most_bundled)
        return self._decodes[g].plan(context_lens, rows, bundles)

    def _bundled(self, shared: SharedPrefixes, most: int) -> Bundles | None:
        known = self._bundles.get(most)
        if known is None or known[0] is not shared:
            known = self._bundles[most] = shared, bundle_rows(shared.order, shared.common, most)
        return known[1]

    # Graphs

    def _chunk_tuning(self, g: Geometry, shape: GraphShape) -> PrefillTuning:
        """One for all steps of a shape. They are too short for gathering pages to pay, or for the largest tiles."""
        return prefill_tuning(g.head_dim, g.group, shape.tokens, 0.0, gathered=False)

    def _graph_sizes(self, g: Geometry, shape: GraphShape) -> tuple[int, int]:
        """Numbers in the plans of decodes and of chunks."""
        decodes = self._decodes[g].capacity(shape.rows).size
        if not shape.chunks:
            return decodes, 0
        per_tile = self._chunk_tuning(g, shape).tokens_per_tile(g.group)
        return decodes, (shape.tokens // per_tile + shape.chunks + max_prefill_parts(g.num_kv_heads, self._sms)) * CHUNK_FIELDS

    def graph_plan_size(self, shape: GraphShape) -> int:
        return sum(sum(self._graph_sizes(g, shape)) for g in dict.fromkeys(self._geometries))

    def graph_plan(self, start: Int32, count: Int32, shape: GraphShape, out: Int32, shared: SharedPrefixes | None = None) -> None:
        place = 0
        num_decodes = int(np.count_nonzero(count == 1)) if shape.chunks else len(start)
        contexts = start[:num_decodes] + 1
        for g in dict.fromkeys(self._geometries):
            decodes, chunks = self._graph_sizes(g, shape)
            out[place : place + decodes] = self._decode_plan(g, contexts, shape.rows, shared)
            place += decodes
            if chunks:
                items = self._graph_chunks(g, start, count, num_decodes, shape).reshape(-1)
                out[place : place + len(items)] = items
                out[place + len(items) : place + chunks] = 0
                place += chunks

    def _graph_chunks(self, g: Geometry, start: Int32, count: Int32, num_decodes: int, shape: GraphShape) -> Int32:
        """[items, CHUNK_FIELDS] of the rows after the decodes, numbered as in the whole step."""
        per_tile = self._chunk_tuning(g, shape).tokens_per_tile(g.group)
        begin, chunk = start[num_decodes:], count[num_decodes:]
        items = plan_prefill(begin, chunk, num_decodes, per_tile, g.num_kv_heads, self._sms, sliding_window=g.sliding_window).items
        items[:, CHUNK_ROW] += num_decodes
        return items

    def graph_attend(self, plan: torch.Tensor, shape: GraphShape, tables: Sequence[KindTables]) -> Attend:
        work, place = {}, 0
        for g in dict.fromkeys(self._geometries):
            decodes, chunks = self._graph_sizes(g, shape)
            decode_work = self._decodes[g].work(shape.rows, plan[place : place + decodes])
            place += decodes
            chunk_work = None
            if chunks:
                chunk_items = plan[place : place + chunks].view(-1, CHUNK_FIELDS)
                chunk_work = ChunkWork(chunk_items, self._chunk_tuning(g, shape), None, None, None)
                place += chunks
            work[g] = LayerWork(decode_work, chunk_work)
        return self._attend_with(work, [LayerTables(t.block_tables, t.block_tables, t.cache_slots) for t in tables], shape.rows)

    # One layer

    def run(
        self, layer: int, work: LayerWork, q: torch.Tensor, block_tables: torch.Tensor, chunk_tables: torch.Tensor, decodes: int
    ) -> torch.Tensor:
        """Attend over what is cached. q: [tokens, heads, head_dim]; the same shape comes back."""
        spec, (keys, values), stored = self._layers[layer], self.cache.of(layer), self.cache.scale(layer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if work.decodes is not None:
            work.decodes.attend(q[:decodes], LayerCache(spec, keys, values, stored), block_tables[:decodes], out[:decodes])
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
                k_scale=stored.k,
                v_scale=stored.v,
                gathered=chunks.gathered,
                gathered_starts=chunks.gather_starts,
            )
        return out


@dataclass(frozen=True)
class TritonAttend:
    """Implements `Attend` and `layers.attention.WantedAttend`."""

    backend: TritonAttention
    work: list[LayerWork]
    """By layer."""
    tables: list[LayerTables]
    """By layer."""
    decodes: int
    """At most so many rows, the first, are decodes."""
    selected: SelectedWork | None = None

    @property
    def can_select(self) -> bool:
        return self.selected is not None

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.backend.cache.write(layer, k, v, self.tables[layer].cache_slots)
        return self._run(layer, q)

    def attend_qkv(self, layer: int, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None) -> torch.Tensor:
        q = self.backend.cache.write_qkv(layer, qkv, rotation, qk_norm, self.tables[layer].cache_slots)
        return self._run(layer, q).flatten(1)

    def _run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        where = self.tables[layer]
        return self.backend.run(layer, self.work[layer], q, where.block_tables, where.chunk_tables, self.decodes)

    def attend_wanted(
        self, layer: int, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, wanted: torch.Tensor
    ) -> torch.Tensor:
        assert self.selected is not None
        q = self.backend.cache.write_qkv(layer, qkv, rotation, qk_norm, self.tables[layer].cache_slots).index_select(0, wanted)
        tables = self.selected.block_tables
        return self.backend.run(layer, self.selected.work, q, tables, tables, len(wanted)).flatten(1)
