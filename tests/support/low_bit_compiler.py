"""Compiles the low-bit kernels for a GPU that need not be there. Run as a program: prints one JSON object a kernel.

The interpreter that other tests use forgives much that the compiler does not.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from octavo.ops.triton import low_bit_experts, low_bit_matmul, round_rows

_CODES = {"int4": "*u8", "table": "*u8", "int8": "*i8", "float8": "*fp8e4nv"}
_SIZES = ("columns", "inner", "scale_group_stride", "scale_row_stride", "table_stride", "w_stride", "out_stride")


def build(name: str, kernel: Any, signature: dict[str, str], constants: dict[str, object], *, warps: int = 4, capability: int = 90) -> None:
    names = kernel.arg_names
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n in signature and (signature[n].startswith("*") or n.endswith("stride") or n in ("inner", "share", "stored"))
    }
    source = ASTSource(
        kernel, {n: signature.get(n, "constexpr") for n in names}, {(names.index(k),): v for k, v in constants.items()}, aligned
    )
    built = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": 4})
    ptx = built.asm["ptx"]
    print(json.dumps({"kernel": name, "shared": built.metadata.shared, "wgmma": "wgmma" in ptx, "cp_async": "cp.async" in ptx}))


def product(kind: str, x: str, group: int, rows: int, capability: int, *, ordered: bool = False) -> None:
    four = kind in low_bit_matmul.FOUR_BITS
    signature = {
        **dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), f"*{x}"),
        "w_ptr": _CODES[kind],
        "scales_ptr": "*fp32" if kind == "float8" else "*fp16",
        "zeros_ptr": "*u8" if kind == "int4" else "*i16",
        "table_ptr": "*fp16",
        "parts_ptr": "*fp32",
        "counters_ptr": "*i32",
        **dict.fromkeys((*_SIZES, "rows", "stored", "share", "groups", "x_stride"), "i32"),
    }
    constants = {
        "KIND": kind,
        "FOUR": four,
        "GROUP": group,
        "ROW_BLOCK": 1,
        "SCALES": True,
        "ZEROS": kind in ("int4", "int8"),
        "EVEN": True,
        "ROWS": rows,
        "COLUMNS": 64,
        "INNER": 64 if four and group == 32 else min(128, group or 128),
        "SPLIT": 2,
        "STAGES": 4,
        "BIAS": True,
        "ORDERED": ordered,
        "OVERLAP": capability >= 90,
    }
    build(f"{kind} {x} {group} {rows} sm{capability}", low_bit_matmul._low_bit_kernel, signature, constants, capability=capability)


def grouped(kind: str) -> None:
    signature = {
        **dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), "*bf16"),
        "w_ptr": _CODES[kind],
        "scales_ptr": "*fp32" if kind == "float8" else "*fp16",
        "zeros_ptr": "*u8" if kind == "int4" else "*i16",
        "table_ptr": "*fp32",
        "factor_ptr": "*fp32",
        **dict.fromkeys(("order_ptr", "tile_expert_ptr", "tile_begin_ptr", "tile_end_ptr"), "*i32"),
        **dict.fromkeys((*_SIZES, "stored", "groups", "zero_group_stride", "x_stride"), "i32"),
    }
    constants = {
        "TOP_K": 8,
        "GATHER": True,
        "BIAS": True,
        "KIND": kind,
        "FOUR": kind in low_bit_matmul.FOUR_BITS,
        "GROUP": 32 if kind == "table" else 128,
        "SCALES": True,
        "ROW_BLOCK": 128 if kind == "float8" else 1,
        "ZEROS": kind == "int4",
        "EVEN": True,
        "ROWS": 16,
        "COLUMNS": 64,
        "INNER": 64 if kind == "table" else 128,
        "STAGES": 4,
    }
    build(f"experts {kind} sm90", low_bit_experts._experts_kernel, signature, constants)


def unpacking(kind: str, *, ordered: bool = False) -> None:
    codes = "*i32" if ordered else _CODES[kind]
    signature = {"w_ptr": codes, "scales_ptr": "*fp16", "zeros_ptr": "*u8", "table_ptr": "*fp16", "out_ptr": "*bf16"}
    constants = {
        "KIND": kind,
        "FOUR": kind in low_bit_matmul.FOUR_BITS,
        "GROUP": 128,
        "ROW_BLOCK": 1,
        "SCALES": True,
        "ZEROS": kind == "int4",
        "ORDERED": ordered,
    }
    sizes = dict.fromkeys(_SIZES, "i32")
    build(f"unpack {kind}", low_bit_matmul._unpack_kernel, signature | sizes, {**constants, "COLUMNS": 16, "INNER": 256, "OVERLAP": True})


def rounding(integer: bool) -> None:
    signature = {"x_ptr": "*bf16", "out_ptr": "*i8" if integer else "*fp8e4nv", "scale_ptr": "*fp32", "given_ptr": "*fp32"}
    constants = {"LARGEST": 127.5 if integer else 448.0, "INTEGER": integer, "GIVEN": False, "OVERLAP": True}
    sizes = {"inner": "i32", "x_stride": "i32"}
    build("round", round_rows._round_kernel, signature | sizes, {**constants, "PAD": 4096}, warps=8)
    build("round long", round_rows._round_long_kernel, signature | sizes, {**constants, "BLOCK": 1024})


def main() -> None:
    for kind in _CODES:
        product(kind, "bf16", 128, 16, 90)
        unpacking(kind)
    product("int4", "fp16", 32, 128, 90)
    product("int4", "bf16", 128, 16, 90, ordered=True)
    unpacking("int4", ordered=True)
    product("table", "fp16", 0, 128, 90)
    product("int4", "fp16", 128, 16, 80)
    for kind in _CODES:
        grouped(kind)
    for integer in (True, False):
        rounding(integer)
    signature = {"sums_ptr": "*i32", "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    sizes = {"columns": "i32", "x_scale_stride": "i32"}
    build("scale", round_rows._scale_kernel, signature | sizes, {"BIAS": True, "BLOCK": 1024, "OVERLAP": True})
    signature = {"x_ptr": "*bf16", "out_ptr": "*bf16", "begins_ptr": "*i32", "columns_ptr": "*i32", "values_ptr": "*fp32"}
    sizes = {"x_stride": "i32", "out_stride": "i32"}
    build("sparse", low_bit_matmul._sparse_kernel, signature | sizes, {"BLOCK": 32, "OVERLAP": True}, warps=1)


if __name__ == "__main__":
    sys.exit(main())
