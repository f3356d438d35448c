"""Experts on a CPU: the tokens of each expert lie side by side, and each of its matrices is laid out for oneDNN once, at load."""

from __future__ import annotations

import torch

from octavo.ops.coded import CodedRows, dequantize
from octavo.ops.cpu.linear import linear, pack_linear
from octavo.ops.packed import ExpertsWeight
from octavo.ops.reference.activation import gated_mul
from octavo.ops.registry import Activation


def pack_experts(weight: torch.Tensor) -> ExpertsWeight:
    """See `ops.registry.PackExperts`."""
    parts = tuple(pack_linear(one) for one in weight)
    count, rows, columns = weight.shape
    return ExpertsWeight(weight[:0], count, rows, columns, weight.nbytes, parts)


def pack_coded_experts(rows: CodedRows, num_experts: int, dtype: torch.dtype) -> ExpertsWeight:
    """See `ops.registry.PackCodedExperts`: dequantised, as `linear.pack_coded` does."""
    return pack_experts(dequantize(rows, dtype).view(num_experts, -1, rows.shape[1]))


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
    top_k = chosen.shape[1]
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    rows = x.index_select(0, order // top_k)
    counts = torch.bincount(flat, minlength=gate_up.num_experts).tolist()
    out = torch.empty(len(flat), down.out_features, dtype=x.dtype)
    begin = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        part = rows[begin : begin + count]
        inner = gated_mul(linear(part, gate_up.parts[expert], None if gate_up_bias is None else gate_up_bias[expert]), activation)
        out[begin : begin + count] = linear(inner, down.parts[expert], None if down_bias is None else down_bias[expert])
        begin += count
    sorted_weights = weights.flatten().index_select(0, order).to(x.dtype)
    result = torch.zeros(x.shape[0], down.out_features, dtype=x.dtype)
    return result.index_add_(0, order // top_k, out.mul_(sorted_weights[:, None]))
