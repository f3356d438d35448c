"""Experts on a GPU: two grouped products over tokens sorted by expert, planned on the device without a wait.

The (token, expert) pairs are sorted by expert, and each expert's run is cut into tiles of ROWS pairs. How many tiles there are is
known on the device alone: as many thread blocks as there could be are launched, and those past the end leave at once. So a decode
step with experts can be captured in a graph. A decode step reads each chosen expert's weights once: tiles of 16 pairs, the
smallest a tensor core takes, and no pair is computed twice.
"""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.ops.packed import ExpertsWeight
from octavo.ops.reference.activation import gated_mul as plain_gated_mul
from octavo.ops.reference.low_bit import unpack
from octavo.ops.registry import Activation
from octavo.ops.triton.gated_mul import gated_mul
from octavo.ops.triton.low_bit_experts import low_bit_product


@triton.jit
def _grouped_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    scale_ptr,
    out_ptr,
    order_ptr,
    tile_expert_ptr,
    tile_begin_ptr,
    tile_end_ptr,
    columns,
    inner,
    x_stride,
    out_stride,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One tile of one expert. GATHER: x is by token and out by sorted pair; else x is by sorted pair, and out by pair, scaled."""
    tile = tl.program_id(1)
    begin = tl.load(tile_begin_ptr + tile)
    end = tl.load(tile_end_ptr + tile)
    if begin >= end:
        return
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
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
    x_rows = x_ptr + x_row.to(tl.int64)[:, None] * x_stride
    w_rows = w_ptr + (expert * columns + n)[:, None] * inner
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k0 in range(0, inner, INNER):
        k = k0 + tl.arange(0, INNER)[None, :]
        if EVEN:
            x = tl.load(x_rows + k, mask=real[:, None], other=0.0)
            w = tl.load(w_rows + k)
        else:
            x = tl.load(x_rows + k, mask=real[:, None] & (k < inner), other=0.0)
            w = tl.load(w_rows + k, mask=in_columns[:, None] & (k < inner), other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + expert * columns + n, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    if not GATHER:
        acc *= tl.load(scale_ptr + pair, mask=real, other=0.0)[:, None]
    out = out_ptr + out_row.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & in_columns[None, :])


@dataclass(frozen=True)
class ExpertTiles:
    """Which pairs each tile computes. All on the device; tiles past the last are empty."""

    order: torch.Tensor
    """[pairs] int32: pairs (token * top_k + choice) sorted by expert."""
    expert: torch.Tensor
    """[tiles] int32"""
    begin: torch.Tensor
    """[tiles] int32: first place in `order`."""
    end: torch.Tensor
    """[tiles] int32: behind the last; not above `begin` for an empty tile."""
    rows: int
    """Most pairs of a tile."""


def plan_tiles(chosen: torch.Tensor, num_experts: int, rows: int) -> ExpertTiles:
    """Sort the pairs of `chosen` [tokens, top_k] by expert and cut them into tiles of `rows`. Never waits for the device."""
    flat = chosen.flatten()
    pairs = flat.numel()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    ends = counts.cumsum(0)
    tile_ends = ((counts + rows - 1) // rows).cumsum(0)
    tiles = torch.arange(min(pairs, num_experts) + pairs // rows, device=flat.device)
    expert = torch.searchsorted(tile_ends, tiles, right=True)
    known = expert.clamp(max=num_experts - 1)
    tile_begins = tile_ends - (counts + rows - 1) // rows
    begin = ends[known] - counts[known] + (tiles - tile_begins[known]) * rows
    end = torch.where(expert < num_experts, torch.minimum(begin + rows, ends[known]), begin)
    return ExpertTiles(order.int(), known.int(), begin.int(), end.int(), rows)


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertsWeight,
    down: ExpertsWeight,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: Activation,
) -> torch.Tensor:
    """See `ops.registry.Experts`."""
    tokens, top_k = chosen.shape
    if tokens == 0:
        return x.new_empty(0, down.out_features)
    tiles = plan_tiles(chosen, gate_up.num_experts, _tile_rows(tokens * top_k, gate_up.num_experts))
    inner = _product(x, gate_up, gate_up_bias, None, tiles, top_k)
    gated = plain_gated_mul(inner, activation) if activation == "swiglu_clamped" else gated_mul(inner, activation)
    out = _product(gated, down, down_bias, weights.flatten().contiguous(), tiles, top_k)
    return out.view(tokens, top_k, -1).sum(1, dtype=torch.float32).to(x.dtype)


def _product(
    x: torch.Tensor, weight: ExpertsWeight, bias: torch.Tensor | None, scale: torch.Tensor | None, tiles: ExpertTiles, top_k: int
) -> torch.Tensor:
    """[pairs, out_features]: by sorted pair from tokens without `scale`; by pair, scaled by `scale` [pairs], from sorted pairs with it."""
    if weight.low_bit is not None:
        if x.dtype in (torch.bfloat16, torch.float16):
            return low_bit_product(x, weight, bias, scale, tiles, top_k)
        weight = ExpertsWeight.plain(unpack(weight.low_bit, x.dtype).view(weight.num_experts, weight.out_features, weight.in_features))
    rows, columns, inner = tiles.rows, weight.out_features, weight.in_features
    tile_columns, tile_inner = (64, 128) if rows <= 32 else (128, 64)
    out = torch.empty(len(tiles.order), columns, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(columns, tile_columns), len(tiles.expert))
    _grouped_kernel[grid](
        x,
        weight.data,
        bias if bias is not None else x,
        scale if scale is not None else x,
        out,
        tiles.order,
        tiles.expert,
        tiles.begin,
        tiles.end,
        columns,
        inner,
        x.stride(0),
        out.stride(0),
        TOP_K=top_k,
        GATHER=scale is None,
        BIAS=bias is not None,
        ROWS=rows,
        COLUMNS=tile_columns,
        INNER=tile_inner,
        EVEN=columns % tile_columns == 0 and inner % tile_inner == 0,
        num_warps=4 if rows <= 64 else 8,
        num_stages=4 if rows <= 32 else 3,
    )
    return out


def _tile_rows(pairs: int, num_experts: int) -> int:
    """Tiles about as large as the run of an average expert."""
    average = -(-pairs // num_experts)
    return next((rows for rows in (16, 32, 64) if average <= rows), 128)
