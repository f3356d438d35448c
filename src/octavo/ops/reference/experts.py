"""Experts one after the other."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from octavo.ops.packed import ExpertsWeight
from octavo.ops.reference.activation import gated_mul
from octavo.ops.registry import Activation


def pack_experts(weight: torch.Tensor) -> ExpertsWeight:
    """See `ops.registry.PackExperts`."""
    return ExpertsWeight.plain(weight)


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
    out = torch.zeros(x.shape[0], down.out_features, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)
    for expert in range(gate_up.num_experts):
        tokens, places = torch.where(chosen == expert)
        if len(tokens) == 0:
            continue
        inner = gated_mul(F.linear(x[tokens], gate_up.data[expert], None if gate_up_bias is None else gate_up_bias[expert]), activation)
        y = F.linear(inner, down.data[expert], None if down_bias is None else down_bias[expert])
        out.index_add_(0, tokens, y.to(out.dtype) * weights[tokens, places].to(out.dtype)[:, None])
    return out.to(x.dtype)
