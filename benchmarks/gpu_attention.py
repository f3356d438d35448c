"""Paged attention kernels on one GPU: measured time against the floor (cache bytes over the read bandwidth, or FLOPs).

    python benchmarks/gpu_attention.py            the shipped tunings, checked and timed
    python benchmarks/gpu_attention.py --tune     every tuning in the grids below, best first

Times are CUDA-graph replays over several layers' caches, so that the L2 cache does not answer and launches cost what they cost
in serving. Prints a table and writes benchmarks/results/gpu_attention.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import triton

from octavo.ops.triton.decode_plan import decode_capacity, plan_decode
from octavo.ops.triton.gather_cache import GatheredCache, gather_cache, plan_gather
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

READ_BYTES_PER_S = 4.55e12
"""A read-only stream through a kernel on an H200."""
BLOCK = 16
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class DecodeCase:
    name: str
    rows: int
    context: int
    spread: bool
    heads: int
    kv_heads: int
    head_dim: int = 128
    cache_dtype: torch.dtype = torch.bfloat16

    def contexts(self) -> np.ndarray:
        rng = random.Random(0)
        low, high = self.context * 3 // 4, self.context * 5 // 4
        return np.array([rng.randint(low, high) if self.spread else self.context for _ in range(self.rows)], dtype=np.int32)


DECODE_CASES = (
    DecodeCase("8B 256x843", 256, 843, True, 32, 8),
    DecodeCase("0.6B 256x843", 256, 843, True, 16, 8),
    DecodeCase("8B 32x4096", 32, 4096, False, 32, 8),
    DecodeCase("8B 64x843", 64, 843, True, 32, 8),
    DecodeCase("8B 1x8192", 1, 8192, False, 32, 8),
    DecodeCase("8B 1x1024", 1, 1024, False, 32, 8),
    DecodeCase("8B fp8 256x843", 256, 843, True, 32, 8, cache_dtype=torch.float8_e4m3fn),
    DecodeCase("8B fp8 32x4096", 32, 4096, False, 32, 8, cache_dtype=torch.float8_e4m3fn),
)


def graph_us(layers: list[Callable[[], object]], repeats: int = 7) -> float:
    """Median microseconds of one call, replaying all of them as one graph."""
    layers[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            layer()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(repeats):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(layers))
    return statistics.median(times)


def random_cache(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).to(dtype)


def tables(contexts: np.ndarray) -> tuple[torch.Tensor, int]:
    needed = [-(-int(n) // BLOCK) for n in contexts]
    order = torch.randperm(sum(needed)).int() + 1
    table, used = torch.zeros(len(needed), max(needed), dtype=torch.int32), 0
    for row, n in enumerate(needed):
        table[row, :n] = order[used : used + n]
        used += n
    return table.to(DEVICE), used + 1


def reference_row(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """[count, heads, head_dim] float32 of one row; q [count, heads, head_dim]."""
    context = start + count
    blocks = table[: -(-context // BLOCK)].long()
    k, v = (cache[blocks].float().transpose(0, 1).flatten(1, 2)[:, :context] for cache in (key, value))
    group = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.einsum("thd,hsd->hts", q.float(), k) * q.shape[2] ** -0.5
    hidden = torch.arange(context, device=DEVICE) > torch.arange(start, context, device=DEVICE)[:, None]
    return torch.einsum("hts,hsd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


@dataclass(frozen=True)
class DecodeVariant:
    tuning: DecodeTuning
    items_per_sm: int
    min_part: int


def decode_variants(case: DecodeCase, tune: bool) -> list[DecodeVariant]:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    shipped = decode_tuning(case.head_dim, case.cache_dtype.itemsize, case.rows, case.kv_heads, sms, overlap=True)
    if not tune:
        return [DecodeVariant(shipped, 2, 256)]
    tunings = [replace(shipped, tile=t, warps=w, stages=s) for t, w, s in ((64, 4, 2), (64, 4, 3), (64, 2, 2), (32, 4, 4))]
    tunings.append(replace(shipped, overlap=False))
    return [
        DecodeVariant(tuning, items, part)
        for tuning in tunings
        for items in (1, 2, 4)
        for part in ((128, 256) if case.rows == 1 else (256,))
    ]


def bench_decode(case: DecodeCase, tune: bool) -> list[dict[str, object]]:
    contexts = case.contexts()
    table, num_blocks = tables(contexts)
    size = int(contexts.sum()) * case.kv_heads * case.head_dim * 2 * case.cache_dtype.itemsize
    layers = max(2, min(24, int(6e8 / size) + 1))
    shape = (num_blocks, case.kv_heads, BLOCK, case.head_dim)
    caches = [(random_cache(shape, case.cache_dtype), random_cache(shape, case.cache_dtype)) for _ in range(layers)]
    q = torch.randn(case.rows, case.heads, case.head_dim, device=DEVICE, dtype=torch.bfloat16)
    checked = [0, case.rows // 2, case.rows - 1]
    expected = torch.cat([reference_row(q[r : r + 1], *caches[0], table[r], int(contexts[r]) - 1, 1) for r in checked])
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    scales = None if case.cache_dtype == torch.bfloat16 else torch.ones(1, device=DEVICE)
    results: list[dict[str, object]] = []
    for variant in decode_variants(case, tune):
        capacity = decode_capacity(case.rows, case.kv_heads, sms, items_per_sm=variant.items_per_sm)
        plan_decode(contexts, case.kv_heads, sms, items_per_sm=variant.items_per_sm, min_part=variant.min_part, capacity=capacity)
        begin = time.perf_counter()
        plan = plan_decode(contexts, case.kv_heads, sms, items_per_sm=variant.items_per_sm, min_part=variant.min_part, capacity=capacity)
        plan_us = (time.perf_counter() - begin) * 1e6
        workspace = DecodeWorkspace.allocate(capacity, case.heads, case.kv_heads, case.head_dim, DEVICE)
        workspace.load(plan)
        out = torch.full_like(q, float("nan"))

        def call(layer: int, workspace: DecodeWorkspace = workspace, out: torch.Tensor = out, variant: DecodeVariant = variant) -> None:
            key, value = caches[layer]
            options = {"scale": case.head_dim**-0.5, "k_scale": scales, "v_scale": scales, "tuning": variant.tuning}
            paged_decode(q, key, value, table, workspace, out, **options)  # type: ignore[arg-type]

        call(0)
        error = float((out[checked].float() - expected).norm() / expected.norm())
        us = graph_us([lambda layer=layer, call=call: call(layer) for layer in range(layers)])  # type: ignore[misc]
        floor = size / READ_BYTES_PER_S * 1e6
        results.append(
            {
                "case": case.name,
                "us": round(us, 2),
                "floor_us": round(floor, 2),
                "of_floor": round(floor / us, 4),
                "error": error if np.isfinite(error) else None,
                "plan_us": round(plan_us),
                "tuning": vars(variant.tuning) | {"items_per_sm": variant.items_per_sm, "min_part": variant.min_part},
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

    def flops(self) -> float:
        pairs = sum(count * start + count * (count + 1) / 2 for start, count in zip(self.starts, self.counts, strict=True))
        return 4.0 * pairs * self.heads * self.head_dim


PREFILL_CASES = (
    PrefillCase("8k from 0", (0,), (8192,)),
    PrefillCase("8k behind 24k", (24576,), (8192,)),
    PrefillCase("2k from 0", (0,), (2048,)),
    PrefillCase("14 x 560", (0,) * 14, (560,) * 14),
    PrefillCase("0.6B 14 x 560", (0,) * 14, (560,) * 14, heads=16),
    PrefillCase("64 behind 16k", (16384,), (64,)),
)


def prefill_variants(case: PrefillCase, tune: bool) -> list[tuple[PrefillTuning, bool]]:
    group = case.heads // case.kv_heads
    reuse = queries_per_key(np.array(case.starts), np.array(case.counts))
    if not tune:
        gathered = reuse >= GATHER_FROM
        return [(prefill_tuning(case.head_dim, group, max(case.counts), reuse, gathered=gathered), gathered)]
    grid = ((128, 128, 8, 2), (128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 4, 2), (256, 64, 8, 3))
    return [(PrefillTuning(*values), gathered) for values in grid for gathered in (False, True)]


def bench_prefill(case: PrefillCase, tune: bool) -> list[dict[str, object]]:
    starts, counts = np.array(case.starts, dtype=np.int32), np.array(case.counts, dtype=np.int32)
    table, num_blocks = tables(starts + counts)
    shape = (num_blocks, case.kv_heads, BLOCK, case.head_dim)
    caches = [(random_cache(shape, torch.bfloat16), random_cache(shape, torch.bfloat16)) for _ in range(2)]
    q = torch.randn(int(counts.sum()), case.heads, case.head_dim, device=DEVICE, dtype=torch.bfloat16)
    checked = min(case.counts[0], 256)
    skipped = case.counts[0] - checked
    expected = reference_row(q[skipped : case.counts[0]], *caches[0], table[0], case.starts[0] + skipped, checked)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    results: list[dict[str, object]] = []
    gather_tokens = plan_gather(starts + counts).tokens
    gathered_cache = GatheredCache.allocate(case.kv_heads, gather_tokens, case.head_dim, torch.bfloat16, DEVICE)
    for tuning, gathered in prefill_variants(case, tune):
        begin = time.perf_counter()
        plan = plan_prefill(starts, counts, 0, tuning.tokens_per_tile(case.heads // case.kv_heads), case.kv_heads, sms)
        plan_us = (time.perf_counter() - begin) * 1e6
        items = prefill_items(plan, DEVICE)
        gather_plan = plan_gather(starts + counts)
        chunks, gathered_starts = (torch.from_numpy(a).to(DEVICE) for a in (gather_plan.chunks, gather_plan.starts))
        workspace = PrefillWorkspace.allocate(case.kv_heads, case.head_dim, sms, DEVICE, max_rows=256)
        out = torch.full_like(q, float("nan"))

        def call(
            layer: int,
            items: torch.Tensor = items,
            workspace: PrefillWorkspace = workspace,
            out: torch.Tensor = out,
            tuning: PrefillTuning = tuning,
            chunks: torch.Tensor = chunks,
            gathered_starts: torch.Tensor = gathered_starts,
            gathered: bool = gathered,
        ) -> None:
            options = {"scale": case.head_dim**-0.5, "tuning": tuning}
            if gathered:
                gather_cache(*caches[layer], table, chunks, gathered_cache)
                options |= {"gathered": gathered_cache, "gathered_starts": gathered_starts}
            paged_prefill(q, *caches[layer], table, items, workspace, out, **options)  # type: ignore[arg-type]

        try:
            call(0)
        except triton.runtime.errors.OutOfResources as error:
            print(f"{case.name} {tuning}: {error}", file=sys.stderr)
            continue
        error = float((out[skipped : case.counts[0]].float() - expected).norm() / expected.norm())
        us = graph_us([lambda: call(0), lambda: call(1)], repeats=5)
        results.append(
            {
                "case": case.name,
                "us": round(us, 1),
                "tflops": round(case.flops() / us / 1e6, 1),
                "error": error if np.isfinite(error) and not out.isnan().any() else None,
                "plan_us": round(plan_us),
                "tuning": vars(tuning) | {"gathered": gathered},
            }
        )
    return sorted(results, key=lambda result: result["us"])  # type: ignore[arg-type, return-value]


def compile_one(job: tuple[str, object]) -> None:
    """Fill Triton's disk cache from another process: a tiny launch of the same specialisation."""
    kind, what = job
    if kind == "decode":
        case, tuning = what  # type: ignore[misc]
        tiny = replace(case, rows=1, context=32, spread=False)
        table, num_blocks = tables(tiny.contexts())
        caches = [random_cache((num_blocks, case.kv_heads, BLOCK, case.head_dim), case.cache_dtype) for _ in range(2)]
        q = torch.randn(1, case.heads, case.head_dim, device=DEVICE, dtype=torch.bfloat16)
        capacity = decode_capacity(1, case.kv_heads, 16)
        workspace = DecodeWorkspace.allocate(capacity, case.heads, case.kv_heads, case.head_dim, DEVICE)
        scales = None if case.cache_dtype == torch.bfloat16 else torch.ones(1, device=DEVICE)
        paged_decode(q, *caches, table, workspace, torch.empty_like(q), scale=1.0, k_scale=scales, v_scale=scales, tuning=tuning)
    else:
        case, tuning = what  # type: ignore[misc]
        table, num_blocks = tables(np.array([32], dtype=np.int32))
        caches = [random_cache((num_blocks, case.kv_heads, BLOCK, case.head_dim), torch.bfloat16) for _ in range(2)]
        q = torch.randn(1, case.heads, case.head_dim, device=DEVICE, dtype=torch.bfloat16)
        workspace = PrefillWorkspace.allocate(case.kv_heads, case.head_dim, 8, DEVICE, max_rows=256)
        plan = plan_prefill(np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.int32), 0, 16, case.kv_heads, 8)
        try:
            items = prefill_items(plan, DEVICE)
            paged_prefill(q, *caches, table, items, workspace, torch.empty_like(q), scale=1.0, tuning=tuning)
            gathered = GatheredCache.allocate(case.kv_heads, 128, case.head_dim, torch.bfloat16, DEVICE)
            zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
            options = {"scale": 1.0, "tuning": tuning, "gathered": gathered, "gathered_starts": zero}
            paged_prefill(q, *caches, table, items, workspace, torch.empty_like(q), **options)  # type: ignore[arg-type]
        except triton.runtime.errors.OutOfResources:
            return


def compile_all(tune: bool, only: str) -> None:
    jobs: dict[str, tuple[str, object]] = {}
    for case in DECODE_CASES:
        if only not in f"decode {case.name}":
            continue
        for variant in decode_variants(case, tune):
            jobs[f"d{case.heads // case.kv_heads}{case.head_dim}{case.cache_dtype}{variant.tuning}"] = ("decode", (case, variant.tuning))
    for prefill in PREFILL_CASES:
        if only not in f"prefill {prefill.name}":
            continue
        for tuning, _ in prefill_variants(prefill, tune):
            jobs[f"p{prefill.heads // prefill.kv_heads}{tuning}"] = ("prefill", (prefill, tuning))
    workers = min(len(jobs), max(1, (os.cpu_count() or 2) - 1))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(compile_one, jobs.values(), chunksize=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time every tuning in the grids")
    parser.add_argument("--only", default="", help="cases whose kind and name contain this, such as 'decode 8B'")
    parser.add_argument("--top", type=int, default=5, help="results printed a case")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_attention.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs an NVIDIA GPU.")
    torch.manual_seed(0)
    if args.tune:
        begin = time.perf_counter()
        compile_all(True, args.only)
        print(f"compiled in {time.perf_counter() - begin:.0f} s")
    results: list[dict[str, object]] = []
    for case in DECODE_CASES:
        if args.only in f"decode {case.name}":
            found = bench_decode(case, args.tune)
            results += found
            for result in found[: args.top]:
                print(
                    f"decode {case.name:16} {result['us']:8} us, floor {result['floor_us']:7}, {100 * float(result['of_floor']):5.1f}% "  # type: ignore[arg-type]
                    f"err {result['error']:.1e} plan {result['plan_us']} us {list(result['tuning'].values())}"  # type: ignore[attr-defined]
                )
    for prefill in PREFILL_CASES:
        if args.only in f"prefill {prefill.name}":
            found = bench_prefill(prefill, args.tune)
            results += found
            for result in found[: args.top]:
                print(
                    f"prefill {prefill.name:14} {result['us']:8} us {result['tflops']:6} TFLOP/s err {result['error']} "
                    f"plan {result['plan_us']} us {list(result['tuning'].values())}"  # type: ignore[attr-defined]
                )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    args.out.write_text(json.dumps({**versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
