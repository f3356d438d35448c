"""Triton kernels for NVIDIA GPUs. Each has a plain torch counterpart in `ops/reference` or in its tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from octavo.ops.registry import Activation


def overrides() -> dict[str, Any]:
    """The operations of `ops.registry.Ops` that these kernels replace."""
    from octavo.ops.triton.embedding import embedding_part
    from octavo.ops.triton.experts import experts
    from octavo.ops.triton.gated_mul import gated_mul
    from octavo.ops.triton.launch import prefer_shared_memory
    from octavo.ops.triton.linear import TritonLinear
    from octavo.ops.triton.rms_norm import add_rms_norm, rms_norm
    from octavo.ops.triton.sampling import draw_tokens

    prefer_shared_memory()
    linear = TritonLinear()

    def add_norm_between(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps, whole_sms=linear.fills_whole_sms)

    def gated_mul_between(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        return gated_mul(gate_up, activation, whole_sms=linear.fills_whole_sms)

    return {
        "rms_norm": rms_norm,
        "add_rms_norm": add_norm_between,
        "gated_mul": gated_mul_between,
        "pack_linear": linear.pack,
        "pack_coded": linear.pack_coded,
        "linear": linear.linear,
        "embedding_part": embedding_part,
        "experts": experts,
        "draw": draw_tokens,
    }


def invariant_overrides() -> dict[str, Any]:
    """As `overrides`, but only operations that give a row the same bits whatever the other rows are.

    What is not named here keeps its plain implementation: a new fused operation is not batch-invariant until it is shown to be.
    """
    from octavo.ops.triton.embedding import embedding_part
    from octavo.ops.triton.gated_mul import gated_mul
    from octavo.ops.triton.invariant_matmul import invariant_linear
    from octavo.ops.triton.rms_norm import add_rms_norm, rms_norm
    from octavo.ops.triton.sampling import draw_tokens

    return {
        "rms_norm": rms_norm,
        "add_rms_norm": add_rms_norm,
        "gated_mul": gated_mul,
        "linear": invariant_linear,
        "embedding_part": embedding_part,
        "keeps_low_bit": False,  # it unpacks them anew in every step
        "draw": draw_tokens,
    }
