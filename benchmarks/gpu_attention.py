"""Paged attention kernels on one GPU: measured time against the floor (cache bytes over the read bandwidth, or FLOPs).

    python benchmarks/gpu_attention.py            the shipped tunings, checked and timed
    python benchmarks/gpu_attention.py --tune     every tuning in the grids below, best first
    python benchmarks/gpu_attention.py --only 'decode 8B'    some cases; the results of others are kept

Times are CUDA-graph replays over several layers' caches, so that the L2 cache does not answer and launches cost what they cost
in serving. Decode attention stands behind the launch that it follows in the engine (norm, rotation and cache write), because the two
overlap: its time is that of both less that of a graph of the others alone. `alone` is the kernel behind itself. A prompt's attention
is timed by itself and, where a case says so, between a layer's matmuls, which bring the card to its power limit and its clock down.
Where two kernels take a case, both are timed, those of a prompt in turns, since the clock falls while they run; a star marks the one
that the engine runs.
Prints a table and writes benchmarks/results/gpu_attention.json.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from octavo.ops.cuda import compiled
from octavo.ops.cuda import paged_decode as cuda
from octavo.ops.cuda import paged_prefill as cuda_prefill
from octavo.ops.cuda.chunk_plan import plan_chunks
from octavo.ops.cuda.compiler import architecture
from octavo.ops.cuda.even_plan import even_capacity, plan_even
from octavo.ops.triton.decode_plan import Bundles, bundle_limit, bundle_rows, decode_capacity, plan_decode
from octavo.ops.triton.gather_cache import LINE_ALIGNMENT, GatheredCache, gather_cache, plan_gather
from octavo.ops.triton.paged_decode import DecodeTuning, DecodeWorkspace, decode_tuning, paged_decode
from octavo.ops.triton.paged_prefill import (
    GATHER_FROM,
    PrefillTuning,
    PrefillWorkspace,
    paged_prefill,
    prefill_items,
    prefill_tuning,
    queries_per_key,
)
from octavo.ops.triton.prefill_plan import plan_prefill
from octavo.ops.triton.rope_cache import rope_cache

READ_BYTES_PER_S = 4.55e12
"""A read-only stream through a kernel on an H200."""
BLOCK = 16
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class DecodeCase:
    name: str
    rows: int
    context: int
    heads: int
    kv_heads: int = 8
    head_dim: int = 128
    spread: int = 0
    """Contexts lie within so many tokens of `context`, evenly."""
    cache_dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    shared: int = 0
    """Tokens that all rows have in common, in the same blocks."""
    bundled: bool = False
    """Read what is shared for several rows at once."""

    def contexts(self) -> np.ndarray:
        rng = random.Random(0)
        return np.array([rng.randint(self.context - self.spread, self.context + self.spread) for _ in range(self.rows)], dtype=np.int32)

    def bytes_read(self) -> int:
        """Each cached number once."""
        contexts = self.contexts()
        tokens = int(np.minimum(contexts, self.window or contexts).sum()) - self.shared * (self.rows - 1)
        return tokens * self.kv_heads * self.head_dim * 2 * self.cache_dtype.itemsize

    @property
    def most_bundled(self) -> int:
        return bundle_limit(self.heads // self.kv_heads) if self.window is None else 1

    def bundles(self) -> Bundles | None:
        if not self.bundled:
            return None
        common = np.full(self.rows, self.shared, dtype=np.int32)
        return bundle_rows(np.arange(self.rows, dtype=np.int32), common, self.most_bundled)


SMALL, LARGE = 16, 32
"""Query heads of the 0.6B and the 8B shape."""
FLOAT8 = torch.float8_e4m3fn
DECODE_CASES = (
    DecodeCase("8B 256x843", 256, 843, LARGE, spread=211),
    DecodeCase("0.6B 256x843", 256, 843, SMALL, spread=211),
    DecodeCase("8B 32x4096", 32, 4096, LARGE),
    DecodeCase("8B 64x843", 64, 843, LARGE, spread=211),
    DecodeCase("8B 1x8192", 1, 8192, LARGE),
    DecodeCase("8B 1x1024", 1, 1024, LARGE),
    # From the first third to the tail of a run in which requests of different lengths end one by one.
    *(
        DecodeCase(f"0.6B {n}x{c}", n, c, SMALL, spread=450)
        for n, c in ((128, 1200), (96, 1300), (48, 1450), (24, 1500), (12, 1600), (6, 1700))
    ),
    *(DecodeCase(f"8B {n}x{c}", n, c, LARGE, spread=450) for n, c in ((384, 1000), (192, 1300), (96, 1400), (48, 1500), (24, 1600))),
    DecodeCase("8B 64x(2048+200)", 64, 2248, LARGE, spread=50, shared=2048),
    DecodeCase("8B 64x(2048+200) bundled", 64, 2248, LARGE, spread=50, shared=2048, bundled=True),
    DecodeCase("0.6B 128x(512+400)", 128, 912, SMALL, spread=200, shared=512),
    DecodeCase("0.6B 128x(512+400) bundled", 128, 912, SMALL, spread=200, shared=512, bundled=True),
    DecodeCase("8B 32x4096 window 1024", 32, 4096, LARGE, spread=450, window=1024),
    DecodeCase("64x1500 dim 64", 64, 1500, LARGE, head_dim=64, spread=450),
    DecodeCase("64x1500 dim 80", 64, 1500, LARGE, head_dim=80, spread=450),
    DecodeCase("64x1500 dim 96", 64, 1500, LARGE, head_dim=96, spread=450),
    DecodeCase("64x1500 dim 256", 64, 1500, 16, kv_heads=4, head_dim=256, spread=450),
    DecodeCase("8B 256x4096", 256, 4096, LARGE),
    *(
        DecodeCase(f"8B fp8 {n}x{c}", n, c, LARGE, spread=c // 4 if c < 1024 else 0, cache_dtype=FLOAT8)
        for n, c in ((256, 4096), (256, 843), (32, 4096), (64, 843), (1, 8192), (512, 1024), (1000, 512), (256, 256))
    ),
    DecodeCase("8B fp8 64x(2048+200) bundled", 64, 2248, LARGE, spread=50, shared=2048, bundled=True, cache_dtype=FLOAT8),
    DecodeCase("8B fp8 32x4096 window 1024", 32, 4096, LARGE, spread=450, window=1024, cache_dtype=FLOAT8),
    DecodeCase("0.6B fp8 256x843", 256, 843, SMALL, spread=211, cache_dtype=FLOAT8),
    DecodeCase("fp8 64x1500 dim 64", 64, 1500, LARGE, head_dim=64, spread=450, cache_dtype=FLOAT8),
)


def graph_us(layers: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Median microseconds of one call, replaying all of them as one graph."""
    layers[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            layer()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    times: list[float] = []
    for _ in range(repeats):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(layers))
    return statistics.median(times)


def turns_us(calls: Sequence[Sequence[Callable[[], object]]], repeats: int = 7) -> list[float]:
    """As `graph_us` for each, a replay of each in turn."""
    graphs = []
    for layers in calls:
        layers[0]()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for layer in layers:
                layer()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for graph, layers, mine in zip(graphs, calls, times, strict=True):
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            mine.append(begin.elapsed_time(end) * 1e3 / len(layers))
    return [statistics.median(mine[1:]) for mine in times]


def hot_us(calls: Sequence[Callable[[], object]], tokens: int) -> list[float]:
    """Median microseconds of each call between matmuls of an 8B layer, once they have run long enough to reach the power limit."""
    x, up, down = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in ((tokens, 4096), (4096, 28672), (14336, 4096)))
    events: list[list[list[torch.cuda.Event]]] = [[] for _ in calls]
    for _ in range(60):
        for call, mine in zip(calls, events, strict=True):
            wide = x @ up
            torch.matmul(wide[:, :14336], down)
            mine.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])  # type: ignore[no-untyped-call]
            mine[-1][0].record()
            call()
            mine[-1][1].record()
    torch.cuda.synchronize()
    return [statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in mine[30:]) for mine in events]


def random_cache(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).to(dtype)


def tables(contexts: np.ndarray, shared: int = 0) -> tuple[torch.Tensor, int]:
    """(block tables, blocks in the cache); the first `shared` tokens of all rows are in the blocks of the first."""
    needed = [-(-int(n) // BLOCK) for n in contexts]
    order = torch.randperm(sum(needed)).int() + 1
    table, used = torch.zeros(len(needed), -(-max(needed) // 4) * 4, dtype=torch.int32), 0
    for row, n in enumerate(needed):
        table[row, :n] = order[used : used + n]
        used += n
    table[:, : shared // BLOCK] = table[0, : shared // BLOCK]
    return table.to(DEVICE), used + 1


def reference_row(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, start: int, count: int, window: int | None = None
) -> torch.Tensor:
    """[count, heads, head_dim] float32 of one row; q [count, heads, head_dim]."""
    context = start + count
    blocks = table[: -(-context // BLOCK)].long()
    k, v = (cache[blocks].float().transpose(0, 1).flatten(1, 2)[:, :context] for cache in (key, value))
    group = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.einsum("thd,hsd->hts", q.float(), k) * q.shape[2] ** -0.5
    hidden = torch.arange(context, device=DEVICE) > torch.arange(start, context, device=DEVICE)[:, None]
    if window is not None:
        hidden |= torch.arange(context, device=DEVICE) <= torch.arange(start, context, device=DEVICE)[:, None] - window
    return torch.einsum("hts,hsd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def decode_variants(case: DecodeCase, tune: bool) -> list[DecodeTuning]:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    shipped = decode_tuning(case.head_dim, case.cache_dtype.itemsize, case.rows, case.kv_heads, sms, overlap=True)
    if not tune:
        return [shipped]
    grid = ((64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 2, 2), (128, 4, 2), (32, 4, 3))
    variants = [replace(shipped, tile=tile, warps=warps, stages=stages) for tile, warps, stages in grid]
    variants += [replace(shipped, parts_at_once=parts) for parts in (2, 8)]
    return [shipped, *(v for v in variants if v != shipped)]


@dataclass(frozen=True)
class PlannedDecode:
    """One kernel, with a plan of a case."""

    kernel: str
    shipped: bool
    """Whether the engine runs it for such a step."""
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]
    """Of queries, keys, values, block tables and the output."""
    plan_us: float
    items: int
    parts: int
    tuning: dict[str, object]


def form_of(case: DecodeCase) -> cuda.Form | None:
    """Of the kernel in CUDA C++, where it runs and takes the case."""
    if architecture(torch.device("cuda", 0)) is None:
        return None
    bundles = case.rows > 1 and case.most_bundled > 1
    group = case.heads // case.kv_heads
    return cuda.form_of(torch.bfloat16, case.cache_dtype, case.head_dim, BLOCK, case.kv_heads, group, bundles=bundles)


def planned_decodes(case: DecodeCase, contexts: np.ndarray, tune: bool) -> list[PlannedDecode]:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    scales = None if case.cache_dtype == torch.bfloat16 else torch.ones(1, device=DEVICE)
    bundles, scale = case.bundles(), case.head_dim**-0.5

    def timed(plan: Callable[[], Any]) -> tuple[Any, float]:
        plan()
        begin = time.perf_counter()
        return plan(), (time.perf_counter() - begin) * 1e6

    form = form_of(case)
    few = form is not None and case.rows <= cuda.most_rows(case.head_dim, case.cache_dtype.itemsize, case.kv_heads, sms)
    capacity = decode_capacity(case.rows, case.kv_heads, sms, bundle=case.most_bundled)
    plan, plan_us = timed(lambda: plan_decode(contexts, case.kv_heads, sms, capacity, sliding_window=case.window, bundles=bundles))
    workspace = DecodeWorkspace.allocate(capacity, case.heads, case.kv_heads, case.head_dim, DEVICE)
    workspace.load(plan)
    options = {"scale": scale, "k_scale": scales, "v_scale": scales, "sliding_window": case.window}
    found: list[PlannedDecode] = []
    for i, tuning in enumerate(decode_variants(case, tune)):

        def run(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: torch.Tensor, out: torch.Tensor, tuning: DecodeTuning = tuning
        ) -> None:
            paged_decode(q, k, v, t, workspace, out, tuning=tuning, **options)

        found.append(PlannedDecode("triton", not few and i == 0, run, plan_us, plan.num_items, plan.num_parts, vars(tuning)))
    if form is not None:
        even = even_capacity(case.rows, case.kv_heads, sms, bundle=case.most_bundled)
        plan, plan_us = timed(lambda: plan_even(contexts, even, sliding_window=case.window, bundles=bundles))
        even_workspace = cuda.EvenWorkspace.allocate(even, case.heads // case.kv_heads, case.head_dim, DEVICE)
        even_workspace.load(plan)

        def run_even(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: torch.Tensor, out: torch.Tensor) -> None:
            cuda.paged_decode(q, k, v, t, even_workspace, out, form, **options)

        found.append(PlannedDecode("cuda", few, run_even, plan_us, plan.num_items, plan.num_parts, {"stages": form.stages}))
    return found


def bench_decode(case: DecodeCase, tune: bool) -> list[dict[str, object]]:
    contexts = case.contexts()
    table, num_blocks = tables(contexts, case.shared)
    size = case.bytes_read()
    layers = max(2, min(20, int(4e8 / size) + 2))
    shape = (num_blocks, case.kv_heads, BLOCK, case.head_dim)
    caches = [(random_cache(shape, case.cache_dtype), random_cache(shape, case.cache_dtype)) for _ in range(layers)]
    q = torch.randn(case.rows, case.heads, case.head_dim, device=DEVICE, dtype=torch.bfloat16)
    qkv = torch.randn(case.rows, (case.heads + 2 * case.kv_heads) * case.head_dim, device=DEVICE, dtype=torch.bfloat16)
    positions = torch.from_numpy(contexts - 1).to(DEVICE).long()
    slots = table.gather(1, positions[:, None] // BLOCK)[:, 0].long() * BLOCK + positions % BLOCK
    # Turned by 45 degrees again and again: what stays in place must not grow.
    cos_sin = torch.full((int(contexts.max()), case.head_dim), 0.5**0.5, device=DEVICE)
    scales = None if case.cache_dtype == torch.bfloat16 else torch.ones(1, device=DEVICE)

    def before(layer: int) -> None:
        rope_cache(qkv, positions, cos_sin, slots, *caches[layer], case.heads, k_scale=scales, v_scale=scales)

    before_us = graph_us([functools.partial(before, layer) for layer in range(layers)])
    checked = [0, case.rows // 2, case.rows - 1]
    results: list[dict[str, object]] = []
    for planned in planned_decodes(case, contexts, tune):
        out = torch.full_like(q, float("nan"))
        # Each time, since `before` turns what it writes further.
        expected = torch.cat([reference_row(q[r : r + 1], *caches[0], table[r], int(contexts[r]) - 1, 1, case.window) for r in checked])

        def call(layer: int, out: torch.Tensor = out, planned: PlannedDecode = planned) -> None:
            planned.run(q, *caches[layer], table, out)

        def both(layer: int, call: Callable[[int], None] = call) -> None:
            before(layer)
            call(layer)

        try:
            call(0)
        except triton.runtime.errors.OutOfResources as refusal:
            print(f"{case.name} {planned.tuning}: {refusal}", file=sys.stderr)
            continue
        error = float((out[checked].float() - expected).norm() / expected.norm())
        us = graph_us([functools.partial(both, layer) for layer in range(layers)]) - before_us
        alone = graph_us([functools.partial(call, layer) for layer in range(layers)])
        floor = size / READ_BYTES_PER_S * 1e6
        results.append(
            {
                "case": case.name,
                "kernel": planned.kernel,
                "shipped": planned.shipped,
                "us": round(us, 2),
                "alone_us": round(alone, 2),
                "floor_us": round(floor, 2),
                "of_floor": round(floor / us, 4),
                "error": error if np.isfinite(error) else None,
                "plan_us": round(planned.plan_us),
                "items": planned.items,
                "parts": planned.parts,
                "tuning": planned.tuning,
            }
        )
    return sorted(results, key=lambda result: result["us"])  # type: ignore[arg-type, return-value]


@dataclass(frozen=True)
class PrefillCase:
    name: str
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hot: bool = False
    """Timed between a layer's matmuls."""
    cache_dtype: torch.dtype = torch.bfloat16

    def flops(self) -> float:
        pairs = sum(count * start + count * (count + 1) / 2 for start, count in zip(self.starts, self.counts, strict=True))
        return 4.0 * pairs * self.heads * self.head_dim


PREFILL_CASES = (
    PrefillCase("8k from 0", (0,), (8192,)),
    PrefillCase("8k from 0, hot", (0,), (8192,), hot=True),
    PrefillCase("8k behind 24k", (24576,), (8192,)),
    PrefillCase("4k from 0", (0,), (4096,)),
    PrefillCase("2k from 0", (0,), (2048,)),
    PrefillCase("2k behind 8k", (8192,), (2048,)),
    PrefillCase("2k behind 8k, hot", (8192,), (2048,), hot=True),
    PrefillCase("1k behind 4k", (4096,), (1024,)),
    PrefillCase("512 behind 8k", (8192,), (512,)),
    PrefillCase("256 behind 8k", (8192,), (256,)),
    PrefillCase("14 x 560", (0,) * 14, (560,) * 14),
    PrefillCase("0.6B 14 x 560", (0,) * 14, (560,) * 14, heads=16),
    PrefillCase("128 behind 8k", (8192,), (128,)),
    PrefillCase("32 behind 8k", (8192,), (32,)),
    PrefillCase("64 behind 16k", (16384,), (64,)),
    PrefillCase("8 x 20 behind 2k", (2048,) * 8, (20,) * 8),
    PrefillCase("32 x 8 behind 1k", (1024,) * 32, (8,) * 32),
    PrefillCase("128 from 0", (0,), (128,)),
    PrefillCase("512 from 0", (0,), (512,)),
    PrefillCase("8 x 128", (0,) * 8, (128,) * 8),
    PrefillCase("32 x 16", (0,) * 32, (16,) * 32),
    PrefillCase("0.6B 128 behind 2k", (2048,), (128,), heads=16),
    PrefillCase("70B, a rank of 8: 8k from 0", (0,), (8192,), heads=8, kv_heads=1),
    *(
        PrefillCase(f"fp8 {name}", (start,) * rows, (count,) * rows, cache_dtype=FLOAT8)
        for name, rows, start, count in (
            ("8k from 0", 1, 0, 8192),
            ("2k from 0", 1, 0, 2048),
            ("2k behind 8k", 1, 8192, 2048),
            ("512 behind 8k", 1, 8192, 512),
            ("256 behind 8k", 1, 8192, 256),
            ("128 behind 8k", 1, 8192, 128),
            ("64 behind 16k", 1, 16384, 64),
            ("32 behind 8k", 1, 8192, 32),
            ("16 behind 8k", 1, 8192, 16),
            ("8 x 20 behind 2k", 8, 2048, 20),
            ("14 x 560", 14, 0, 560),
            ("16 x 200", 16, 0, 200),
            ("32 x 64", 32, 0, 64),
        )
    ),
    PrefillCase("4k from 0, dim 64", (0,), (4096,), head_dim=64),
    PrefillCase("4k from 0, dim 256", (0,), (4096,), heads=16, kv_heads=4, head_dim=256),
)


def prefill_variants(case: PrefillCase, tune: bool) -> list[tuple[PrefillTuning, bool]]:
    group = case.heads // case.kv_heads
    reuse = queries_per_key(np.array(case.starts), np.array(case.counts))
    if not tune:
        gathered = reuse >= GATHER_FROM
        return [(prefill_tuning(case.head_dim, group, max(case.counts), reuse, gathered=gathered), gathered)]
    grid = ((128, 128, 8, 2), (128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 4, 2), (256, 64, 8, 3))
    return [(PrefillTuning(*values), gathered) for values in grid for gathered in (False, True)]


@dataclass(frozen=True)
class PlannedPrefill:
    """One kernel, with a plan of a case."""

    kernel: str
    shipped: bool
    """Whether the engine runs it for such a step."""
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]
    """Of queries, keys, values, block tables and the output."""
    plan_us: float
    tuning: dict[str, object]


def form_of_prefill(case: PrefillCase) -> cuda_prefill.Form | None:
    """Of the kernel in CUDA C++, where it runs and takes the case: over a float8 cache once it is gathered."""
    if architecture(torch.device("cuda", 0)) is None:
        return None
    block = LINE_ALIGNMENT if case.cache_dtype == FLOAT8 else BLOCK
    return cuda_prefill.form_of(torch.bfloat16, torch.bfloat16, case.head_dim, block, case.kv_heads, case.heads // case.kv_heads)


def planned_prefills(case: PrefillCase, tune: bool) -> list[PlannedPrefill]:
    starts, counts = np.array(case.starts, dtype=np.int32), np.array(case.counts, dtype=np.int32)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    scale = case.head_dim**-0.5
    found: list[PlannedPrefill] = []
    form, wins = form_of_prefill(case), False
    gather_plan = plan_gather(starts + counts)
    gathered_cache = GatheredCache.allocate(case.kv_heads, gather_plan.tokens, case.head_dim, torch.bfloat16, DEVICE)
    chunks, gathered_starts = (torch.from_numpy(a).to(DEVICE) for a in (gather_plan.chunks, gather_plan.starts))
    gathered_tables = torch.from_numpy(gather_plan.tables()).to(DEVICE)
    float8 = case.cache_dtype == FLOAT8
    ones = torch.ones(1, device=DEVICE) if float8 else None
    scales = {"k_scale": ones, "v_scale": ones}
    if form is not None:
        plan_chunks(starts, counts, 0, form.tokens, form.kv_heads, sms)
        begin = time.perf_counter()
        plan = plan_chunks(starts, counts, 0, form.tokens, form.kv_heads, sms)
        plan_us = (time.perf_counter() - begin) * 1e6
        chunk_items, wins = torch.from_numpy(plan).to(DEVICE), cuda_prefill.wins(form)
        parts = cuda_prefill.Parts.allocate(form, sms, DEVICE)

        if float8:
            wins = wins and queries_per_key(starts, counts) >= cuda_prefill.GATHER_FROM

        def run_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: torch.Tensor, out: torch.Tensor) -> None:
            if float8:
                gather_cache(k, v, t, chunks, gathered_cache, **scales)
                k, v = gathered_cache.pages()
                t = gathered_tables
            cuda_prefill.paged_prefill(q, k, v, t, chunk_items, parts, out, form, scale=scale)

        found.append(PlannedPrefill("cuda", wins, run_cuda, plan_us, {"tokens": form.tokens, "slots": form.slots}))
    for i, (tuning, gathered) in enumerate(prefill_variants(case, tune)):
        begin = time.perf_counter()
        items_plan = plan_prefill(starts, counts, 0, tuning.tokens_per_tile(case.heads // case.kv_heads), case.kv_heads, sms)
        plan_us = (time.perf_counter() - begin) * 1e6
        items = prefill_items(items_plan, DEVICE)
        workspace = PrefillWorkspace.allocate(case.kv_heads, case.head_dim, sms, DEVICE, max_rows=256)

        def run(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            t: torch.Tensor,
            out: torch.Tensor,
            items: torch.Tensor = items,
            workspace: PrefillWorkspace = workspace,
            tuning: PrefillTuning = tuning,
            gathered: bool = gathered,
        ) -> None:
            options: dict[str, Any] = {"scale": scale, "tuning": tuning, **scales}
            if gathered:
                gather_cache(k, v, t, chunks, gathered_cache)
                options |= {"gathered": gathered_cache, "gathered_starts": gathered_starts}
            paged_prefill(q, k, v, t, items, workspace, out, **options)

        found.append(PlannedPrefill("triton", not wins and i == 0, run, plan_us, vars(tuning) | {"gathered": gathered}))
    return found


def bench_prefill(case: PrefillCase, tune: bool) -> list[dict[str, object]]:
    table, num_blocks = tables(np.array(case.starts) + np.array(case.counts))
    shape = (num_blocks, case.kv_heads, BLOCK, case.head_dim)
    caches = [(random_cache(shape, case.cache_dtype), random_cache(shape, case.cache_dtype)) for _ in range(4)]
    q = torch.randn(sum(case.counts), case.heads, case.head_dim, device=DEVICE, dtype=torch.bfloat16)
    checked = min(case.counts[0], 256)
    skipped = case.counts[0] - checked
    expected = reference_row(q[skipped : case.counts[0]], *caches[0], table[0], case.starts[0] + skipped, checked)
    out = torch.empty_like(q)
    found: list[PlannedPrefill] = []
    errors: list[float | None] = []
    for planned in planned_prefills(case, tune):
        out.fill_(float("nan"))
        try:
            planned.run(q, *caches[0], table, out)
        except triton.runtime.errors.OutOfResources as refusal:
            print(f"{case.name} {planned.tuning}: {refusal}", file=sys.stderr)
            continue
        error = float((out[skipped : case.counts[0]].float() - expected).norm() / expected.norm())
        errors.append(error if np.isfinite(error) and not out.isnan().any() else None)
        found.append(planned)
    calls = [[functools.partial(planned.run, q, *cache, table, out) for cache in caches] for planned in found]
    times = hot_us([layers[0] for layers in calls], len(q)) if case.hot else turns_us(calls)
    results: list[dict[str, object]] = [
        {
            "case": case.name,
            "kernel": planned.kernel,
            "shipped": planned.shipped,
            "us": round(us, 1),
            "tflops": round(case.flops() / us / 1e6, 1),
            "error": error,
            "plan_us": round(planned.plan_us),
            "tuning": planned.tuning,
        }
        for planned, us, error in zip(found, times, errors, strict=True)
    ]
    return sorted(results, key=lambda result: result["us"])  # type: ignore[arg-type, return-value]


def compile_decode(case: DecodeCase, tuning: DecodeTuning) -> None:
    """Fill Triton's disk cache from another process: a tiny launch of the same specialisation."""
    table, num_blocks = tables(np.array([32], dtype=np.int32))
    key, value = (random_cache((num_blocks, case.kv_heads, BLOCK, case.head_dim), case.cache_dtype) for _ in range(2))
    q = torch.randn(1, case.heads, case.head_dim, device=DEVICE, dtype=torch.bfloat16)
    capacity = decode_capacity(min(2, case.rows), case.kv_heads, 16, bundle=case.most_bundled)
    workspace = DecodeWorkspace.allocate(capacity, case.heads, case.kv_heads, case.head_dim, DEVICE)
    scales = None if case.cache_dtype == torch.bfloat16 else torch.ones(1, device=DEVICE)
    options = {"scale": 1.0, "k_scale": scales, "v_scale": scales, "sliding_window": case.window}
    with contextlib.suppress(triton.runtime.errors.OutOfResources):
        paged_decode(q, key, value, table, workspace, torch.empty_like(q), tuning=tuning, **options)


def compile_prefill(case: PrefillCase, tuning: PrefillTuning, gathers: bool) -> None:
    """As `compile_decode`."""
    table, num_blocks = tables(np.array([32], dtype=np.int32))
    key, value = (random_cache((num_blocks, case.kv_heads, BLOCK, case.head_dim), case.cache_dtype) for _ in range(2))
    q = torch.randn(1, case.heads, case.head_dim, device=DEVICE, dtype=torch.bfloat16)
    workspace = PrefillWorkspace.allocate(case.kv_heads, case.head_dim, 8, DEVICE, max_rows=256)
    one = np.ones(1, dtype=np.int32)
    items = prefill_items(plan_prefill(one - 1, one, 0, 16, case.kv_heads, 8), DEVICE)
    gathered = GatheredCache.allocate(case.kv_heads, 128, case.head_dim, torch.bfloat16, DEVICE) if gathers else None
    starts = torch.zeros(1, dtype=torch.int32, device=DEVICE) if gathers else None
    ones = torch.ones(1, device=DEVICE) if case.cache_dtype == FLOAT8 else None
    with contextlib.suppress(triton.runtime.errors.OutOfResources):
        paged_prefill(
            q,
            key,
            value,
            table,
            items,
            workspace,
            torch.empty_like(q),
            scale=1.0,
            tuning=tuning,
            gathered=gathered,
            gathered_starts=starts,
            k_scale=ones,
            v_scale=ones,
        )


def compile_all(tune: bool, only: str) -> None:
    """Compile in parallel what the cases will launch."""
    jobs: dict[str, tuple[Callable[..., None], tuple[object, ...]]] = {}
    for case in DECODE_CASES:
        if re.search(only, f"decode {case.name}"):
            if (form := form_of(case)) is not None:
                compiled.prepare(form, torch.device("cuda", 0))
            for decode in decode_variants(case, tune):
                jobs[f"d {case.heads} {case.head_dim} {case.cache_dtype} {case.window} {case.rows == 1} {decode}"] = (
                    compile_decode,
                    (case, decode),
                )
    for prefill in PREFILL_CASES:
        if re.search(only, f"prefill {prefill.name}"):
            if (prefill_form := form_of_prefill(prefill)) is not None:
                compiled.prepare(prefill_form, torch.device("cuda", 0))
            for tuning, gathers in prefill_variants(prefill, tune):
                jobs[f"p {prefill.heads} {prefill.head_dim} {prefill.cache_dtype} {tuning} {gathers}"] = (
                    compile_prefill,
                    (prefill, tuning, gathers),
                )
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), max(1, (os.cpu_count() or 2) - 1))) as pool:
        for job in [pool.apply_async(call, arguments) for call, arguments in jobs.values()]:
            job.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time every tuning in the grids")
    parser.add_argument("--only", default="", help="cases in whose kind and name this pattern is found, such as 'decode 8B'")
    parser.add_argument("--top", type=int, default=5, help="results printed a case")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_attention.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs an NVIDIA GPU.")
    torch.manual_seed(0)
    compile_all(args.tune, args.only)
    results: list[dict[str, object]] = []
    for case in DECODE_CASES:
        if re.search(args.only, f"decode {case.name}"):
            found = bench_decode(case, args.tune)
            results += found
            for result in found[: args.top]:
                print(
                    f"decode {case.name:27} {result['kernel']:6}{'*' if result['shipped'] else ' '} {result['us']:8} us (alone {result['alone_us']:7}), floor {result['floor_us']:7}, "
                    f"{100 * float(result['of_floor']):5.1f}% err {result['error'] or float('nan'):.1e} plan {result['plan_us']} us "  # type: ignore[arg-type]
                    f"{result['items']} items {result['parts']} parts {list(result['tuning'].values())}"  # type: ignore[attr-defined]
                )
    for prefill in PREFILL_CASES:
        if re.search(args.only, f"prefill {prefill.name}"):
            found = bench_prefill(prefill, args.tune)
            results += found
            for result in found[: args.top]:
                print(
                    f"prefill {prefill.name:27} {result['kernel']:6}{'*' if result['shipped'] else ' '} {result['us']:8} us {result['tflops']:6} TFLOP/s err {result['error']} "
                    f"plan {result['plan_us']} us {list(result['tuning'].values())}"  # type: ignore[attr-defined]
                )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    if args.only and args.out.exists() and (before := json.loads(args.out.read_text())) == versions | {"results": before["results"]}:
        measured = {result["case"] for result in results}
        results = [result for result in before["results"] if result["case"] not in measured] + results
    args.out.write_text(json.dumps({**versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
