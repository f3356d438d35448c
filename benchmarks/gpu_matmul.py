"""Matrix products of few rows on one GPU: this project's kernels and cuBLAS against the time to read the weights once.

    python benchmarks/gpu_matmul.py            the shipped tunings
    python benchmarks/gpu_matmul.py --tune     the best of a grid of the Triton kernel's, for each shape (--write-table: kept)

Shapes of Llama-3.1-8B and Qwen3-0.6B. Weights are rotated past the L2 cache inside one CUDA graph. In front of each product stands the
norm that makes its input, as in a step: the two overlap. `ours` is the CUDA C++ kernel (one row: Triton's), `triton` the kernel that
serves where that one cannot be compiled. Prints a table and writes benchmarks/results/gpu_matmul.json.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch.nn import functional as F

from benchmarks.gpu_attention import READ_BYTES_PER_S, graph_us
from octavo.ops.packed import LinearWeight
from octavo.ops.triton import skinny_table
from octavo.ops.triton.linear import TritonLinear
from octavo.ops.triton.rms_norm import rms_norm
from octavo.ops.triton.skinny_matmul import MAX_ROWS, Form, SkinnyTuning, SkinnyWorkspace, skinny_matmul
from octavo.ops.triton.skinny_table import ROW_CLASSES, choices

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
FORMS: tuple[Form, ...] = ("rows_first", "weights_first")
SHARED_BYTES = 225_000
DEVICE = torch.device("cuda")
Tensors = tuple[torch.Tensor, ...]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
DOTS = tuple(
    SkinnyTuning(columns, inner, split, warps, stages, form)
    for (columns, inner, warps, stages), split in itertools.product(
        ((32, 128, 4, 4), (32, 256, 4, 4), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 5)), (1, 2, 4)
    )
    for form in FORMS
    if form == "rows_first" or columns >= 64
)
VECTORS = tuple(
    SkinnyTuning(*sizes, form="vector") for sizes in ((16, 256, 1, 4, 3), (8, 512, 1, 4, 3), (8, 256, 1, 4, 4), (4, 1024, 1, 4, 3))
)
PREFERENCE = 1.03
"""A kernel of ours may measure this much slower than cuBLAS: in a step it also overlaps with its neighbours."""


def candidates(rows: int, columns: int, inner: int, tune: bool) -> list[SkinnyTuning]:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    if rows > MAX_ROWS:
        return []
    shipped = choices(columns, inner, sms)[bisect.bisect_left(ROW_CLASSES, rows)]
    if not tune:
        return [] if shipped is None else [shipped]
    padded = max(16, triton.next_power_of_2(rows))
    found = list(VECTORS) if rows == 1 else []
    for tuning in DOTS:
        strips = -(-columns // tuning.columns)
        # Too few thread blocks leave SMs idle, too many parts cost more than they balance, and the tiles must fit.
        fits = (padded + tuning.columns) * tuning.inner * 2 * tuning.stages <= SHARED_BYTES
        whole = inner % (tuning.inner * tuning.split) == 0
        if fits and whole and strips * tuning.split >= sms // 2 and (tuning.split == 1 or strips * tuning.split <= 5 * sms):
            found.append(tuning)
    return found


def write_table(best: dict[tuple[int, int], dict[int, SkinnyTuning | None]]) -> None:
    """Put what was measured into the package's table."""
    path = Path(skinny_table.__file__)
    head, marker, _ = path.read_text().partition("    # (out_features, in_features): one choice a row class\n")
    lines = [
        f"    {shape}: ({', '.join('None' if by_rows[n] is None else _literal(by_rows[n]) for n in ROW_CLASSES)}),\n"
        for shape, by_rows in best.items()
    ]
    path.write_text(head + marker + "".join(lines) + "}\n")


def _literal(tuning: SkinnyTuning | None) -> str:
    assert tuning is not None
    form = "" if tuning.form == "rows_first" else f', "{tuning.form}"'
    return f"SkinnyTuning({tuning.columns}, {tuning.inner}, {tuning.split}, {tuning.warps}, {tuning.stages}{form})"


def workspace_for(columns: int) -> SkinnyWorkspace:
    return SkinnyWorkspace.allocate(8 * MAX_ROWS * (columns + 128), columns, DEVICE)


def compile_one(rows: int, columns: int, inner: int, tuning: SkinnyTuning) -> None:
    """Fill Triton's disk cache from another process."""
    x, weight = torch.randn(rows, inner, device=DEVICE).bfloat16(), torch.empty(columns, inner, device=DEVICE, dtype=torch.bfloat16)
    skinny_matmul(x, weight, None, workspace_for(columns), tuning)


def _check(out: torch.Tensor, expected: torch.Tensor, what: tuple[object, ...]) -> None:
    assert float((out.double() - expected).norm() / expected.norm()) < 6e-3, what


def _triton(x: torch.Tensor, w: torch.Tensor, workspace: SkinnyWorkspace, tuning: SkinnyTuning) -> torch.Tensor:
    return skinny_matmul(x, w, None, workspace, tuning)


def _engine(x: torch.Tensor, w: torch.Tensor, linear: TritonLinear, packed: dict[int, LinearWeight]) -> torch.Tensor:
    return linear.linear(x, packed[w.data_ptr()], None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time a grid of tunings")
    parser.add_argument("--write-table", action="store_true", help="with --tune: keep the best in the package's table")
    parser.add_argument("--rows", type=int, nargs="+", default=[*ROW_CLASSES, 128])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_matmul.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs an NVIDIA GPU.")
    torch.manual_seed(0)
    # One compilation serves every shape that a tuning divides evenly.
    jobs: dict[str, tuple[int, int, int, SkinnyTuning]] = {}
    for (columns, inner), rows in itertools.product(SHAPES.values(), args.rows):
        for tuning in candidates(rows, columns, inner, args.tune):
            padded = rows if tuning.form == "vector" else max(16, triton.next_power_of_2(rows))
            even = inner % (tuning.inner * tuning.split) == 0
            jobs.setdefault(f"{padded} {even} {tuning}", (padded, columns, inner, tuning))
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        pool.starmap(compile_one, jobs.values(), chunksize=1)
    results: list[dict[str, object]] = []
    best_of: dict[tuple[int, int], dict[int, SkinnyTuning | None]] = {}
    for name, (columns, inner) in SHAPES.items():
        size = columns * inner * 2
        copies = max(2, min(32, int(3e8 / size) + 1))
        weights = [torch.randn(columns, inner, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies)]
        workspace = workspace_for(columns)
        floor = size / READ_BYTES_PER_S * 1e6
        for rows in args.rows:
            x = torch.randn(rows, inner, device=DEVICE, dtype=torch.bfloat16)
            gain = torch.ones(inner, device=DEVICE, dtype=torch.bfloat16)

            def chained(product: Product, x: torch.Tensor = x, gain: torch.Tensor = gain, weights: Tensors = tuple(weights)) -> float:
                return graph_us([lambda w=w: product(rms_norm(x, gain, 1e-5), w) for w in weights])

            normed = rms_norm(x, gain, 1e-5)
            expected = normed.double() @ weights[0].double().T if columns < 50000 else F.linear(normed, weights[0]).double()
            norm, cublas = chained(lambda x, _: x), chained(F.linear)
            timed: list[tuple[float, SkinnyTuning]] = []
            for tuning in candidates(rows, columns, inner, args.tune):
                product = functools.partial(_triton, workspace=workspace, tuning=tuning)
                _check(product(normed, weights[0]), expected, (name, rows, tuning))
                timed.append((chained(product), tuning))
            fastest = min(timed, key=lambda pair: pair[0], default=None)
            chosen = None if fastest is None or fastest[0] > PREFERENCE * cublas else fastest[1]
            best_of.setdefault((columns, inner), {})[rows] = chosen
            linear = TritonLinear()
            packed = {w.data_ptr(): linear.pack(w) for w in weights}
            ours = functools.partial(_engine, linear=linear, packed=packed)
            _check(ours(normed, weights[0]), expected, (name, rows))
            us = chained(ours)
            triton_us = None if fastest is None else round(fastest[0], 2)
            row = {"shape": name, "rows": rows, "us": round(us, 2), "triton_us": triton_us, "cublas_us": round(cublas, 2)}
            results.append({**row, "norm_us": round(norm, 2), "floor_us": round(floor, 2)})
            print(
                f"{name:12} M={rows:3} {us:7.2f} us, Triton {triton_us or '-':>7}, cuBLAS {cublas:7.2f}, norm {norm:5.2f}, floor {floor:7.2f}"
            )
    if args.write_table:
        write_table(best_of)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    args.out.write_text(json.dumps({**versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
