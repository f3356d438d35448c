"""Matrix products of few rows on one GPU: this project's kernel and cuBLAS against the time to read the weights once.

    python benchmarks/gpu_matmul.py            the shipped tunings
    python benchmarks/gpu_matmul.py --tune     the best of a grid, for each shape

Shapes of Llama-3.1-8B and Qwen3-0.6B. Weights are rotated past the L2 cache inside one CUDA graph. Prints a table and writes
benchmarks/results/gpu_matmul.json.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import sys
from pathlib import Path

import torch
import triton
from torch.nn import functional as F

from benchmarks.gpu_attention import READ_BYTES_PER_S, graph_us
from octavo.ops.triton.skinny_matmul import MAX_ROWS, SkinnyTuning, SkinnyWorkspace, skinny_matmul, skinny_tuning

SHAPES = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "8B lm_head": (128256, 4096),
    "0.6B lm_head": (151936, 1024),
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
}
SHARED_BYTES = 225_000
ROWS = (1, 16, 32, 64, 128)
DEVICE = torch.device("cuda")
GRID = tuple(
    SkinnyTuning(columns, inner, split, warps, stages)
    for (columns, inner, warps, stages), split in itertools.product(
        ((32, 128, 4, 4), (32, 256, 4, 4), (16, 256, 4, 4), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 5), (128, 128, 8, 3)), (1, 2, 4)
    )
)


def candidates(rows: int, columns: int, inner: int, tune: bool) -> list[SkinnyTuning]:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    shipped = skinny_tuning(columns, inner, sms)
    if not tune:
        return [shipped]
    padded = max(16, triton.next_power_of_2(rows))
    found = []
    for tuning in GRID:
        strips = -(-columns // tuning.columns)
        # Too few thread blocks leave SMs idle, too many parts cost more than they balance, and the tiles must fit.
        fits = (padded + tuning.columns) * tuning.inner * 2 * tuning.stages <= SHARED_BYTES
        if fits and strips * tuning.split >= sms // 2 and (tuning.split == 1 or strips * tuning.split <= 8 * sms):
            found.append(tuning)
    return found


def workspace_for(columns: int) -> SkinnyWorkspace:
    return SkinnyWorkspace.allocate(8 * MAX_ROWS * (columns + 128), columns, DEVICE)


def compile_one(rows: int, columns: int, inner: int, tuning: SkinnyTuning) -> None:
    """Fill Triton's disk cache from another process."""
    x, weight = torch.randn(rows, inner, device=DEVICE).bfloat16(), torch.empty(columns, inner, device=DEVICE, dtype=torch.bfloat16)
    skinny_matmul(x, weight, None, workspace_for(columns), tuning)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time a grid of tunings")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_matmul.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs an NVIDIA GPU.")
    torch.manual_seed(0)
    # One compilation serves every shape that a tuning divides evenly.
    jobs: dict[str, tuple[int, int, int, SkinnyTuning]] = {}
    for (columns, inner), rows in itertools.product(SHAPES.values(), args.rows):
        for tuning in candidates(rows, columns, inner, args.tune):
            padded = max(16, triton.next_power_of_2(rows))
            even = inner % (tuning.inner * tuning.split) == 0
            jobs.setdefault(f"{padded} {even} {tuning}", (padded, columns, inner, tuning))
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        pool.starmap(compile_one, jobs.values(), chunksize=1)
    results: list[dict[str, object]] = []
    for name, (columns, inner) in SHAPES.items():
        size = columns * inner * 2
        copies = max(2, min(32, int(3e8 / size) + 1))
        weights = [torch.randn(columns, inner, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies)]
        workspace = workspace_for(columns)
        floor = size / READ_BYTES_PER_S * 1e6
        for rows in args.rows:
            x = torch.randn(rows, inner, device=DEVICE, dtype=torch.bfloat16)
            expected = x.double() @ weights[0].double().T if columns < 50000 else F.linear(x, weights[0]).double()
            cublas = graph_us([functools.partial(F.linear, x, w) for w in weights])
            timed: list[tuple[float, SkinnyTuning]] = []
            for tuning in candidates(rows, columns, inner, args.tune):
                out = skinny_matmul(x, weights[0], None, workspace, tuning)
                assert float((out.double() - expected).norm() / expected.norm()) < 6e-3, (name, rows, tuning)
                calls = [functools.partial(skinny_matmul, x, w, None, workspace, tuning) for w in weights]
                timed.append((graph_us(calls), tuning))
            us, best = min(timed, key=lambda pair: pair[0])
            results.append(
                {
                    "shape": name,
                    "rows": rows,
                    "us": round(us, 2),
                    "cublas_us": round(cublas, 2),
                    "floor_us": round(floor, 2),
                    "tuning": vars(best),
                }
            )
            print(f"{name:12} M={rows:2} {us:7.2f} us, cuBLAS {cublas:7.2f}, floor {floor:7.2f} {list(vars(best).values())}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    args.out.write_text(json.dumps({**versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
