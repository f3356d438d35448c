"""The grouped product of `experts.py` where the experts' weights stay in 4 or 8 bits: read as they are stored, by the loop of
`low_bit_matmul`. All experts of a layer are one weight with their rows one below the other."""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo.ops.packed import ExpertsWeight
from octavo.ops.triton.low_bit_matmul import FOUR_BITS, accumulated, low_bit_layout

if TYPE_CHECKING:
    from octavo.ops.triton.experts import ExpertTiles


@triton.jit
def _experts_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    zeros_ptr,
    table_ptr,
    bias_ptr,
    factor_ptr,
    out_ptr,
    order_ptr,
    tile_expert_ptr,
    tile_begin_ptr,
    tile_end_ptr,
    columns,
    inner,
    stored,
    groups,
    scale_group_stride,
    scale_row_stride,
    zero_group_stride,
    table_stride,
    x_stride,
    w_stride,
    out_stride,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    BIAS: tl.constexpr,
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
    STAGES: tl.constexpr,
):
    """One tile of one expert. GATHER: x is by token and out by sorted pair; else x is by sorted pair, and out by pair, scaled."""
    tile = tl.program_id(1)
    begin = tl.load(tile_begin_ptr + tile)
    end = tl.load(tile_end_ptr + tile)
    if begin >= end:
        return
    expert = tl.load(tile_expert_ptr + tile)
    place = begin + tl.arange(0, ROWS)
    real = place < end
    pair = tl.load(order_ptr + place, mask=real, other=0)
    if GATHER:
        x_row = pair // TOP_K
        out_row = place
    else:
        x_row = place
        out_row = pair
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = n < columns
    row = expert * columns + n
    w_rows = w_ptr + row.to(tl.int64)[:, None] * w_stride
    acc = accumulated(
        tl.zeros([COLUMNS, ROWS], tl.float32),
        x_ptr + x_row.to(tl.int64)[None, :] * x_stride,
        w_rows,
        scales_ptr + (row // ROW_BLOCK).to(tl.int64) * scale_row_stride,
        zeros_ptr + row,
        table_ptr + row[:, None] * table_stride,
        real[None, :],
        in_columns,
        0,
        inner,
        stored,
        groups,
        scale_group_stride,
        zero_group_stride,
        x_ptr.dtype.element_ty,
        KIND,
        FOUR,
        GROUP,
        SCALES,
        ZEROS,
        EVEN,
        INNER,
        STAGES,
    )
    if BIAS:
        acc += tl.load(bias_ptr + row, mask=in_columns, other=0.0).to(tl.float32)[:, None]
    if not GATHER:
        acc *= tl.load(factor_ptr + pair, mask=real, other=0.0)[None, :]
    out = out_ptr + out_row.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=real[None, :] & in_columns[:, None])


def low_bit_product(
    x: torch.Tensor, weight: ExpertsWeight, bias: torch.Tensor | None, factors: torch.Tensor | None, tiles: ExpertTiles, top_k: int
) -> torch.Tensor:
    """See `experts._product`; x is bf16 or fp16."""
    low_bit = weight.low_bit
    assert low_bit is not None
    layout, columns, rows = low_bit_layout(low_bit), weight.out_features, max(16, tiles.rows)
    widest = 128 if rows <= 32 else 64
    four = layout.kind in FOUR_BITS
    step = min(widest, max(layout.group, 64)) if four and layout.group else min(widest, layout.group) if layout.group else widest
    out = torch.empty(len(tiles.order), columns, dtype=x.dtype, device=x.device)
    _experts_kernel[(triton.cdiv(columns, 64), len(tiles.expert))](
        x,
        low_bit.data,
        low_bit.data if layout.scales is None else layout.scales,
        low_bit.data if layout.zeros is None else layout.zeros,
        x if layout.table is None else layout.table,
        x if bias is None else bias,
        x if factors is None else factors,
        out,
        tiles.order,
        tiles.expert,
        tiles.begin,
        tiles.end,
        columns,
        layout.inner,
        low_bit.data.shape[1],
        layout.groups,
        layout.scale_group_stride,
        layout.scale_row_stride,
        low_bit.out_features,
        0 if layout.table is None or len(layout.table) == 1 else layout.table.stride(0),
        x.stride(0),
        low_bit.data.stride(0),
        out.stride(0),
        TOP_K=top_k,
        GATHER=factors is None,
        BIAS=bias is not None,
        KIND=layout.kind,
        FOUR=four,
        GROUP=layout.group,
        ROW_BLOCK=layout.row_block,
        SCALES=layout.scales is not None,
        ZEROS=layout.zeros is not None,
        EVEN=columns % 64 == 0 and layout.inner % step == 0,
        ROWS=rows,
        COLUMNS=64,
        INNER=step,
        STAGES=4 if rows <= 32 else 3,
        num_warps=4,
    )
    return out
