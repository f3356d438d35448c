"""x @ W.T whose bits in a row do not depend on how many rows there are, nor on what they hold.

An output element is one chain of matrix instructions along the inner dimension, in order, with no split: on Hopper the same chain
in every tiling below, since each instruction takes 16 inner elements whatever the size of its tile and whichever operand comes
first. So few rows may have narrow strips that fill the GPU, and many rows large tiles that reuse what they load. A test on the
device compares them.
"""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.ops.packed import DenseWeight, Float8Weight, Int8Weight, LinearWeight, SegmentedWeight
from octavo.ops.reference.low_bit import activation_group, rounded, unpack
from octavo.ops.triton.launch import overlap_supported, sm_count

_HALF = (torch.bfloat16, torch.float16)
_BAND = 8
"""Row tiles that share a strip of weights while it is in the cache."""


@dataclass(frozen=True)
class InvariantTiling:
    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    weights_first: bool = False
    """Weights are the first operand of the matrix instruction, whose 64 lines are then columns: rows may be as few as 16."""
    descriptors: bool = False
    """Load through the tensor memory accelerator (Hopper on)."""


def invariant_tiling(rows: int, columns: int, dtype: torch.dtype, sm_count: int, *, hopper: bool, aligned: bool) -> InvariantTiling:
    """Measured on one H200, where all of these give the same bits. Older cards have one tiling for any number of rows.

    Args:
        aligned: the operands are as the tensor memory accelerator wants them.
    """
    if dtype not in _HALF:
        return InvariantTiling(64, 64, 32, 4, 2)
    if not hopper:
        return InvariantTiling(64, 64, 64, 4, 3)
    if rows <= 16 and columns < 64 * sm_count:
        return InvariantTiling(16, 64, 256, 4, 3, weights_first=True)
    if rows <= 32:
        return InvariantTiling(16 if rows <= 16 else 32, 64, 128, 4, 4, weights_first=True)
    if rows <= 64 and columns >= 128 * sm_count:
        return InvariantTiling(64, 128, 128, 4, 3)
    if rows <= 64:
        return InvariantTiling(64, 64 if columns >= 40 * sm_count else 32, 128, 4, 4)
    for tall, wide in ((128, 128), (64, 128)):
        if triton.cdiv(rows, tall) * triton.cdiv(columns, wide) >= 0.9 * sm_count:
            return InvariantTiling(tall, wide, 64, 4, 4, descriptors=aligned)
    return InvariantTiling(64, 64, 128, 4, 4)


@triton.jit
def _tile_of(row_tiles, column_tiles, BAND: tl.constexpr):
    """Which tile this thread block takes: bands of row tiles, column by column, so that a strip of weights is read once a band."""
    index = tl.program_id(0)
    in_band = BAND * column_tiles
    first = index // in_band * BAND
    height = tl.minimum(row_tiles - first, BAND)
    return first + index % in_band % height, index % in_band // height


@triton.jit(do_not_specialize=["rows", "row_tiles"])
def _pointer_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    rows,
    columns,
    inner,
    row_tiles,
    column_tiles,
    x_stride,
    w_stride,
    out_stride,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    BAND: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row_tile, column_tile = _tile_of(row_tiles, column_tiles, BAND)
    m = row_tile * ROWS + tl.arange(0, ROWS)
    n = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = (m < rows)[:, None], (n < columns)[:, None]
    x_rows = x_ptr + m.to(tl.int64)[:, None] * x_stride
    w_rows = w_ptr + n.to(tl.int64)[:, None] * w_stride
    if WEIGHTS_FIRST:
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k0 in tl.range(0, inner, INNER, num_stages=STAGES):
        k = k0 + tl.arange(0, INNER)[None, :]
        if EVEN:
            w = tl.load(w_rows + k)
            x = tl.load(x_rows + k, mask=in_rows, other=0.0)
        else:
            w = tl.load(w_rows + k, mask=in_columns & (k < inner), other=0.0)
            x = tl.load(x_rows + k, mask=in_rows & (k < inner), other=0.0)
        if WEIGHTS_FIRST:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=in_rows & (n < columns)[None, :])


@triton.jit(do_not_specialize=["rows", "row_tiles"])
def _descriptor_kernel(
    x_desc,
    w_desc,
    bias_ptr,
    out_ptr,
    rows,
    columns,
    inner,
    row_tiles,
    column_tiles,
    out_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    BAND: tl.constexpr,
):
    row_tile, column_tile = _tile_of(row_tiles, column_tiles, BAND)
    m = row_tile * ROWS
    n = column_tile * COLUMNS
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in tl.range(0, inner, INNER, num_stages=STAGES):
        x = x_desc.load([m, k])
        w = w_desc.load([n, k])
        acc = tl.dot(x, tl.trans(w), acc)
    column = n + tl.arange(0, COLUMNS)
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    row = m + tl.arange(0, ROWS)
    out = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


def invariant_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiling: InvariantTiling) -> torch.Tensor:
    """x @ weight.T + bias, float32 sums.

    Args:
        x: [rows, in_features], rows contiguous.
        weight: [out_features, in_features], dtype as x.
        bias: [out_features]

    Returns:
        [rows, out_features] in x's dtype.
    """
    rows, inner = x.shape
    columns = weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    row_tiles, column_tiles = triton.cdiv(rows, tiling.rows), triton.cdiv(columns, tiling.columns)
    grid = (row_tiles * column_tiles,)
    if tiling.descriptors:
        _descriptor_kernel[grid](
            TensorDescriptor(x, [rows, inner], [x.stride(0), 1], [tiling.rows, tiling.inner]),
            TensorDescriptor(weight, [columns, inner], [weight.stride(0), 1], [tiling.columns, tiling.inner]),
            x if bias is None else bias,
            out,
            rows,
            columns,
            inner,
            row_tiles,
            column_tiles,
            out.stride(0),
            ROWS=tiling.rows,
            COLUMNS=tiling.columns,
            INNER=tiling.inner,
            STAGES=tiling.stages,
            BIAS=bias is not None,
            BAND=_BAND,
            num_warps=tiling.warps,
        )
        return out
    overlap = overlap_supported(x.device)
    _pointer_kernel[grid](
        x,
        weight,
        x if bias is None else bias,
        out,
        rows,
        columns,
        inner,
        row_tiles,
        column_tiles,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        EVEN=columns % tiling.columns == 0 and inner % tiling.inner == 0,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        INNER=tiling.inner,
        STAGES=tiling.stages,
        BIAS=bias is not None,
        BAND=_BAND,
        WEIGHTS_FIRST=tiling.weights_first,
        OVERLAP=overlap,
        **({"launch_pdl": True} if overlap else {}),
        num_warps=tiling.warps,
    )
    return out


def invariant_linear(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """`ops.registry.Linear` of a batch-invariant model."""
    if isinstance(weight, SegmentedWeight):
        out = torch.cat([invariant_linear(x, part, None) for part in weight.parts], -1)
        return out if bias is None else out + bias
    if isinstance(weight, (Int8Weight, Float8Weight)):
        x = rounded(x, weight.activations, activation_group(weight))  # a token's scale depends on the token alone
    dense = weight.data if isinstance(weight, DenseWeight) else unpack(weight, x.dtype)
    # Lines at multiples of 16 bytes.
    aligned = x.stride(0) % 8 == 0 and weight.in_features % 8 == 0 and x.data_ptr() % 16 == 0
    columns, hopper = weight.out_features, overlap_supported(x.device)
    tiling = invariant_tiling(x.shape[0], columns, x.dtype, sm_count(x.device), hopper=hopper, aligned=aligned)
    return invariant_matmul(x, dense, bias, tiling)
