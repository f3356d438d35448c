"""A linear layer: a packed weight, perhaps a bias, and the operation that multiplies them."""

from __future__ import annotations

import torch

from octavo.ops.packed import LinearWeight
from octavo.ops.registry import Ops


class Linear:
    """y = x @ weight.T + bias."""

    def __init__(self, weight: LinearWeight, bias: torch.Tensor | None, ops: Ops) -> None:
        """
        Args:
            weight: [out_features, in_features], packed.
            bias: [out_features]
        """
        self.weight = weight
        self.bias = bias
        self._linear = ops.linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, in_features] -> [tokens, out_features]"""
        return self._linear(x, self.weight, self.bias)
