"""Attention of whole prompts against the definition, written out in float64."""

from __future__ import annotations

import pytest
import torch

from octavo.attention.base import LayerSpec
from octavo.attention.prompt import PromptAttention


def expected(spec: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    group = spec.num_heads // spec.num_kv_heads
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * spec.scale
    if spec.soft_cap is not None:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    place = torch.arange(len(q))
    distance = place[:, None] - place[None, :]
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if spec.sliding_window is not None:
        hidden = hidden | (distance.abs() >= spec.sliding_window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if spec.sinks is not None:
        scores = torch.cat((scores, scores.new_tensor(spec.sinks)[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(q)], v).float()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, (0.5, -1.0, 2.0, 0.0)])
@pytest.mark.parametrize("lengths", [[5], [7, 7], [9, 1, 4]])
def test_equals_the_definition(
    causal: bool, window: int | None, soft_cap: float | None, sinks: tuple[float, ...] | None, lengths: list[int]
) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    spec = LayerSpec(4, 2, 8, 0.3, window, soft_cap, sinks=sinks)
    total = sum(lengths)
    q = torch.randn(total, 4, 8, generator=generator) * 3
    k, v = (torch.randn(total, 2, 8, generator=generator) for _ in range(2))
    out = PromptAttention([spec], lengths, torch.device("cpu"), causal=causal)(0, q, k, v)
    parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
    want = torch.cat([expected(spec, *part, causal=causal) for part in parts])
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
