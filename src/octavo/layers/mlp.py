"""The dense feed-forward blocks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional as F

from octavo.layers.linear import Linear
from octavo.ops.registry import Activation, Ops


class Mlp(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""


class GatedMlp:
    """down(activation(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation, ops: Ops) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation: Activation = activation
        self._gated_mul = ops.gated_mul

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        return self.down(self._gated_mul(self.gate_up(x), self.activation))


class PlainMlp:
    """down(activation(up(x)))."""

    def __init__(self, up: Linear, down: Linear, activation: Activation) -> None:
        self.up = up
        self.down = down
        self.activation: Activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        return self.down(activate(self.up(x), self.activation))


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """An activation, elementwise."""
    match activation:
        case "silu":
            return F.silu(x)
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case _:
            return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
