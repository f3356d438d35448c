"""Products with low-bit weights on one GPU: measured against the time to read the weights once, and against cuBLAS in bf16.

    python benchmarks/gpu_quant.py             the shipped choices
    python benchmarks/gpu_quant.py --tune      the best of a grid, for each shape and kind (--write-table: kept)

Shapes of Llama-3.1-8B. Kinds: int4 and table in groups of 128 and by row, int8 and float8 by row. For each number of rows: the kernel
that reads the weight as it is stored, the ways for many rows (unpack and cuBLAS; 8-bit products of rounded inputs), cuBLAS in bf16 in
the same run, and the floor: the weight's bytes at the card's read bandwidth, or the products at its peak. Weights are rotated past
the L2 cache inside one CUDA graph. Prints a table and writes benchmarks/results/gpu_quant.json.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import triton
from torch.nn import functional as F

from benchmarks.gpu_attention import READ_BYTES_PER_S, graph_us
from octavo.ops.coded import Activations, CodedRows
from octavo.ops.packed import DenseWeight, SegmentedWeight
from octavo.ops.reference.low_bit import pack_coded, unpack
from octavo.ops.triton import low_bit_table
from octavo.ops.triton.low_bit import _eight_bit_product
from octavo.ops.triton.low_bit_matmul import (
    FOUR_BITS,
    LowBit,
    LowBitTuning,
    low_bit_layout,
    low_bit_matmul,
    unpack_weight,
    workspace_size,
)
from octavo.ops.triton.low_bit_table import ROW_CLASSES, choice
from octavo.ops.triton.skinny_matmul import SkinnyWorkspace

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
KINDS = (("int4", 128), ("int4", 0), ("table", 0), ("int8", 0), ("float8", 0))
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 8192)
BF16_FLOPS = 790e12
"""Of large products on an H200."""
SHARED_BYTES = 225_000
DEVICE = torch.device("cuda")


def coded(kind: str, out: int, inner: int, group: int) -> CodedRows:
    """Random codes whose product has the size of a layer's."""
    groups = inner // group if group else 1
    scales = torch.rand(out, groups, device=DEVICE) * 0.01 + 0.005
    if kind == "int4":
        codes = torch.randint(0, 16, (out, inner), device=DEVICE, dtype=torch.uint8)
        zeros = torch.full((out, groups), 8, device=DEVICE, dtype=torch.int16)
        return CodedRows(codes, 4, scales.half(), zeros, group=group)
    if kind == "table":
        codes = torch.randint(0, 16, (out, inner), device=DEVICE, dtype=torch.uint8)
        return CodedRows(codes, 4, table=torch.randn(out, 16, device=DEVICE).half() * 0.02)
    if kind == "int8":
        codes = torch.randint(-127, 128, (out, inner), device=DEVICE, dtype=torch.int8)
        return CodedRows(codes, 8, scales / 16, activations=Activations("int8"))
    codes = (torch.randn(out, inner, device=DEVICE) * 50).to(torch.float8_e4m3fn)
    return CodedRows(codes, 8, scales / 64, activations=Activations("float8"))


def packed(kind: str, out: int, inner: int, group: int) -> LowBit:
    weight = pack_coded(coded(kind, out, inner, group), torch.bfloat16)
    assert not isinstance(weight, (DenseWeight, SegmentedWeight))
    return weight


def grid(kind: str, group: int, rows: int) -> list[LowBitTuning]:
    tile = min(128, max(16, triton.next_power_of_2(rows)))
    widest = max(64, group) if kind in FOUR_BITS and group else group or 256
    found = []
    for columns, inner, split, warps, stages in itertools.product((64, 128), (64, 128, 256), (1, 2, 4, 8), (4, 8), (3, 4, 6)):
        bits = 4 if kind in FOUR_BITS else 8
        shared = (tile * 2 + columns * bits / 8) * inner * stages
        if inner <= widest and shared <= SHARED_BYTES and (warps == 4 or columns == 128) and (split < 4 or rows <= 64):
            found.append(LowBitTuning(columns, inner, split, warps, stages, tile))
    return found


def measure(weights: Sequence[LowBit], x: torch.Tensor, tunings: Sequence[LowBitTuning]) -> list[tuple[float, LowBitTuning]]:
    expected = x.float() @ unpack(weights[0], torch.float32).T
    timed = []
    for tuning in tunings:
        elements, tiles = workspace_size(len(x), weights[0].out_features, tuning)
        workspace = SkinnyWorkspace.allocate(elements, tiles, DEVICE)
        try:
            out = low_bit_matmul(x, weights[0], None, workspace, tuning)
        except triton.runtime.errors.OutOfResources:
            continue
        assert float((out.float() - expected).norm() / expected.norm()) < 1e-2, tuning
        timed.append((graph_us([functools.partial(low_bit_matmul, x, w, None, workspace, tuning) for w in weights]), tuning))
    return timed


def many_rows(weights: Sequence[LowBit], x: torch.Tensor) -> float:
    """The way that is taken where the weight is not read as it is stored."""

    def one(weight: LowBit) -> torch.Tensor:
        out = _eight_bit_product(x, weight, None)
        return F.linear(x, unpack_weight(weight, x.dtype)) if out is None else out

    return graph_us([functools.partial(one, w) for w in weights])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time a grid of tunings")
    parser.add_argument("--write-table", action="store_true", help="with --tune: keep the best in the package's table")
    parser.add_argument("--rows", type=int, nargs="+", default=None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_quant.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs an NVIDIA GPU.")
    torch.manual_seed(0)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    results: list[dict[str, object]] = []
    best: dict[tuple[str, int, int, int], dict[int, LowBitTuning | None]] = {}
    for (name, (out, inner)), (kind, group) in itertools.product(SHAPES.items(), KINDS):
        first = packed(kind, out, inner, group)
        copies = max(2, min(32, int(3e8 / first.nbytes) + 1))
        weights = [first, *(packed(kind, out, inner, group) for _ in range(copies - 1))]
        dense = [torch.randn(out, inner, device=DEVICE, dtype=torch.bfloat16) for _ in range(max(2, int(3e8 / (2 * out * inner)) + 1))]
        for rows in args.rows or (ROW_CLASSES if args.write_table else ROWS):
            x = torch.randn(rows, inner, device=DEVICE).bfloat16()
            floor = max(first.nbytes / READ_BYTES_PER_S, 2 * rows * out * inner / BF16_FLOPS) * 1e6
            cublas = graph_us([functools.partial(F.linear, x, w) for w in dense])
            shipped = choice(low_bit_layout(first).kind, out, inner, low_bit_layout(first).group, rows, sms)
            tunings = grid(kind, group, rows) if args.tune and rows <= ROW_CLASSES[-1] else [] if shipped is None else [shipped]
            stored = min(measure(weights, x, tunings), key=lambda pair: pair[0], default=(float("inf"), None))
            wide = many_rows(weights, x) if rows >= 32 else float("inf")
            us = min(stored[0], wide)
            best.setdefault((kind, out, inner, group), {})[rows] = stored[1] if stored[0] <= wide else None
            results.append(
                {
                    "shape": name,
                    "kind": kind,
                    "group": group,
                    "rows": rows,
                    "as_stored_us": None if stored[1] is None else round(stored[0], 2),
                    "many_rows_us": None if wide == float("inf") else round(wide, 2),
                    "cublas_bf16_us": round(cublas, 2),
                    "floor_us": round(floor, 2),
                    "tuning": None if stored[1] is None else vars(stored[1]),
                }
            )
            print(
                f"{name:8} {kind:6} g{group:<3} M={rows:<5} stored {stored[0]:8.2f} us, many rows {wide:8.2f}, "
                f"cuBLAS bf16 {cublas:8.2f}, floor {floor:8.2f}, {us / floor:5.2f} of the floor, {cublas / us:5.2f}x bf16"
            )
    if args.write_table:
        write_table(best)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    args.out.write_text(json.dumps({**versions, "results": results}, indent=1))


def write_table(best: dict[tuple[str, int, int, int], dict[int, LowBitTuning | None]]) -> None:
    """Put what was measured into the package's table."""
    path = Path(low_bit_table.__file__)
    head, marker, _ = path.read_text().partition("    # (kind, out_features, in_features, group): one choice a row class\n")
    lines = [f'    ("{k}", {o}, {i}, {g}): ({", ".join(_literal(by[n]) for n in ROW_CLASSES)}),\n' for (k, o, i, g), by in best.items()]
    path.write_text(head + marker + "".join(lines) + "}\n")


def _literal(t: LowBitTuning | None) -> str:
    return "None" if t is None else f"LowBitTuning({t.columns}, {t.inner}, {t.split}, {t.warps}, {t.stages}, {t.rows})"


if __name__ == "__main__":
    main()
