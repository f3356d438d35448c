"""The grouped product of experts against the reference, with tiles that are full, partly full and empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.ops.packed import ExpertsWeight
from octavo.ops.reference import OPS
from octavo.ops.triton.experts import experts, plan_tiles


@pytest.mark.parametrize(("tokens", "num_experts", "top_k", "rows"), [(1, 8, 2, 16), (40, 4, 2, 16), (33, 5, 1, 32), (3, 64, 6, 16)])
def test_tiles_hold_every_pair_once(device: torch.device, tokens: int, num_experts: int, top_k: int, rows: int) -> None:
    chosen = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(tokens)]).to(device)
    tiles = plan_tiles(chosen, num_experts, rows)
    order, seen = tiles.order.tolist(), []
    for expert, begin, end in zip(tiles.expert.tolist(), tiles.begin.tolist(), tiles.end.tolist(), strict=True):
        assert end - begin <= rows
        pairs = order[begin:end] if begin < end else []
        assert all(chosen.flatten()[pair] == expert for pair in pairs)
        seen += pairs
    assert sorted(seen) == list(range(tokens * top_k))


@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 8, 2), (5, 4, 3), (70, 4, 2), (0, 4, 2)])
@pytest.mark.parametrize(("hidden", "inner"), [(128, 64), (80, 48)])
@pytest.mark.parametrize(("activation", "bias"), [("silu", False), ("swiglu_clamped", True)])
def test_equals_the_reference(
    device: torch.device, tokens: int, num_experts: int, top_k: int, hidden: int, inner: int, activation: Any, bias: bool
) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    x = random(tokens, hidden)
    chosen = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(max(tokens, 1))])[:tokens].to(device)
    weights = torch.rand(tokens, top_k, device=device)
    gate_up = ExpertsWeight.plain(random(num_experts, 2 * inner, hidden) * hidden**-0.5)
    down = ExpertsWeight.plain(random(num_experts, hidden, inner) * inner**-0.5)
    biases = (random(num_experts, 2 * inner), random(num_experts, hidden)) if bias else (None, None)
    out = experts(x, chosen, weights, gate_up, down, *biases, activation)
    torch.testing.assert_close(out, OPS.experts(x, chosen, weights, gate_up, down, *biases, activation), atol=1e-4, rtol=1e-4)
