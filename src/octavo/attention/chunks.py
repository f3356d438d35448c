"""`Chunks`: which kernel attends to the prompt chunks of a step, and the plans that it takes.

CUDA C++ (`ops.cuda.paged_prefill`) where it runs, takes the layers and is known to be the faster one; all else: Triton. The former reads
16-bit pages: those of a float8 cache are gathered into such first, where enough queries look at each key and the step is not captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from octavo.attention.base import GraphShape
from octavo.attention.decodes import Geometry, LayerCache
from octavo.attention.kv_calibration import FLOAT8
from octavo.attention.paged_cache import ScaleOfLayer
from octavo.ops.cuda import chunk_plan, compiled
from octavo.ops.cuda import paged_prefill as cuda
from octavo.ops.cuda.compiler import architecture
from octavo.ops.triton.gather_cache import LINE_ALIGNMENT, GatheredCache, GatherPlan, gather_cache, plan_gather
from octavo.ops.triton.launch import compiles_only, sm_count
from octavo.ops.triton.paged_prefill import (
    GATHER_FROM,
    PrefillTuning,
    PrefillWorkspace,
    paged_prefill,
    prefill_tuning,
    queries_per_key,
)
from octavo.ops.triton.prefill_plan import ITEM_FIELDS, ROW, max_prefill_parts, plan_prefill
from octavo.protocol.step import Int32


@dataclass(frozen=True)
class TritonChunks:
    """A step's chunks, planned for Triton's kernel."""

    items: torch.Tensor
    tuning: PrefillTuning
    workspace: PrefillWorkspace
    gather_chunks: torch.Tensor | None = None
    gather_starts: torch.Tensor | None = None
    gathered: GatheredCache | None = None

    def attend(self, q: torch.Tensor, cache: LayerCache, block_tables: torch.Tensor, out: torch.Tensor) -> None:
        spec, keys, values = cache.spec, cache.keys, cache.values
        if self.gathered is not None and self.gather_chunks is not None:
            gather_cache(keys, values, block_tables, self.gather_chunks, self.gathered)
        paged_prefill(
            q,
            keys,
            values,
            block_tables,
            self.items,
            self.workspace,
            out,
            scale=spec.scale,
            tuning=self.tuning,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
            k_scale=cache.stored.k,
            v_scale=cache.stored.v,
            gathered=self.gathered,
            gathered_starts=self.gather_starts,
        )


@dataclass(frozen=True)
class CudaChunks:
    """A step's chunks, planned for the kernel in CUDA C++."""

    items: torch.Tensor
    parts: cuda.Parts
    form: cuda.Form

    def attend(self, q: torch.Tensor, cache: LayerCache, block_tables: torch.Tensor, out: torch.Tensor) -> None:
        if compiles_only():
            return  # What the plan is copied by has not run.
        cuda.paged_prefill(q, cache.keys, cache.values, block_tables, self.items, self.parts, out, self.form, scale=cache.spec.scale)


@dataclass(frozen=True)
class GatheredChunks:
    """A step's chunks over a float8 cache, whose keys and values become 16-bit pages for the kernel in CUDA C++."""

    chunks: CudaChunks
    lines: torch.Tensor
    """What to gather."""
    tables: torch.Tensor
    """The block tables of what was."""
    gathered: GatheredCache

    def attend(self, q: torch.Tensor, cache: LayerCache, block_tables: torch.Tensor, out: torch.Tensor) -> None:
        scales = cache.stored
        gather_cache(cache.keys, cache.values, block_tables, self.lines, self.gathered, k_scale=scales.k, v_scale=scales.v)
        keys, values = self.gathered.pages()
        self.chunks.attend(q, LayerCache(cache.spec, keys, values, ScaleOfLayer(None, None)), self.tables, out)


@dataclass(frozen=True)
class ChunkDraft:
    """A plan on its way to the device."""

    arrays: list[Int32]
    finish: Callable[[list[torch.Tensor]], TritonChunks | CudaChunks | GatheredChunks]
    """Takes `arrays` on the device."""


def cuda_form(g: Geometry, dtype: torch.dtype, model_dtype: torch.dtype, block_size: int, device: torch.device) -> cuda.Form | None:
    """Of the CUDA C++ kernel for these layers; None where it does not run, does not take them or is not known to be faster."""
    if architecture(device) is None or g.sliding_window is not None or g.capped:
        return None
    form = cuda.form_of(model_dtype, dtype, g.head_dim, block_size, g.num_kv_heads, g.group)
    return form if form is not None and cuda.wins(form) else None


class Chunks:
    """Plans and workspaces for the layers of one geometry.

    Args:
        dtype: of the cache.
        model_dtype: of queries.
        block_size: tokens of a cache block.
        gathered: scratch for a layer's pages, shared with other geometries of its shape; None: pages are not gathered.
    """

    def __init__(
        self,
        g: Geometry,
        dtype: torch.dtype,
        model_dtype: torch.dtype,
        block_size: int,
        device: torch.device,
        gathered: GatheredCache | None,
    ) -> None:
        self._g, self._device, self._gathered = g, device, gathered
        self._sms = sm_count(device)
        self._form = cuda_form(g, dtype, model_dtype, block_size, device)
        self._gathered_form = None
        """Of the kernel over gathered pages."""
        if gathered is not None and dtype == FLOAT8:
            self._gathered_form = cuda_form(g, model_dtype, model_dtype, LINE_ALIGNMENT, device)
        for form in (self._form, self._gathered_form):
            if form is not None:
                compiled.prepare(form, device)

    @functools.cached_property
    def _compiled(self) -> cuda.Form | None:
        return self._when_ready(self._form)

    @functools.cached_property
    def _compiled_for_gathered(self) -> cuda.Form | None:
        return self._when_ready(self._gathered_form)

    def _when_ready(self, form: cuda.Form | None) -> cuda.Form | None:
        return form if form is not None and compiled.Kind("prompt attention").finish_preparing([form], self._device) else None

    # Buffers are made when they are first asked for: only one kind of them is.

    @functools.cached_property
    def _workspace(self) -> PrefillWorkspace:
        return PrefillWorkspace.allocate(self._g.num_kv_heads, self._g.head_dim, self._sms, self._device)

    @functools.cached_property
    def _parts(self) -> cuda.Parts:
        form = self._form or self._gathered_form
        assert form is not None
        return cuda.Parts.allocate(form, self._sms, self._device)

    # Eager steps

    def draft(self, start: Int32, count: Int32, first_token: int) -> ChunkDraft:
        """A plan for a step's chunks, whose rows follow each other from token `first_token` of the batch on. start, count: [rows]."""
        g = self._g
        if (form := self._compiled) is not None:
            items = self._cuda_items(start, count, first_token, form)
            return ChunkDraft([items], lambda on_device: CudaChunks(on_device[0], self._parts, form))
        reuse = queries_per_key(start, count)
        lines = plan_gather(start + count)
        gathered = self._gathered
        if gathered is not None and lines.tokens > gathered.keys.shape[1]:
            gathered = None
        if gathered is not None and reuse >= cuda.GATHER_FROM and self._compiled_for_gathered is not None:
            return self._gathered_draft(start, count, first_token, lines, gathered, self._compiled_for_gathered)
        if reuse < GATHER_FROM:
            gathered = None
        tuning = prefill_tuning(g.head_dim, g.group, int(count.max()), reuse, gathered=gathered is not None)
        items = self._items(start, count, first_token, tuning)
        if gathered is None:
            return ChunkDraft([items], lambda on_device: TritonChunks(on_device[0], tuning, self._workspace))
        arrays = [items, lines.chunks, lines.starts]
        return ChunkDraft(
            arrays, lambda on_device: TritonChunks(on_device[0], tuning, self._workspace, on_device[1], on_device[2], gathered)
        )

    def _gathered_draft(
        self, start: Int32, count: Int32, first_token: int, lines: GatherPlan, gathered: GatheredCache, form: cuda.Form
    ) -> ChunkDraft:
        def finish(on_device: list[torch.Tensor]) -> GatheredChunks:
            items, chunks, tables = on_device[:3]
            return GatheredChunks(CudaChunks(items, self._parts, form), chunks, tables, gathered)

        return ChunkDraft([self._cuda_items(start, count, first_token, form), lines.chunks, lines.tables()], finish)

    def _items(self, start: Int32, count: Int32, first_token: int, tuning: PrefillTuning) -> Int32:
        g = self._g
        per_tile = tuning.tokens_per_tile(g.group)
        return plan_prefill(start, count, first_token, per_tile, g.num_kv_heads, self._sms, sliding_window=g.sliding_window).items

    def _cuda_items(self, start: Int32, count: Int32, first_token: int, form: cuda.Form) -> Int32:
        return chunk_plan.plan_chunks(start, count, first_token, form.tokens, form.kv_heads, self._sms)

    # Graphs

    def _tuning(self, shape: GraphShape) -> PrefillTuning:
        """One for all steps of a shape. They are too short for gathering pages to pay, or for the largest tiles."""
        return prefill_tuning(self._g.head_dim, self._g.group, shape.tokens, 0.0, gathered=False)

    def graph_size(self, shape: GraphShape) -> int:
        """Numbers in a plan."""
        if not shape.chunks:
            return 0
        if (form := self._compiled) is not None:
            most = chunk_plan.most_items(shape.tokens, shape.chunks, form.tokens, form.kv_heads, self._sms)
            return most * chunk_plan.ITEM_FIELDS
        tiles = shape.tokens // self._tuning(shape).tokens_per_tile(self._g.group) + shape.chunks
        size = (tiles + max_prefill_parts(self._g.num_kv_heads, self._sms)) * ITEM_FIELDS
        return -(-size // 4) * 4  # What follows begins at a multiple of 16 bytes.

    def graph_plan(self, start: Int32, count: Int32, first_row: int, shape: GraphShape) -> Int32:
        """[graph_size] a plan of the rows from `first_row` on, numbered as in the whole step; each before has one token."""
        chunks = start[first_row:], count[first_row:], first_row
        if (form := self._compiled) is not None:
            items = self._cuda_items(*chunks, form)
            items[:, chunk_plan.ROW] += first_row
        else:
            items = self._items(*chunks, self._tuning(shape))
            items[:, ROW] += first_row
        plan = np.zeros(self.graph_size(shape), np.int32)
        plan[: items.size] = items.reshape(-1)
        return plan

    def graph_work(self, plan: torch.Tensor, shape: GraphShape) -> TritonChunks | CudaChunks:
        """The chunks of a plan whose numbers are in `plan` when they run."""
        if (form := self._compiled) is not None:
            return CudaChunks(plan.view(-1, chunk_plan.ITEM_FIELDS), self._parts, form)
        items = plan[: len(plan) // ITEM_FIELDS * ITEM_FIELDS].view(-1, ITEM_FIELDS)
        return TritonChunks(items, self._tuning(shape), self._workspace)
