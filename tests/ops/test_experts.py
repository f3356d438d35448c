"""Experts: every implementation against the definition, token by token in float64; and the choice of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from octavo.layers.moe import route
from octavo.layers.routing import Routing
from octavo.ops.reference.activation import gated_mul
from octavo.ops.registry import load_ops


def problem(tokens: int, experts: int, top_k: int, *, hidden: int = 24, inner: int = 16, bias: bool = False) -> dict[str, Any]:
    g = torch.Generator().manual_seed(tokens * 31 + experts)
    return {
        "x": torch.randn(tokens, hidden, generator=g),
        "chosen": torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(tokens)])
        if tokens
        else torch.zeros(0, top_k).long(),
        "weights": torch.rand(tokens, top_k, generator=g),
        "gate_up": torch.randn(experts, 2 * inner, hidden, generator=g) * hidden**-0.5,
        "down": torch.randn(experts, hidden, inner, generator=g) * inner**-0.5,
        "gate_up_bias": torch.randn(experts, 2 * inner, generator=g) if bias else None,
        "down_bias": torch.randn(experts, hidden, generator=g) if bias else None,
    }


def definition(p: dict[str, Any], activation: Any) -> torch.Tensor:
    def double(t: torch.Tensor | None, expert: int) -> torch.Tensor | None:
        return None if t is None else t[expert].double()

    out = torch.zeros(p["x"].shape, dtype=torch.float64)
    for token, x in enumerate(p["x"].double()):
        for expert, weight in zip(p["chosen"][token].tolist(), p["weights"][token].tolist(), strict=True):
            inner = gated_mul(F.linear(x, p["gate_up"][expert].double(), double(p["gate_up_bias"], expert)), activation)
            out[token] += weight * F.linear(inner, p["down"][expert].double(), double(p["down_bias"], expert))
    return out.float()


@pytest.mark.parametrize("ops", ["reference", "cpu"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 4, 2), (7, 8, 3), (40, 4, 1), (5, 64, 6), (0, 4, 2)])
@pytest.mark.parametrize(("activation", "bias"), [("silu", False), ("gelu_tanh", True), ("swiglu_clamped", True)])
def test_equals_the_definition(ops: str, tokens: int, experts: int, top_k: int, activation: Any, bias: bool) -> None:
    p, table = problem(tokens, experts, top_k, bias=bias), load_ops(ops)
    gate_up, down = table.pack_experts(p["gate_up"]), table.pack_experts(p["down"])
    out = table.experts(p["x"], p["chosen"], p["weights"], gate_up, down, p["gate_up_bias"], p["down_bias"], activation)
    torch.testing.assert_close(out, definition(p, activation), atol=2e-5, rtol=1e-4)


def test_softmax_routing_takes_the_likeliest_experts() -> None:
    logits = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    experts, weights = route(logits, None, Routing(3))
    for row, chosen, weight in zip(logits, experts.tolist(), weights, strict=True):
        assert chosen == row.argsort(descending=True)[:3].tolist()
        torch.testing.assert_close(weight, row.softmax(-1)[chosen])
    _, normalized = route(logits, None, Routing(3, normalize=True, scale=2.0))
    torch.testing.assert_close(normalized, weights / weights.sum(-1, keepdim=True) * 2)


def test_groups_limit_the_choice() -> None:
    logits = torch.tensor([[5.0, -9.0, 4.0, 3.0, 0.0, 0.0]])  # groups of two: best single 5, best pair 4 + 3
    best, _ = route(logits, None, Routing(2, groups=3, top_groups=1))
    pair, _ = route(logits, None, Routing(2, scoring="sigmoid", groups=3, top_groups=1, group_score="best_two"))
    assert sorted(best[0].tolist()) == [0, 1]
    assert sorted(pair[0].tolist()) == [2, 3]


def test_the_correction_changes_the_choice_but_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    experts, weights = route(logits, torch.tensor([0.0, 0.0, 5.0]), Routing(1, scoring="sigmoid"))
    assert experts.tolist() == [[2]]
    assert weights.item() == pytest.approx(0.5)
