"""x @ W.T where W stays in 4 or 8 bits: read once as it is stored, and unpacked in registers on its way into the tensor cores.

The weight is the first operand of the products, for that one may come from registers: nothing that was unpacked is written anywhere.
Codes become exact small integers in x's dtype (or a table's entries), sums are float32, and a group's scale multiplies the sum over
the group: rounding is that of a product with the dequantised weight in float32, or better.
Strips, split-K and the order of additions are those of `skinny_matmul`: deterministic, in one launch.
"""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.packed import Float8Weight, Int4Weight, Int8Weight, OffsetWeight, TableWeight
from octavo.ops.triton.launch import overlap_supported
from octavo.ops.triton.skinny_matmul import SkinnyWorkspace
from octavo.ops.triton.split_softmax import arrived_last

LowBit = Int4Weight | TableWeight | Int8Weight | Float8Weight
KindName = Literal["int4", "table", "int8", "float8"]

FOUR_BITS: Final = ("int4", "table")
MAX_TILE_ROWS: Final = 128
_MIN_DOT_ROWS: Final = 16


@dataclass(frozen=True)
class LowBitTuning:
    columns: int
    """Output columns of a strip."""
    inner: int
    """Inner elements a loop iteration; no more than a group has, and for 4-bit codes a multiple of 64."""
    split: int
    """Parts of the inner dimension."""
    warps: int
    stages: int
    rows: int = MAX_TILE_ROWS
    """Most rows of a tile."""


@triton.jit
def _exact(codes, IN_HALF: tl.constexpr):
    """uint8 codes below 16 as 128 + code in bfloat16, or 1024 + code in float16: the bits of the code put below those of the power.

    Cheaper than a conversion, and exact; whoever calls takes the power off together with the zero point.
    """
    if IN_HALF:
        number = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        number = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    return number


@triton.jit
def _byte_of(k):
    """Where the code of column k is: see `Int8Weight.ordered`."""
    return k // 16 * 16 + k % 8 // 2 * 4 + k // 8 % 2 * 2 + k % 2


@triton.jit
def accumulated(
    acc,
    x_columns,
    w_rows,
    scale_at,
    zero_at,
    entries,
    in_rows,
    in_columns,
    lo,
    hi,
    stored,
    groups,
    scale_group_stride,
    zero_group_stride,
    X: tl.constexpr,
    KIND: tl.constexpr,
    FOUR: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    EVEN: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
    ORDERED: tl.constexpr = False,
):
    """acc [columns, rows] plus the products of inner elements from `lo` up to `hi`, scaled.

    x_columns: [1, rows] where each row of x begins. w_rows, entries: [columns, 1] where each column's codes and table begin.
    scale_at, zero_at: [columns] those of group 0. GROUP: columns of a group, 0 where one scale is for a whole row. ZEROS: each group has
    a zero point (else 8 for int4, 0). X: x's dtype. ORDERED: see `Int4Weight.ordered` and `Int8Weight.ordered`.
    """
    IN_HALF: tl.constexpr = tl.float16 == X
    POWER: tl.constexpr = 1024 if IN_HALF else 128
    TWO_GROUPS: tl.constexpr = FOUR and GROUP == 32 and not ORDERED
    for k0 in tl.range(lo, hi, INNER, num_stages=STAGES):
        if FOUR:
            b = tl.arange(0, INNER // 2)
            at = k0 // 2 + b[None, :]
            if EVEN:
                w = tl.load(w_rows + at)
            else:
                w = tl.load(w_rows + at, mask=in_columns[:, None] & (at < stored), other=0)
            if ORDERED:
                byte = k0 // 2 + b
                first = byte // 16 * 32 + byte % 2 * 16 + byte // 4 % 4 * 2 + byte // 2 % 2
                second = first + 8
            else:
                first = k0 + (b // 32) * 64 + b % 32
                second = first + 32
            if EVEN:
                x_low = tl.load(x_columns + first[:, None], mask=in_rows, other=0.0)
                x_high = tl.load(x_columns + second[:, None], mask=in_rows, other=0.0)
            else:
                x_low = tl.load(x_columns + first[:, None], mask=in_rows & (first < hi)[:, None], other=0.0)
                x_high = tl.load(x_columns + second[:, None], mask=in_rows & (second < hi)[:, None], other=0.0)
            group = k0 // GROUP if GROUP > 0 else 0
            # Past the last group there are no inputs, and nothing counts.
            next_group = tl.minimum(group + 1, groups - 1)
            if KIND == "table":
                low = tl.load(entries + (w & 15), mask=in_columns[:, None], other=0.0).to(X)
                high = tl.load(entries + (w >> 4), mask=in_columns[:, None], other=0.0).to(X)
            else:
                low = _exact(w & 15, IN_HALF)
                high = _exact(w >> 4, IN_HALF)
                if ZEROS:
                    zero = tl.load(zero_at + group * zero_group_stride, mask=in_columns, other=0).to(tl.float32) + POWER
                    low = low - zero.to(low.dtype)[:, None]
                    if TWO_GROUPS:
                        zero = tl.load(zero_at + next_group * zero_group_stride, mask=in_columns, other=0).to(tl.float32) + POWER
                    high = high - zero.to(high.dtype)[:, None]
                else:
                    low = low - (POWER + 8)
                    high = high - (POWER + 8)
            if GROUP == 0:
                acc = tl.dot(low, x_low, acc)
                acc = tl.dot(high, x_high, acc)
            elif TWO_GROUPS:
                scale = tl.load(scale_at + group * scale_group_stride, mask=in_columns, other=0.0).to(tl.float32)
                acc += tl.dot(low, x_low) * scale[:, None]
                scale = tl.load(scale_at + next_group * scale_group_stride, mask=in_columns, other=0.0)
                acc += tl.dot(high, x_high) * scale.to(tl.float32)[:, None]
            else:
                scale = tl.load(scale_at + group * scale_group_stride, mask=in_columns, other=0.0).to(tl.float32)
                total = tl.dot(low, x_low)
                total = tl.dot(high, x_high, total)
                acc += total * scale[:, None]
        else:
            k = k0 + tl.arange(0, INNER)
            place = _byte_of(k) if ORDERED else k
            if EVEN:
                w = tl.load(w_rows + place[None, :])
                x = tl.load(x_columns + k[:, None], mask=in_rows, other=0.0)
            else:
                w = tl.load(w_rows + place[None, :], mask=in_columns[:, None] & (k < hi)[None, :], other=0.0)
                x = tl.load(x_columns + k[:, None], mask=in_rows & (k < hi)[:, None], other=0.0)
            values = w.to(X)
            group = k0 // GROUP if GROUP > 0 else 0
            if ZEROS:
                zero = tl.load(zero_at + group * zero_group_stride, mask=in_columns, other=0)
                values = values - zero.to(values.dtype)[:, None]
            if GROUP == 0:
                acc = tl.dot(values, x, acc)
            else:
                scale = tl.load(scale_at + group * scale_group_stride, mask=in_columns, other=0.0).to(tl.float32)
                acc += tl.dot(values, x) * scale[:, None]
    if SCALES and GROUP == 0:
        acc *= tl.load(scale_at, mask=in_columns, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit(do_not_specialize=["rows", "columns"])
def _low_bit_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    zeros_ptr,
    table_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    rows,
    columns,
    inner,
    stored,
    share,
    groups,
    scale_group_stride,
    scale_row_stride,
    table_stride,
    x_stride,
    w_stride,
    out_stride,
    KIND: tl.constexpr,
    FOUR: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    ORDERED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    strip = tl.program_id(0)
    part = tl.program_id(1)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    n = strip * COLUMNS + tl.arange(0, COLUMNS)
    lo = part * share
    hi = tl.minimum(lo + share, inner)
    x_columns = x_ptr + m.to(tl.int64)[None, :] * x_stride
    w_rows = w_ptr + n.to(tl.int64)[:, None] * w_stride
    in_rows = (m < rows)[None, :]
    in_columns = n < columns
    scale_at = scales_ptr + (n // ROW_BLOCK).to(tl.int64) * scale_row_stride
    zero_at = zeros_ptr + n
    acc = accumulated(
        tl.zeros([COLUMNS, ROWS], tl.float32),
        x_columns,
        w_rows,
        scale_at,
        zero_at,
        table_ptr + n[:, None] * table_stride,
        in_rows,
        in_columns,
        lo,
        hi,
        stored,
        groups,
        scale_group_stride,
        columns,
        x_ptr.dtype.element_ty,
        KIND,
        FOUR,
        GROUP,
        SCALES,
        ZEROS,
        EVEN,
        INNER,
        STAGES,
        ORDERED,
    )
    out = out_ptr + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    kept = in_rows & in_columns[:, None]
    if SPLIT > 1:
        tile = strip + tl.program_id(2) * tl.num_programs(0)
        place = parts_ptr + (tile * SPLIT * COLUMNS + tl.arange(0, COLUMNS))[:, None].to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(place + part * (ROWS * COLUMNS), acc)
        if arrived_last(counters_ptr + tile, SPLIT):
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
            for p in tl.static_range(SPLIT):
                total += tl.load(place + p * (ROWS * COLUMNS), cache_modifier=".cg")
            if BIAS:
                total += tl.load(bias_ptr + n, mask=in_columns, other=0.0).to(tl.float32)[:, None]
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=kept)
    else:
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=in_columns, other=0.0).to(tl.float32)[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=kept)


@dataclass(frozen=True)
class LowBitLayout:
    """What kernels need to know of a weight, whatever its kind."""

    kind: KindName
    group: int
    """0: one scale for a row."""
    groups: int
    row_block: int
    scales: torch.Tensor | None
    scale_group_stride: int
    scale_row_stride: int
    zeros: torch.Tensor | None
    table: torch.Tensor | None
    inner: int
    """Inputs as they are stored: with those that fill up groups."""
    ordered: bool = False
    """See `Int4Weight.ordered`, `Int8Weight.ordered`."""
    offsets: torch.Tensor | None = None
    """See `OffsetWeight`."""


def low_bit_layout(weight: LowBit | OffsetWeight) -> LowBitLayout:
    match weight:
        case OffsetWeight():
            return replace(low_bit_layout(weight.codes), offsets=weight.offsets)
        case Float8Weight():
            groups = weight.scales.shape[1]
            group = weight.group if groups > 1 else 0
            return LowBitLayout("float8", group, groups, weight.row_block, weight.scales, 1, groups, None, None, weight.in_features)
        case Int8Weight() | Int4Weight():
            inner = weight.in_features if weight.columns is None else len(weight.columns)
            groups, out = weight.scales.shape
            kind: KindName = "int4" if isinstance(weight, Int4Weight) else "int8"
            group = weight.group if groups > 1 else 0
            return LowBitLayout(kind, group, groups, 1, weight.scales, out, 1, weight.zeros, None, inner, weight.ordered)
        case TableWeight():
            groups = 0 if weight.scales is None else weight.scales.shape[0]
            group = weight.group if groups > 1 else 0
            return LowBitLayout("table", group, groups, 1, weight.scales, weight.out_features, 1, None, weight.table, weight.in_features)


def tile_rows(rows: int, tuning: LowBitTuning) -> int:
    return min(tuning.rows, max(_MIN_DOT_ROWS, 1 << (rows - 1).bit_length()))


def workspace_size(rows: int, columns: int, tuning: LowBitTuning) -> tuple[int, int]:
    """Elements and counters of a workspace that a product of so many rows needs."""
    tile = tile_rows(rows, tuning)
    tiles = triton.cdiv(columns, tuning.columns) * triton.cdiv(rows, tile)
    return tiles * tuning.split * tuning.columns * tile, tiles


def low_bit_matmul(
    x: torch.Tensor, weight: LowBit, bias: torch.Tensor | None, workspace: SkinnyWorkspace | None, tuning: LowBitTuning
) -> torch.Tensor:
    """x @ weight.T + bias, float32 sums; without a table's outliers.

    Args:
        x: [rows, inputs as they are stored], bf16 or fp16; rows contiguous.
        bias: [out_features]
        workspace: needed where the tuning splits.

    Returns:
        [rows, out_features] in x's dtype.
    """
    layout, rows, columns = low_bit_layout(weight), x.shape[0], weight.out_features
    if layout.ordered and layout.kind in FOUR_BITS and layout.group:
        tuning = replace(tuning, inner=min(tuning.inner, layout.group))  # both halves of a byte are of one group
    assert layout.group == 0 or tuning.inner <= (max(64, layout.group) if layout.kind in FOUR_BITS else layout.group)
    if tuning.split > 1:
        elements, tiles = workspace_size(rows, columns, tuning)
        assert workspace is not None and len(workspace.parts) >= elements and len(workspace.counters) >= tiles
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    share = triton.cdiv(layout.inner, tuning.split * tuning.inner) * tuning.inner
    tile, overlap = tile_rows(rows, tuning), overlap_supported(x.device)
    grid = (triton.cdiv(columns, tuning.columns), tuning.split, triton.cdiv(rows, tile))
    _low_bit_kernel[grid](
        x,
        weight.data,
        weight.data if layout.scales is None else layout.scales,
        weight.data if layout.zeros is None else layout.zeros,
        x if layout.table is None else layout.table,
        x if bias is None else bias,
        out,
        out if workspace is None else workspace.parts,
        out if workspace is None else workspace.counters,
        rows,
        columns,
        layout.inner,
        weight.data.shape[1],
        share,
        layout.groups,
        layout.scale_group_stride,
        layout.scale_row_stride,
        0 if layout.table is None or len(layout.table) == 1 else layout.table.stride(0),
        x.stride(0),
        weight.data.stride(0),
        out.stride(0),
        KIND=layout.kind,
        FOUR=layout.kind in FOUR_BITS,
        GROUP=layout.group,
        ROW_BLOCK=layout.row_block,
        SCALES=layout.scales is not None,
        ZEROS=layout.zeros is not None,
        EVEN=columns % tuning.columns == 0 and share * tuning.split == layout.inner,
        ROWS=tile,
        COLUMNS=tuning.columns,
        INNER=tuning.inner,
        SPLIT=tuning.split,
        STAGES=tuning.stages,
        BIAS=bias is not None,
        ORDERED=layout.ordered,
        OVERLAP=overlap,
        **({"launch_pdl": True} if overlap else {}),
        num_warps=tuning.warps,
    )
    return out


@triton.jit(do_not_specialize=["columns"])
def _unpack_kernel(
    w_ptr,
    scales_ptr,
    zeros_ptr,
    table_ptr,
    out_ptr,
    columns,
    inner,
    scale_group_stride,
    scale_row_stride,
    table_stride,
    w_stride,
    out_stride,
    KIND: tl.constexpr,
    FOUR: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    ORDERED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.program_id(1) * INNER + tl.arange(0, INNER)
    kept = (n < columns)[:, None] & (k < inner)[None, :]
    w_rows = w_ptr + n.to(tl.int64)[:, None] * w_stride
    if ORDERED and FOUR:
        # Words of the codes that lie 8 columns apart, of an even and an odd one: see `Int4Weight.ordered`.
        word = tl.program_id(1) * (INNER // 8) + tl.arange(0, INNER // 8)
        words = tl.load(w_rows + word[None, :], mask=(n < columns)[:, None] & (word < inner // 8)[None, :], other=0)
        shift = tl.reshape(tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 2)[None, :] * 16, (1, 1, 1, 4, 2))
        codes = ((tl.reshape(words, (COLUMNS, INNER // 32, 4, 1, 1)) >> shift) & 15).to(tl.uint8)
        w = tl.reshape(tl.permute(codes, (0, 1, 3, 2, 4)), (COLUMNS, INNER))
    elif FOUR:
        w = tl.load(w_rows + ((k // 64) * 32 + k % 32)[None, :], mask=kept, other=0)
        w = (w >> (((k // 32) % 2) * 4).to(tl.uint8)[None, :]) & 15
    else:
        w = tl.load(w_rows + (_byte_of(k) if ORDERED else k)[None, :], mask=kept, other=0.0)
    group = k // GROUP if GROUP > 0 else k * 0
    if KIND == "table":
        values = tl.load(table_ptr + n[:, None] * table_stride + w, mask=kept, other=0.0).to(tl.float32)
    else:
        values = w.to(tl.float32)
        if ZEROS:
            values -= tl.load(zeros_ptr + group[None, :] * columns + n[:, None], mask=kept, other=0).to(tl.float32)
        elif KIND == "int4":
            values -= 8.0
    if SCALES:
        at = scales_ptr + group[None, :] * scale_group_stride + (n // ROW_BLOCK).to(tl.int64)[:, None] * scale_row_stride
        values *= tl.load(at, mask=kept, other=0.0).to(tl.float32)
    tl.store(out_ptr + n.to(tl.int64)[:, None] * out_stride + k[None, :], values.to(out_ptr.dtype.element_ty), mask=kept)


def unpack_weight(weight: LowBit, dtype: torch.dtype) -> torch.Tensor:
    """[out_features, inputs as they are stored], dequantised for a product of many rows; without a table's outliers."""
    layout, columns = low_bit_layout(weight), weight.out_features
    out = torch.empty(columns, layout.inner, dtype=dtype, device=weight.data.device)
    overlap = overlap_supported(out.device)
    grid = (triton.cdiv(columns, 16), triton.cdiv(layout.inner, 256))
    data = weight.data.view(torch.int32) if layout.ordered and layout.kind in FOUR_BITS else weight.data
    _unpack_kernel[grid](
        data,
        weight.data if layout.scales is None else layout.scales,
        weight.data if layout.zeros is None else layout.zeros,
        weight.data if layout.table is None else layout.table,
        out,
        columns,
        layout.inner,
        layout.scale_group_stride,
        layout.scale_row_stride,
        0 if layout.table is None or len(layout.table) == 1 else layout.table.stride(0),
        data.stride(0),
        out.stride(0),
        KIND=layout.kind,
        FOUR=layout.kind in FOUR_BITS,
        GROUP=layout.group,
        ROW_BLOCK=layout.row_block,
        SCALES=layout.scales is not None,
        ZEROS=layout.zeros is not None,
        COLUMNS=16,
        INNER=256,
        ORDERED=layout.ordered,
        OVERLAP=overlap,
        **({"launch_pdl": True} if overlap else {}),
        num_warps=4,
    )
    return out


@triton.jit
def _sparse_kernel(x_ptr, out_ptr, begins_ptr, columns_ptr, values_ptr, x_stride, out_stride, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """One output of one row: the products with its outliers, added to what is there."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(0)
    m = tl.program_id(1).to(tl.int64)
    begin = tl.load(begins_ptr + n)
    end = tl.load(begins_ptr + n + 1)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        k = tl.load(columns_ptr + i, mask=i < end, other=0)
        value = tl.load(values_ptr + i, mask=i < end, other=0.0).to(tl.float32)
        acc += value * tl.load(x_ptr + m * x_stride + k).to(tl.float32)
    place = out_ptr + m * out_stride + n
    tl.store(place, (tl.load(place).to(tl.float32) + tl.sum(acc, 0)).to(out_ptr.dtype.element_ty))


def add_sparse(x: torch.Tensor, weight: TableWeight, out: torch.Tensor) -> None:
    """Add what the outliers contribute to `out` [rows, out_features]."""
    if (sparse := weight.outliers) is None or not len(sparse.values):
        return
    overlap = overlap_supported(x.device)
    _sparse_kernel[(weight.out_features, x.shape[0])](
        x,
        out,
        sparse.begins,
        sparse.columns,
        sparse.values,
        x.stride(0),
        out.stride(0),
        BLOCK=32,
        OVERLAP=overlap,
        **({"launch_pdl": True} if overlap else {}),
        num_warps=1,
    )
