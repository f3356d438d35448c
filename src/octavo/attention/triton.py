"""Paged attention by this project's kernels for NVIDIA GPUs, for 16-bit and float8 caches: Triton's, and where they win those in CUDA C++.

A step is planned once on the CPU from lengths known there: work items for the decodes (`decodes`), tiles for the prompt chunks
(`chunks`), and where many queries read each key, lines to gather the pages into. One upload carries all of it. A layer then is one launch for norm,
rotation and cache write, one for its decodes and one (or two) for its chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.attention.base import Attend, GraphShape, KindTables, KvScales, LayerSpec, SharedPrefixes, StepBatch
from octavo.attention.chunks import ChunkDraft, Chunks, CudaChunks, GatheredChunks, TritonChunks, cuda_form
from octavo.attention.decodes import CudaDecodes, Decodes, Geometry, LayerCache, TritonDecodes
from octavo.attention.kinds import CacheKinds, SlidingBlocks
from octavo.attention.kv_calibration import FLOAT8, KvCalibration
from octavo.attention.paged_cache import PagedCache
from octavo.layers.attention import QkNorm
from octavo.layers.rope import Rotation
from octavo.ops.transfer import upload_many
from octavo.ops.triton.decode_plan import Bundles, bundle_rows
from octavo.ops.triton.gather_cache import LINE_ALIGNMENT, GatheredCache
from octavo.ops.triton.launch import overlap_supported
from octavo.ops.triton.prefill_plan import PART_ALIGNMENT
from octavo.protocol.step import Int32

GATHERED_TOKENS = 32768
"""Most tokens of a step's prompts that are gathered into lines; longer prefixes are read page by page."""


@dataclass(frozen=True)
class LayerWork:
    """A step, seen by the layers of one geometry."""

    decodes: TritonDecodes | CudaDecodes | None
    chunks: TritonChunks | CudaChunks | GatheredChunks | None


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
        geometries, model_dtype = list(dict.fromkeys(self._geometries)), model_dtype or dtype
        limit = min(GATHERED_TOKENS, -(-max_gathered // LINE_ALIGNMENT) * LINE_ALIGNMENT)
        # Triton's kernel reads gathered pages by the tensor memory accelerator, which came with compute capability 9.
        shapes = {
            (g.num_kv_heads, g.head_dim)
            for g in geometries
            if overlap_supported(device) and cuda_form(g, dtype, model_dtype, block_size, device) is None
        }
        gathered = {shape: GatheredCache.allocate(shape[0], limit, shape[1], model_dtype, device) for shape in shapes}
        self._bundles: dict[int, tuple[SharedPrefixes, Bundles | None]] = {}
        """By rows a bundle: the last, which stay the same from step to step while no request comes or goes."""
        self._decodes = {g: Decodes(g, dtype, model_dtype, block_size, device) for g in geometries}
        self._chunks = {
            g: Chunks(g, dtype, model_dtype, block_size, device, gathered.get((g.num_kv_heads, g.head_dim))) for g in geometries
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
        decodes, first, chunks = batch.num_decodes, len(arrays), None
        if decodes:
            arrays.append(self._decode_plan(g, batch.cpu_start[:decodes] + 1, decodes, batch.shared))
        if decodes < len(batch.cpu_count):
            chunks = self._chunks[g].draft(batch.cpu_start[decodes:], batch.cpu_count[decodes:], decodes)
            arrays += chunks.arrays
        return functools.partial(self._work, g, first, decodes, chunks)

    def _work(self, g: Geometry, first: int, decodes: int, chunks: ChunkDraft | None, arrays: list[torch.Tensor]) -> LayerWork:
        mine = arrays[first:]
        decode_work = self._decodes[g].work(decodes, mine.pop(0)) if decodes else None
        return LayerWork(decode_work, None if chunks is None else chunks.finish(mine))

    def _decode_plan(self, g: Geometry, context_lens: Int32, rows: int, shared: SharedPrefixes | None) -> Int32:
        bundles = None if shared is None or g.most_bundled == 1 else self._bundled(shared, g.most_bundled)
        return self._decodes[g].plan(context_lens, rows, bundles)

    def _bundled(self, shared: SharedPrefixes, most: int) -> Bundles | None:
        known = self._bundles.get(most)
        if known is None or known[0] is not shared:
            known = self._bundles[most] = shared, bundle_rows(shared.order, shared.common, most)
        return known[1]

    # Graphs

    def _graph_sizes(self, g: Geometry, shape: GraphShape) -> tuple[int, int]:
        """Numbers in the plans of decodes and of chunks."""
        return self._decodes[g].capacity(shape.rows).size, self._chunks[g].graph_size(shape)

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
                out[place : place + chunks] = self._chunks[g].graph_plan(start, count, num_decodes, shape)
                place += chunks

    def graph_attend(self, plan: torch.Tensor, shape: GraphShape, tables: Sequence[KindTables]) -> Attend:
        work, place = {}, 0
        for g in dict.fromkeys(self._geometries):
            decodes, chunks = self._graph_sizes(g, shape)
            decode_work = self._decodes[g].work(shape.rows, plan[place : place + decodes])
            place += decodes
            chunk_work = self._chunks[g].graph_work(plan[place : place + chunks], shape) if chunks else None
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
        cache = LayerCache(spec, keys, values, stored)
        if work.decodes is not None:
            work.decodes.attend(q[:decodes], cache, block_tables[:decodes], out[:decodes])
        if work.chunks is not None:
            work.chunks.attend(q, cache, chunk_tables, out)
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
