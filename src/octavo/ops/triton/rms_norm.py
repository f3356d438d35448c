"""RMSNorm, alone and behind a residual add: one thread block a row, one pass over memory."""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.ops.triton.turns import overlap, take_turn


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PAD)
    mask = d < DIM
    # The weight does not wait for the row.
    weight = tl.load(weight_ptr + d, mask=mask, other=0.0).to(tl.float32)
    take_turn(OVERLAP)
    x = tl.load(x_ptr + row * x_stride + d, mask=mask, other=0.0)
    dtype = x.dtype
    wide = x.to(tl.float32)
    if ADD:
        wide += tl.load(residual_ptr + row * residual_stride + d, mask=mask, other=0.0).to(tl.float32)
        total = wide.to(dtype)
        tl.store(residual_ptr + row * residual_stride + d, total, mask=mask)
        wide = total.to(tl.float32)
    normed = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / DIM + eps))
    # Rounded before the weight is applied, as the models were trained.
    tl.store(out_ptr + row * out_stride + d, (normed.to(dtype).to(tl.float32) * weight).to(dtype), mask=mask)


def _warps(pad: int) -> int:
    return max(1, min(16, pad // 512))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.registry.RmsNorm`."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        _launch(rows, rows, weight, out.view(rows.shape), eps, add=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, whole_sms: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.registry.AddRmsNorm`. The norm overwrites x, the sum overwrites residual. `whole_sms`: see `turns.overlap`."""
    if x.shape[0]:
        _launch(x, residual, weight, x, eps, add=True, whole_sms=whole_sms)
    return x, residual


def _launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, *, add: bool, whole_sms: bool = False
) -> None:
    rows, dim = x.shape
    pad = triton.next_power_of_2(dim)
    turn = overlap(len(x), x.device, whole_sms=whole_sms)
    _rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        eps,
        DIM=dim,
        PAD=pad,
        ADD=add,
        OVERLAP=turn,
        **({"launch_pdl": True} if turn else {}),
        num_warps=_warps(pad),
    )
