"""Activations rounded to 8 bits in one pass, and the way back from integer products."""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from octavo.ops.coded import Activations
from octavo.ops.triton.turns import overlap, take_turn

_BLOCK: Final = 1024
_AT_ONCE: Final = 16384
"""Elements of a row that a thread block can hold."""


@triton.jit
def _rounded(x, LARGEST: tl.constexpr, INTEGER: tl.constexpr):
    """Of what has been divided by its scale."""
    if INTEGER:
        # To the nearest, halves to even: adding and taking off 1.5 * 2**23 leaves no fraction bits.
        x = (x + 12582912.0) - 12582912.0
        return tl.minimum(tl.maximum(x, -128.0), 127.0)
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit
def _round_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    given_ptr,
    inner,
    x_stride,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    GIVEN: tl.constexpr,
    PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row, in registers. GIVEN: with the calibrated scale; else with the row's own, which is written."""
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, PAD)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < inner, other=0.0).to(tl.float32)
    if GIVEN:
        scale = tl.load(given_ptr)
    else:
        scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-10) / LARGEST
        tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * inner + k, _rounded(x / scale, LARGEST, INTEGER).to(out_ptr.dtype.element_ty), mask=k < inner)


@triton.jit
def _round_long_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    given_ptr,
    inner,
    x_stride,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    GIVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As `_round_kernel`, of a row that is too long for that: it is read twice."""
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    if GIVEN:
        scale = tl.load(given_ptr)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, inner, BLOCK):
            k = start + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.abs(tl.load(x_ptr + row * x_stride + k, mask=k < inner, other=0.0).to(tl.float32)))
        scale = tl.maximum(tl.max(largest, 0), 1e-10) / LARGEST
        tl.store(scale_ptr + row, scale)
    for start in range(0, inner, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + k, mask=k < inner, other=0.0).to(tl.float32) / scale
        tl.store(out_ptr + row * inner + k, _rounded(x, LARGEST, INTEGER).to(out_ptr.dtype.element_ty), mask=k < inner)


def round_rows(x: torch.Tensor, activations: Activations) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.reference.low_bit.round_activations`, without groups.

    Returns:
        (codes of x's shape, scales float32: [rows, 1], or [1, 1] where it is calibrated)
    """
    rows, inner = x.shape
    integer = activations.kind == "int8"
    out = torch.empty(rows, inner, dtype=torch.int8 if integer else torch.float8_e4m3fn, device=x.device)
    given = activations.scale
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device) if given is None else given.reshape(1, 1)
    turn = overlap(len(x), x.device)
    operands = (x, out, scale, scale, inner, x.stride(0))
    kind = {"LARGEST": 127.5 if integer else 448.0, "INTEGER": integer, "GIVEN": given is not None, "OVERLAP": turn}
    launch = {"launch_pdl": True} if turn else {}
    if inner > _AT_ONCE:
        _round_long_kernel[(rows,)](*operands, BLOCK=_BLOCK, **kind, **launch, num_warps=4)
    else:
        pad = triton.next_power_of_2(inner)
        _round_kernel[(rows,)](*operands, PAD=pad, **kind, **launch, num_warps=max(1, min(16, pad // 512)))
    return out, scale


@triton.jit
def _scale_kernel(
    sums_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    columns,
    x_scale_stride,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = n < columns
    value = tl.load(sums_ptr + row * columns + n, mask=kept, other=0).to(tl.float32)
    value *= tl.load(x_scale_ptr + row * x_scale_stride) * tl.load(w_scale_ptr + n, mask=kept, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias_ptr + n, mask=kept, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + n, value.to(out_ptr.dtype.element_ty), mask=kept)


def scaled_sums(
    sums: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """sums * x_scale * w_scale + bias.

    Args:
        sums: [rows, columns] int32
        x_scale: [rows, 1] or [1, 1] float32. w_scale: [1, columns].
    """
    rows, columns = sums.shape
    out = torch.empty(rows, columns, dtype=dtype, device=sums.device)
    turn = overlap(len(sums), sums.device)
    _scale_kernel[(rows, triton.cdiv(columns, _BLOCK))](
        sums,
        x_scale,
        w_scale,
        x_scale if bias is None else bias,
        out,
        columns,
        0 if len(x_scale) == 1 else 1,
        BIAS=bias is not None,
        BLOCK=_BLOCK,
        OVERLAP=turn,
        **({"launch_pdl": True} if turn else {}),
        num_warps=4,
    )
    return out
