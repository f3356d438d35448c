"""The gated feed-forward block."""

from __future__ import annotations

import torch

from octavo.layers.linear import Linear
from octavo.ops.registry import Activation, Ops


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
