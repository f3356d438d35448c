"""The mixture-of-experts block: a router that picks a few experts for each token, and the experts' outputs added up."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from octavo.layers.linear import Linear
from octavo.layers.mlp import Mlp
from octavo.layers.routing import Routing
from octavo.ops.packed import ExpertsWeight
from octavo.ops.registry import Activation, Ops


def route(logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, and their weights.

    Args:
        logits: [tokens, experts]
        correction: [experts], added to the scores for the choice alone (DeepSeek-V3, 2024).

    Returns:
        (experts [tokens, top_k] int64, weights [tokens, top_k] float32)
    """
    logits = logits.float()
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if routing.groups > 1:
        grouped = choice.view(len(choice), routing.groups, -1)
        best = grouped.max(-1).values if routing.group_score == "best" else grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(routing.top_groups, dim=-1).indices, 1.0)
        choice = grouped.masked_fill(kept.unsqueeze(-1) == 0, -torch.inf).flatten(1)
    experts = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * routing.scale


class ExactRouter:
    """A router that computes in float32: scores that differ by less than 16 bits can tell choose the same experts as in training."""

    def __init__(self, weight: torch.Tensor) -> None:
        """
        Args:
            weight: [experts, hidden] float32
        """
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, experts] float32"""
        return F.linear(x.to(self.weight.dtype), self.weight)


class Moe:
    """Router, experts, and perhaps a shared expert that every token passes. Implements `layers.mlp.Mlp`."""

    def __init__(
        self,
        router: Linear | ExactRouter,
        correction: torch.Tensor | None,
        routing: Routing,
        gate_up: ExpertsWeight,
        down: ExpertsWeight,
        *,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        activation: Activation,
        shared: Mlp | None,
        shared_gate: Linear | None,
        first_expert: int | None = None,
        ops: Ops,
    ) -> None:
        """
        Args:
            gate_up, down: [experts, 2 * inner, hidden] and [experts, hidden, inner], with biases [experts, rows].
            shared_gate: hidden -> 1: how much of the shared expert each token takes.
            first_expert: which of the router's experts is ours first, where this rank has only some; then the result is a part of a sum.
        """
        self.router = router
        self.correction = correction
        self.routing = routing
        self.gate_up = gate_up
        self.down = down
        self.gate_up_bias = gate_up_bias
        self.down_bias = down_bias
        self.activation: Activation = activation
        self.shared = shared
        self.shared_gate = shared_gate
        self.first_expert = first_expert
        self._experts = ops.experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        experts, weights = route(self.router(x), self.correction, self.routing)
        if self.first_expert is not None:
            experts, weights = self._ours(experts, weights)
        out = self._experts(x, experts, weights, self.gate_up, self.down, self.gate_up_bias, self.down_bias, self.activation)
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())

    def _ours(self, experts: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The choice among our experts; another rank's count nothing, and stand for some of ours, evenly."""
        count = self.gate_up.num_experts
        assert self.first_expert is not None
        local = experts - self.first_expert
        return local.remainder(count), weights.masked_fill((local < 0) | (local >= count), 0.0)
