"""Products with low-bit weights on one GPU: measured against the time to read the weights once, and against cuBLAS in bf16.

    python benchmarks/gpu_quant.py [--tune] [--kinds int4-128 float8 q4_k] [--rows 1 8 32]

Shapes of Llama-3.1-8B. Kinds: int4 in groups of 128 and by row, table, int8 and float8 by row, and what GGUF's Q4_0, Q8_0 and Q4_K become:
groups of 32, the last with an offset each. For each number of rows: what the engine
does; the way for many rows (unpack and cuBLAS; 8-bit products of rounded inputs); cuBLAS in bf16 in the same run; the floor, the weight's
bytes at the card's read bandwidth or the products at its peak; with --tune also the best of a grid of tunings of the CUDA C++ kernels.
Weights are rotated past the L2 cache inside one CUDA graph. Prints a table and writes benchmarks/results/gpu_quant.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn import functional as F

from benchmarks.gpu_attention import READ_BYTES_PER_S, graph_us
from octavo.ops.coded import Activations, CodedRows
from octavo.ops.cuda import low_bit as cuda
from octavo.ops.cuda import ordered
from octavo.ops.cuda.compiler import architecture
from octavo.ops.packed import DenseWeight, OffsetWeight, SegmentedWeight
from octavo.ops.reference.low_bit import unpack
from octavo.ops.triton.launch import sm_count
from octavo.ops.triton.linear import TritonLinear
from octavo.ops.triton.low_bit import _eight_bit_product
from octavo.ops.triton.low_bit_matmul import LowBit, low_bit_layout, unpack_weight
from octavo.ops.triton.skinny_matmul import SkinnyWorkspace

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
KINDS = {"int4-128": ("int4", 128), "int4": ("int4", 0), "table": ("table", 0), "int8": ("int8", 0), "float8": ("float8", 0)}
KINDS |= {"q4_0": ("int4", 32), "q8_0": ("int8", 32), "q4_k": ("int4 + offset", 32)}
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024)
BF16_FLOPS = 790e12
"""Of large products on an H200."""
SHARED_BYTES, REGISTERS = 225_000, 65_536
DEVICE = torch.device("cuda")


def coded(kind: str, out: int, inner: int, group: int) -> CodedRows:
    """Random codes whose product has the size of a layer's."""
    groups = inner // group if group else 1
    scales = torch.rand(out, groups, device=DEVICE) * 0.01 + 0.005
    if kind.startswith("int4"):
        codes = torch.randint(0, 16, (out, inner), device=DEVICE, dtype=torch.uint8)
        zeros = torch.full((out, groups), 8, device=DEVICE, dtype=torch.int16)
        if kind == "int4 + offset":
            return CodedRows(codes, 4, scales, zeros, minimums=torch.randn_like(scales) * 0.05, group=group)
        return CodedRows(codes, 4, scales.half(), zeros, group=group)
    if kind == "table":
        codes = torch.randint(0, 16, (out, inner), device=DEVICE, dtype=torch.uint8)
        return CodedRows(codes, 4, table=torch.randn(out, 16, device=DEVICE).half() * 0.02)
    if kind == "int8":
        codes = torch.randint(-127, 128, (out, inner), device=DEVICE, dtype=torch.int8)
        if group:
            return CodedRows(codes, 8, (scales / 16).half(), group=group)
        return CodedRows(codes, 8, scales / 16, activations=Activations("int8"))
    codes = (torch.randn(out, inner, device=DEVICE) * 50).to(torch.float8_e4m3fn)
    return CodedRows(codes, 8, scales / 64, activations=Activations("float8"))


def packed(layer: TritonLinear, kind: str, out: int, inner: int, group: int) -> LowBit | OffsetWeight:
    weight = layer.pack_coded(coded(kind, out, inner, group), torch.bfloat16)
    assert not isinstance(weight, (DenseWeight, SegmentedWeight))
    return weight


def grid(form: cuda.Form, columns: int, inner: int, rows: int) -> Iterator[cuda.Tuning | ordered.Ordered]:
    """Tunings that fit."""
    if form.ordered:
        yield from ordered.candidates(form, columns, inner, rows, sm_count(DEVICE))
    if rows <= 16 and not (form.ordered and form.group == ordered.SHORT_GROUP):
        tiles = 1 if rows <= 8 else 2
        for warps, split, stages, blocks in itertools.product((4, 8, 14, 16), (1, 2, 4, 8), (2, 3, 4, 6, 8), (1, 2)):
            tuning = cuda.Stream(tiles, warps, split, stages, blocks)
            x_registers = tuning.per_warp(form, inner) * tiles * form.chunk // 8
            even = inner / (form.chunk * warps * split * tuning.per_warp(form, inner))
            fits = tuning.shared_bytes(form, inner) * blocks <= SHARED_BYTES and x_registers + 50 <= min(
                255, REGISTERS / tuning.threads / blocks
            )
            if fits and x_registers <= 96 and 0.8 <= even <= 1:
                yield tuning
    if rows >= 16 and not form.ordered:
        for tile, groups, blocks, integers in itertools.product((16, 32, 64, 128), (1, 2, 3, 4), (1, 2), (True, False)):
            tiled = cuda.Tiles(tile, groups, 1, blocks, integers)
            sums = tile if integers else tile // 2
            registers = 40 + (32 if integers else 64) + tile // 2 + (sums if form.group else 0)
            fits = registers <= 504 // blocks // (groups + 1) and tiled.shared_bytes(form, inner) * 3 <= SHARED_BYTES // blocks
            takes = form.integers if integers else not form.offsets
            if rows / 2 <= tile <= max(16, rows) and fits and takes:
                yield tiled.filled(form)


def tuned(weights: Sequence[LowBit | OffsetWeight], x: torch.Tensor) -> tuple[float, cuda.Tuning | ordered.Ordered] | None:
    form = cuda.form_of(weights[0], x.dtype, bias=False)
    if form is None or len(x) > cuda.MOST_ROWS or architecture(x.device) is None:
        return None
    rows, columns, inner = len(x), weights[0].out_features, low_bit_layout(weights[0]).inner
    tunings = list(grid(form, columns, inner, rows))
    for tuning in tunings:
        if isinstance(tuning, ordered.Ordered):
            ordered.prepare(form, tuning, DEVICE)
        else:
            cuda.prepare(form, tuning, inner, DEVICE)

    def product(tuning: cuda.Tuning | ordered.Ordered) -> Callable[[Any], torch.Tensor]:
        if isinstance(tuning, ordered.Ordered):
            return lambda weight: ordered.multiply(x, weight, None, form, tuning)
        elements, counters = cuda.workspace_size(rows, columns, inner, tuning, sm_count(DEVICE))
        workspace = SkinnyWorkspace.allocate(elements, counters, DEVICE) if elements else None
        return lambda weight: cuda.multiply(x, weight, None, form, tuning, workspace)

    timed = [(graph_us([functools.partial(product(tuning), w) for w in weights]), tuning) for tuning in tunings]
    return min(timed, key=lambda pair: pair[0])


def many_rows(weights: Sequence[LowBit | OffsetWeight], x: torch.Tensor) -> float | None:
    """The way that is taken where the weight is not read as it is stored; None: not measured."""
    if isinstance(weights[0], OffsetWeight):
        return None

    def one(weight: Any) -> torch.Tensor:
        out = _eight_bit_product(x, weight, None)
        return F.linear(x, unpack_weight(weight, x.dtype)) if out is None else out

    return graph_us([functools.partial(one, w) for w in weights])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time a grid of tunings")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_quant.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs an NVIDIA GPU.")
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    for name, (out, inner) in SHAPES.items():
        dense = [torch.randn(out, inner, device=DEVICE, dtype=torch.bfloat16) for _ in range(max(2, int(3e8 / (2 * out * inner)) + 1))]
        for kind, group in (KINDS[k] for k in args.kinds):
            layer = TritonLinear()
            first = packed(layer, kind, out, inner, group)
            weights = [first, *(packed(layer, kind, out, inner, group) for _ in range(max(1, min(31, int(3e8 / first.nbytes)))))]
            torch.cuda.synchronize()  # `ops.registry.Linear` wants whole weights
            for rows in args.rows:
                x = torch.randn(rows, inner, device=DEVICE).bfloat16()
                got, expected = layer.linear(x, first, None).float(), x.float() @ unpack(first, torch.float32).T
                assert float((got - expected).norm() / expected.norm()) < 0.05, (name, kind, rows)
                best = tuned(weights, x) if args.tune else None
                entry = {
                    "shape": name,
                    "kind": kind,
                    "group": group,
                    "rows": rows,
                    "engine_us": graph_us([functools.partial(layer.linear, x, w, None) for w in weights]),
                    "many_rows_us": many_rows(weights, x) if rows >= 32 else None,
                    "cublas_bf16_us": graph_us([functools.partial(F.linear, x, w) for w in dense]),
                    "floor_us": max(first.nbytes / READ_BYTES_PER_S, 2 * rows * out * inner / BF16_FLOPS) * 1e6,
                }
                if best is not None:
                    entry |= {"tuned_us": best[0], "tuning": {"kernel": best[1].name, **dataclasses.asdict(best[1])}}
                results.append({k: round(v, 2) if isinstance(v, float) else v for k, v in entry.items()})
                us, floor, cublas = entry["engine_us"], entry["floor_us"], entry["cublas_bf16_us"]
                print(
                    f"{name:8} {kind:13} g{group:<3} M={rows:<5} {us:8.2f} us, {us / floor:5.2f} of the floor {floor:7.2f}, "
                    f"{cublas / us:5.2f} times as fast as cuBLAS in bf16{'' if best is None else f', best of the grid {best[0]:.2f} {best[1]}'}",
                    flush=True,
                )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    args.out.write_text(json.dumps({**versions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
