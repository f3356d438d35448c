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
from octavo.protocol.params import SamplingParams
from octavo.protocol.step import StepPlan, StepResult
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplerState
from octavo.worker.graphs import DecodeGraphs, Layout, graph_sizes
from octavo.worker.runner import Runner, settle
from octavo.worker.slots import SlotTables
from tests.support.engine_configs import engine_config
from tests.support.step_plans import Plans, Row, slot_init

BLOCK, VOCAB, SLOTS, LENGTH, BLOCKS = 4, 150, 6, 64, 40
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


def play(runner: Runner) -> list[dict[int, int]]:
    """Three requests (greedy, random, filtered): prompts, decodes that need new blocks, one leaves, and logprobs for a while."""
    plans, results = Plans(), list[StepResult]()

    def step(rows: list[Row], **more: Any) -> None:
        results.append(settle(runner.launch(plans(rows, **more)), "float16"))

    sampling = [
        SamplingParams(temperature=0.0, max_tokens=None),
        SamplingParams(temperature=0.9, seed=5, max_tokens=None),
        SamplingParams(temperature=1.1, top_k=40, top_p=0.9, seed=6, max_tokens=None),
        SamplingParams(temperature=0.7, seed=7, logprobs=2, max_tokens=None),
    ]
    prompts = [np.random.default_rng(i).integers(0, VOCAB, n).tolist() for i, n in enumerate((5, 9, 3, 4))]
    tables = [[1 + 8 * i + j for j in range(8)] for i in range(4)] + [[33, 34, 35]]
    init = [slot_init(i, prompts[i], tables[i][: -(-len(prompts[i]) // BLOCK)], sampling=sampling[i]) for i in range(3)]
    step([Row(i, 0, len(prompts[i]), True) for i in range(3)], init=init)
    lengths = [len(p) for p in prompts]

    def new_block(slot: int) -> list[tuple[int, int, int]]:
        return [(slot, lengths[slot] // BLOCK, tables[slot][lengths[slot] // BLOCK])] if lengths[slot] % BLOCK == 0 else []

    def decode(slots: list[int], **more: Any) -> None:
        step([Row(s, lengths[s], 1, True) for s in slots], table=[diff for s in slots for diff in new_block(s)], **more)
        for s in slots:
            lengths[s] += 1

    for _ in range(3):
        decode([0, 1, 2])
    decode([0, 2], free=[1])
    extra = slot_init(4, prompts[3], tables[3][:1], sampling=sampling[3])
    step([Row(0, lengths[0], 1, True), Row(4, 0, 4, True)], init=[extra], table=[(0, lengths[0] // BLOCK, tables[0][lengths[0] // BLOCK])])
    lengths[0] += 1
    # A prompt in two chunks, the first of which yields no token, then one that is alone with its first chunk.
    more = slot_init(3, prompts[1], tables[1][:3], sampling=sampling[0])
    step([Row(2, lengths[2], 1, True), Row(3, 0, 5, False)], init=[more], table=new_block(2))
    lengths[2] += 1
    step([Row(3, 5, 4, True)])
    alone = slot_init(5, prompts[1], tables[4], sampling=sampling[1])
    step([Row(5, 0, 6, False)], init=[alone])
    step([Row(0, lengths[0], 1, True), Row(5, 6, 3, True)], table=new_block(0))
    lengths[0] += 1
    decode([0])
    return [dict(zip(r.slots.tolist(), r.tokens.tolist(), strict=True)) for r in results]


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
