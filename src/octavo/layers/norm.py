"""Norms of the residual stream, alone and behind a residual add."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional as F

from octavo.ops.registry import Ops


class Norm(Protocol):
    """A norm over the last dimension, with its weights."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), each [tokens, hidden]. May overwrite both."""


class RmsNorm:
    """See `ops.registry.RmsNorm`."""

    def __init__(self, weight: torch.Tensor, eps: float, ops: Ops) -> None:
        self.weight = weight
        self.eps = eps
        self._rms_norm = ops.rms_norm
        self._add_rms_norm = ops.add_rms_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm:
    """Mean subtracted, divided by the standard deviation (Ba et al. 2016); torch computes 16-bit input in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + x
        return self(residual), residual
