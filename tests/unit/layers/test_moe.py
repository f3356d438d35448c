"""Routers of mixtures of experts."""

from __future__ import annotations

import torch

from octavo.layers.moe import ExactRouter, route
from octavo.layers.routing import Routing
from tests.models.contiguous import load, run
from tests.models.test_parity import LATENT
from tests.support.tiny_models import save_tiny


def test_an_exact_router_tells_what_16_bits_cannot() -> None:
    """Two experts whose scores differ by a thousandth: in bfloat16 they are equal, and the first one would be chosen."""
    weight = torch.tensor([[1.0] * 64, [1.0001] * 64])
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    logits = ExactRouter(weight)(x)
    assert logits.dtype == torch.float32
    assert route(logits, None, Routing(1))[0].tolist() == [[1]]
    rounded = torch.nn.functional.linear(x, weight.bfloat16())
    assert rounded[0, 0] == rounded[0, 1]


def test_deepseeks_router_stays_in_float32(tmp_path) -> None:  # type: ignore[no-untyped-def]
    save_tiny(tmp_path, "deepseek_v3", **LATENT)
    model = load(tmp_path, dtype="bfloat16")
    router = model._layers[1].mlp.router  # type: ignore[attr-defined]
    assert isinstance(router, ExactRouter)
    assert router.weight.dtype == torch.float32
    assert run(model, [5, 6, 7]).isfinite().all()
