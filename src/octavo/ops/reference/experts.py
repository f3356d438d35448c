"""Experts one after the other."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from octavo.ops.coded import CodedRows, dequantize
from octavo.ops.packed import DenseWeight, ExpertsWeight, Float8Weight, Int4Weight, Int8Weight, SegmentedWeight, TableWeight
from octavo.ops.reference.activation import gated_mul
from octavo.ops.reference.low_bit import pack_coded, unpack
from octavo.ops.registry import Activation


def pack_experts(weight: torch.Tensor) -> ExpertsWeight:
    """See `ops.registry.PackExperts`."""
    return ExpertsWeight.plain(weight)


def pack_coded_experts(rows: CodedRows, num_experts: int, dtype: torch.dtype) -> ExpertsWeight:
    """See `ops.registry.PackCodedExperts`. What the grouped products cannot take (outliers, activation order) is dequantised."""
    weight = pack_coded(rows, dtype)
    count, inner = rows.shape[0] // num_experts, rows.shape[1]
    simple = (
        isinstance(weight, Float8Weight)
        or (isinstance(weight, (Int4Weight, Int8Weight)) and weight.columns is None)
        or (isinstance(weight, TableWeight) and weight.outliers is None)
    )
    if simple and not isinstance(weight, (DenseWeight, SegmentedWeight)):
        return ExpertsWeight(torch.empty(0, dtype=dtype), num_experts, count, inner, weight.nbytes, low_bit=weight)
    dense = weight.data if isinstance(weight, DenseWeight) else dequantize(rows, dtype)
    return pack_experts(dense.view(num_experts, count, inner))


def _dense(weight: ExpertsWeight, dtype: torch.dtype) -> torch.Tensor:
    """[experts, out_features, in_features]"""
    if weight.low_bit is None:
        return weight.data
    return unpack(weight.low_bit, dtype).view(weight.num_experts, weight.out_features, weight.in_features)


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
    gate_up_data, down_data = _dense(gate_up, x.dtype), _dense(down, x.dtype)
    for expert in range(gate_up.num_experts):
        tokens, places = torch.where(chosen == expert)
        if len(tokens) == 0:
            continue
        inner = gated_mul(F.linear(x[tokens], gate_up_data[expert], None if gate_up_bias is None else gate_up_bias[expert]), activation)
        y = F.linear(inner, down_data[expert], None if down_bias is None else down_bias[expert])
        out.index_add_(0, tokens, y.to(out.dtype) * weights[tokens, places].to(out.dtype)[:, None])
    return out.to(x.dtype)
