"""The simplest `Attend`: one sequence, its keys and values in plain growing tensors. And a loader for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.attention.base import LayerSpec
from octavo.config.types import CpuActivations
from octavo.models.decoder import Model
from octavo.models.loader import load_model
from octavo.ops.cpu import abi
from octavo.ops.registry import load_ops
from tests.support.tiny_models import config_for


class ContiguousAttend:
    """Attention in float64 of a single sequence, written from the definition."""

    def __init__(self, layers: tuple[LayerSpec, ...]) -> None:
        self.layers = layers
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        spec = self.layers[layer]
        if layer in self.cache:
            k, v = (torch.cat((old, new)) for old, new in zip(self.cache[layer], (k, v), strict=True))
        self.cache[layer] = (k.clone(), v.clone())
        group = spec.num_heads // spec.num_kv_heads
        keys, values = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * spec.scale
        if spec.soft_cap is not None:
            scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
        distance = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None] - torch.arange(k.shape[0])
        hidden = distance < 0
        if spec.sliding_window is not None:
            hidden |= distance >= spec.sliding_window
        scores = scores.masked_fill(hidden, -torch.inf)
        if spec.sinks is not None:
            scores = torch.cat((scores, scores.new_tensor(spec.sinks)[:, None, None].expand(-1, q.shape[0], 1)), -1)
        weights = scores.softmax(-1)[..., : k.shape[0]]
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def load(path: Path | str, *, ops: str = "cpu", activations: CpuActivations = "float32", **config: Any) -> Model:
    """A model on the CPU."""
    if ops == "native" and abi.library() is None:
        pytest.skip("the compiled kernels were not built")
    resolved = config_for(path, **config)
    resolved = replace(resolved, device=replace(resolved.device, activations=activations))
    return load_model(resolved, load_ops(ops), torch.device("cpu"), lambda *_: None)


def run(model: Model, ids: Sequence[int], chunks: Sequence[int] | None = None) -> torch.Tensor:
    """Logits of every position, computed in steps of the given sizes (default: one step).

    Returns:
        [tokens, vocab] float32
    """
    attend = ContiguousAttend(model.layer_specs)
    rows, start = [], 0
    for size in chunks or [len(ids)]:
        positions = torch.arange(start, start + size)
        rows.append(model.logits(model.forward(torch.tensor(ids[start : start + size]), positions, attend)))
        start += size
    assert start == len(ids)
    return torch.cat(rows)


def greedy(model: Model, ids: Sequence[int], count: int) -> list[int]:
    """`count` most likely tokens after a prompt, one decode step each."""
    attend = ContiguousAttend(model.layer_specs)
    out: list[int] = []
    step, start = list(ids), 0
    for _ in range(count):
        hidden = model.forward(torch.tensor(step), torch.arange(start, start + len(step)), attend)
        out.append(int(model.logits(hidden[-1:]).argmax()))
        step, start = out[-1:], start + len(step)
    return out
