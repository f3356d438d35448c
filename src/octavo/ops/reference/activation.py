"""Gated activations."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from octavo.ops.registry import Activation


def gated_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """See `ops.registry.GatedMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "swiglu_clamped":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
