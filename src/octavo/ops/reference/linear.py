"""Matrix products with weights, and embedding lookup."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from octavo.ops.packed import DenseWeight, LinearWeight
from octavo.ops.reference.low_bit import low_bit_linear


def pack_linear(weight: torch.Tensor) -> LinearWeight:
    """See `ops.registry.PackLinear`."""
    return DenseWeight.plain(weight)


def linear(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """See `ops.registry.Linear`. Takes the plain layout only."""
    return F.linear(x, weight.data, bias) if isinstance(weight, DenseWeight) else low_bit_linear(x, weight, bias)


def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See `ops.registry.Embedding`."""
    return F.embedding(token_ids, table)


def embedding_part(token_ids: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
    """See `ops.registry.EmbeddingPart`."""
    row = token_ids - first
    here = (row >= 0) & (row < len(table))
    return F.embedding(row.clamp(0, len(table) - 1), table).masked_fill(~here.unsqueeze(1), 0.0)
