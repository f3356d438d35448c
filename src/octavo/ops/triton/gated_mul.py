"""Gated activations: activation(gate) * up, one pass over memory."""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.ops.registry import Activation
from octavo.ops.triton.turns import overlap, take_turn

_BLOCK = 1024


@triton.jit
def _gated_mul_kernel(
    in_ptr,
    out_ptr,
    in_stride,
    out_stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < DIM
    gate = tl.load(in_ptr + row * in_stride + d, mask=mask, other=0.0)
    up = tl.load(in_ptr + row * in_stride + DIM + d, mask=mask, other=0.0)
    dtype = gate.dtype
    x = gate.to(tl.float32)
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 0.5 * (1 + tanh(z)) = sigmoid(2z), z = sqrt(2 / pi) * (x + 0.044715 x^3)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    # The activation is rounded before the product, as the models were trained.
    tl.store(out_ptr + row * out_stride + d, (y.to(dtype).to(tl.float32) * up.to(tl.float32)).to(dtype), mask=mask)


def gated_mul(gate_up: torch.Tensor, activation: Activation, *, whole_sms: bool = False) -> torch.Tensor:
    """See `ops.registry.GatedMul`. `whole_sms`: see `turns.overlap`."""
    tokens, dim = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, dim, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        turn = overlap(len(gate_up), gate_up.device, whole_sms=whole_sms)
        _gated_mul_kernel[(tokens, triton.cdiv(dim, _BLOCK))](
            gate_up,
            out,
            gate_up.stride(0),
            out.stride(0),
            DIM=dim,
            BLOCK=_BLOCK,
            ACTIVATION=activation,
            OVERLAP=turn,
            **({"launch_pdl": True} if turn else {}),
            num_warps=4,
        )
    return out
