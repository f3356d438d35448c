"""A worker with the GPU's parts (attention backend, operations, whole-step graphs) against one with plain torch.

On a CPU the kernels run in the interpreter and the graphs' steps uncaptured: slow, so the model is as small as the kernels allow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.attention.torch_paged import TorchPagedAttention
from octavo.attention.triton import TritonAttention
from octavo.models.decoder import Model
from octavo.models.loader import load_model
from octavo.ops.registry import load_ops
from octavo.protocol.step import StepPlan
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplerState
from octavo.worker.graphs import DecodeGraphs, Layout, graph_sizes
from octavo.worker.runner import Runner
from octavo.worker.slots import SlotTables
from tests.support.engine_configs import engine_config
from tests.support.mixed_steps import BLOCK, BLOCKS, LENGTH, SLOTS, VOCAB, play

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


class Spy:
    """Counts the steps that graphs took."""

    def __init__(self, graphs: DecodeGraphs) -> None:
        self.graphs, self.launches = graphs, list[int]()

    def fitting(self, plan: StepPlan) -> int | None:
        return self.graphs.fitting(plan)

    def launch(self, plan: StepPlan, rows: int) -> torch.Tensor:
        self.launches.append(rows)
        return self.graphs.launch(plan, rows)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    """The same random weights, with plain and with Triton operations."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = engine_config(hf_config=QWEN, architecture="Qwen3ForCausalLM", dtype="float16", vocab_size=VOCAB)
    from octavo.ops import triton

    plain = load_ops("reference")
    kernels = triton.overrides()
    return {name: load_model(config, ops, device, lambda *_: None) for name, ops in (("plain", plain), ("kernels", _with(plain, kernels)))}


def _with(ops: Any, overrides: dict[str, Any]) -> Any:
    import dataclasses

    return dataclasses.replace(ops, **overrides)


def runner_of(model: Model, device: torch.device, *, kernels: bool, graphs: bool) -> tuple[Runner, Spy | None]:
    from octavo.ops.triton.sampling import draw_tokens

    tables, state = SlotTables(SLOTS, LENGTH, BLOCK, device), SamplerState(SLOTS, device)
    backend = TritonAttention if kernels else TorchPagedAttention
    attention = backend(model.layer_specs, BLOCKS, BLOCK, torch.float16, device)
    sampler = Sampler(state, tables.tokens, draw=draw_tokens if kernels else None)
    spy = None
    if graphs:
        captured = DecodeGraphs(model, attention, tables, state, draw_tokens, [1, 4])
        captured.capture()
        spy = Spy(captured)
    return Runner(model, attention, tables, state, sampler, spy), spy  # type: ignore[arg-type]


def test_kernels_and_graphs_give_the_tokens_of_plain_torch(models: dict[str, Model], device: torch.device) -> None:
    expected = play(runner_of(models["plain"], device, kernels=False, graphs=False)[0])
    eager = play(runner_of(models["kernels"], device, kernels=True, graphs=False)[0])
    runner, spy = runner_of(models["kernels"], device, kernels=True, graphs=True)
    graphed = play(runner)
    assert eager == expected
    assert graphed == expected
    assert spy is not None
    assert spy.launches == [4, 4, 4, 4, 1], "plain decodes, and nothing else"
    assert len({t for step in expected for t in step.values()}) > 5


def test_layout_columns_are_apart_and_aligned() -> None:
    for rows in (1, 3, 4, 130):
        layout = Layout(rows, 24 * rows)
        bounds = layout.bounds
        assert all(begin % 4 == 0 for begin, _ in bounds)
        assert all(bounds[i][1] == bounds[i + 1][0] for i in range(len(bounds) - 1))
        columns = layout.split(np.zeros(layout.size, np.int32))
        assert len(columns.slots) >= rows
        assert len(columns.keys) >= 2 * rows
        assert len(columns.plan) >= 24 * rows


@pytest.mark.parametrize("most", [1, 3, 64, 100, 256, 300, 1024])
def test_graph_sizes_ascend_to_the_most_rows(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
