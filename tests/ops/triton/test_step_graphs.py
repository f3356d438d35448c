"""A worker with the GPU's parts (attention backend, operations, whole-step graphs) against one with plain torch.

On a CPU the kernels run in the interpreter and the graphs' steps uncaptured: slow, so the model is as small as the kernels allow.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from octavo.attention.base import GraphShape
from octavo.attention.torch_paged import TorchPagedAttention
from octavo.attention.triton import TritonAttention
from octavo.config.types import ParallelConfig
from octavo.models.decoder import Model
from octavo.models.loader import load_model
from octavo.ops import triton
from octavo.ops.registry import load_ops
from octavo.ops.triton.launch import compiling_only
from octavo.protocol.params import SamplingParams
from octavo.protocol.step import StepPlan, StepResult
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplerState
from octavo.worker.graph_layout import Layout, capture_plan
from octavo.worker.graphs import Captured, StepGraphs
from octavo.worker.runner import Launched, Runner, settle
from octavo.worker.slots import SlotTables
from octavo.worker.warmup import rehearsal_steps
from tests.support.engine_configs import engine_config
from tests.support.step_plans import Plans, Row, slot_init
from tests.support.thread_group import ThreadPipeline

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


SHAPES = [GraphShape(1, 1), GraphShape(4, 4), GraphShape(6, 16, 2), GraphShape(6, 40, 8)]


class Spy:
    """Writes down the shapes that steps took."""

    def __init__(self, graphs: StepGraphs) -> None:
        self.graphs, self.launches, self.sampled = graphs, list[GraphShape](), list[GraphShape]()

    def fitting(self, plan: StepPlan) -> Captured | None:
        return self.graphs.fitting(plan)

    def launch(self, plan: StepPlan, captured: Captured) -> torch.Tensor:
        self.launches.append(captured.layout.shape)
        return self.graphs.launch(plan, captured)

    def compute(self, plan: StepPlan, captured: Captured) -> torch.Tensor:
        self.sampled.append(captured.layout.shape)
        return self.graphs.compute(plan, captured)

    def pass_on(self, plan: StepPlan, captured: Captured) -> None:
        self.launches.append(captured.layout.shape)
        self.graphs.pass_on(plan, captured)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    """The same random weights, with plain and with Triton operations."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = engine_config(hf_config=QWEN, architecture="Qwen3ForCausalLM", dtype="float16", vocab_size=VOCAB)
    plain = load_ops("reference")
    kernels = triton.overrides()
    return {name: load_model(config, ops, device, lambda *_: None) for name, ops in (("plain", plain), ("kernels", _with(plain, kernels)))}


def _with(ops: Any, overrides: dict[str, Any]) -> Any:
    return dataclasses.replace(ops, **overrides)


def runner_of(model: Model, device: torch.device, *, kernels: bool, graphs: bool) -> tuple[Runner, Spy | None]:
    from octavo.ops.triton.sampling import draw_tokens

    tables, state = SlotTables(SLOTS, LENGTH, BLOCK, device), SamplerState(SLOTS, device)
    backend = TritonAttention if kernels else TorchPagedAttention
    attention = backend(model.layer_specs, BLOCKS, BLOCK, torch.float16, device)
    sampler = Sampler(state, tables.tokens, draw=draw_tokens if kernels else None)
    spy = None
    if graphs:
        captured = StepGraphs(model, attention, tables, state, draw_tokens, SHAPES, inflight=1)
        for shape in reversed(SHAPES):
            captured.capture(shape)
        spy = Spy(captured)
    return Runner(model, attention, tables, state, sampler, spy), spy  # type: ignore[arg-type]


def play(runner: Runner) -> list[dict[int, int]]:
    """Greedy, random and filtered requests: prompts whole and in chunks, among decodes that need new blocks; some leave, one takes a
    slot again, one wants logprobs."""
    plans, results = Plans(), list[StepResult]()

    def step(rows: list[Row], **more: Any) -> None:
        results.append(settle(runner.launch(plans(rows, **more))))

    sampling = [
        SamplingParams(temperature=0.0, max_tokens=None),
        SamplingParams(temperature=0.9, seed=5, max_tokens=None),
        SamplingParams(temperature=1.1, top_k=40, top_p=0.9, seed=6, max_tokens=None),
        SamplingParams(temperature=0.7, seed=7, logprobs=2, max_tokens=None),
    ]
    prompts = [np.random.default_rng(i).integers(0, VOCAB, n).tolist() for i, n in enumerate((5, 9, 3, 4))]
    tables = [[1 + 8 * i + j for j in range(8)] for i in range(4)]
    init = [slot_init(i, prompts[i], tables[i][: -(-len(prompts[i]) // BLOCK)], sampling=sampling[i]) for i in range(3)]
    step([Row(i, 0, len(prompts[i]), True) for i in range(3)], init=init)
    lengths = [len(p) for p in prompts]

    def decodes(slots: list[int]) -> tuple[list[Row], list[tuple[int, int, int]]]:
        rows = [Row(s, lengths[s], 1, True) for s in slots]
        diffs = [(s, lengths[s] // BLOCK, tables[s][lengths[s] // BLOCK]) for s in slots if lengths[s] % BLOCK == 0]
        for s in slots:
            lengths[s] += 1
        return rows, diffs

    def decode(slots: list[int], **more: Any) -> None:
        rows, diffs = decodes(slots)
        step(rows, table=diffs, **more)

    for _ in range(3):
        decode([0, 1, 2])
    decode([0, 2], free=[1])
    # A prompt in three chunks, the middle one of a single token that samples nothing, beside decodes. The first comes with its blocks.
    long = np.random.default_rng(9).integers(0, VOCAB, 23).tolist()
    blocks = tables[1][:6]
    rows, diffs = decodes([0, 2])
    step([*rows, Row(1, 0, 10, False)], init=[slot_init(1, long, blocks[:3], sampling=sampling[2])], table=diffs)
    rows, diffs = decodes([0, 2])
    step([*rows, Row(1, 10, 1, False)], table=diffs)
    rows, diffs = decodes([0, 2])
    step([*rows, Row(1, 11, 12, True)], table=[*diffs, *((1, i, blocks[i]) for i in range(3, 6))])
    lengths[1] = 23
    decode([0, 1, 2])
    extra = slot_init(4, prompts[3], tables[3][:1], sampling=sampling[3])
    rows, diffs = decodes([0])
    step([*rows, Row(4, 0, 4, True)], init=[extra], table=diffs)
    # A prompt that is alone with its first chunk, which yields no token.
    step([Row(5, 0, 6, False)], init=[slot_init(5, prompts[1], [33, 34, 35], sampling=sampling[1])])
    rows, diffs = decodes([0])
    step([*rows, Row(5, 6, 3, True)], table=diffs)
    decode([0, 1])
    return [dict(zip(r.slots.tolist(), r.tokens.tolist(), strict=True)) for r in results]


def test_kernels_and_graphs_give_the_tokens_of_plain_torch(models: dict[str, Model], device: torch.device) -> None:
    expected = play(runner_of(models["plain"], device, kernels=False, graphs=False)[0])
    eager = play(runner_of(models["kernels"], device, kernels=True, graphs=False)[0])
    runner, spy = runner_of(models["kernels"], device, kernels=True, graphs=True)
    graphed = play(runner)
    assert eager == expected
    assert graphed == expected
    assert spy is not None
    few, four, small, large = SHAPES[0], SHAPES[1], SHAPES[2], SHAPES[3]
    # Three chunks are too many for the small shape, and the step with logprobs is captured up to its logits only.
    assert spy.launches == [large, four, four, four, four, small, small, small, four, small, small, four]
    assert few not in spy.launches
    assert spy.sampled == [small]
    assert len({t for step in expected for t in step.values()}) > 5


class Stages:
    """Runners of a pipeline's stages as one: each gets every plan, the first one the newest tokens with it."""

    def __init__(self, runners: list[Runner]) -> None:
        self._runners = runners
        self._newest: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> Launched:
        for entering in plan.init:
            self._newest.pop(entering.slot, None)
        decodes = itertools.takewhile(lambda row: row[0] in self._newest, zip(plan.slots.tolist(), plan.count.tolist(), strict=True))
        plan.told = np.array([self._newest[slot] for slot, _ in decodes], np.int32)
        *before, last = (runner.launch(plan) for runner in self._runners)
        for launched in before:
            assert not settle(launched).tokens.any()
        result = settle(last)
        self._newest |= dict(zip(result.slots.tolist(), result.tokens.tolist(), strict=True))
        return last


@pytest.mark.parametrize("captured", [(True, True), (True, False), (False, True)])
def test_stages_with_graphs_give_the_tokens_of_one_rank(
    captured: tuple[bool, bool], models: dict[str, Model], device: torch.device
) -> None:
    """Each stage takes the shapes that it has: what is passed on is the step's tokens, not the shape's."""
    expected = play(runner_of(models["plain"], device, kernels=False, graphs=False)[0])
    queues: list[queue.SimpleQueue[torch.Tensor]] = [queue.SimpleQueue()]
    config = engine_config(hf_config=QWEN, architecture="Qwen3ForCausalLM", dtype="float16", vocab_size=VOCAB)
    config = dataclasses.replace(config, parallel=ParallelConfig(pipeline=2))
    ops = _with(load_ops("reference"), triton.overrides())
    runners, spies = [], []
    for stage, graphs in enumerate(captured):
        model = load_model(config, ops, device, lambda *_: None, pipeline=ThreadPipeline(stage, queues))
        assert model.makes_logits == (stage == 1) and model.capturable
        runner, spy = runner_of(model, device, kernels=True, graphs=graphs)
        runners.append(runner)
        spies.append(spy)
    assert play(Stages(runners)) == expected  # type: ignore[arg-type]
    assert [spy is not None and len(spy.launches) > 10 for spy in spies] == list(captured)


def test_a_shape_is_chosen_by_what_a_step_needs(models: dict[str, Model], device: torch.device) -> None:
    runner, spy = runner_of(models["kernels"], device, kernels=True, graphs=True)
    assert spy is not None
    plans = Plans()
    settle(runner.launch(plans([Row(s, 0, 4, True) for s in range(6)], init=[slot_init(s, [1, 2, 3, 4], [s + 1]) for s in range(6)])))

    def shape(rows: list[Row], **more: Any) -> GraphShape | None:
        captured = spy.fitting(plans(rows, **more))
        return None if captured is None else captured.layout.shape

    assert shape([Row(0, 4, 1, True)]) == SHAPES[0]
    assert shape([Row(s, 4, 1, True) for s in range(2)]) == SHAPES[1]
    assert shape([Row(s, 4, 1, True) for s in range(5)]) == SHAPES[2], "more decodes than shapes of decodes have room for"
    assert shape([Row(0, 4, 1, False)]) == SHAPES[2]
    assert shape([Row(0, 4, 17, True)]) == SHAPES[3]
    assert shape([Row(0, 4, 41, True)]) is None
    assert shape([Row(0, 4, 1, True)], table=[(0, i, i) for i in range(1, 6)]) == SHAPES[2], "it has room for more diffs"
    settle(runner.launch(plans([Row(0, 0, 4, False)], init=[slot_init(0, [1, 2, 3, 4], [1], sampling=penalised())], free=[0])))
    assert shape([Row(0, 4, 1, True)]) == SHAPES[0], "the graphs give logits to whatever the sampler does with them"


def penalised() -> SamplingParams:
    return SamplingParams(temperature=0.0, presence_penalty=1.0, max_tokens=None)


@pytest.fixture
def nothing_runs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are called and do not run; fresh memory holds the worst that it can: NaN, and integers that are no index."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    if device.type == "cuda":
        with compiling_only(2):
            yield
        torch.cuda.synchronize()
    else:
        monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda kernel, grid: lambda *args, **kwargs: None, raising=False)
        yield
    torch.use_deterministic_algorithms(False)


def test_a_rehearsal_looks_nothing_up_by_what_no_kernel_has_computed(
    models: dict[str, Model], device: torch.device, request: pytest.FixtureRequest
) -> None:
    runner, _ = runner_of(models["kernels"], device, kernels=True, graphs=False)
    _, spy = runner_of(models["kernels"], device, kernels=True, graphs=True)
    assert spy is not None
    config = engine_config(hf_config=QWEN, vocab_size=VOCAB, max_model_len=LENGTH, max_num_seqs=SLOTS, max_num_batched_tokens=100)
    config = dataclasses.replace(config, device=dataclasses.replace(config.device, kind="cuda"))
    request.getfixturevalue("nothing_runs")
    plans = rehearsal_steps(config)
    for plan in (*plans, *plans):
        tokens = runner.launch(plan).sampled[0].tokens
        assert len(tokens) == len(plan.slots)
    if device.type == "cpu":
        assert int(tokens.max()) > VOCAB, "what would be a token is rubbish"
    for shape in SHAPES:
        spy.graphs.rehearse(shape)
    assert {int(c) for plan in plans for c in plan.count} >= {1, 4, 8, 32}
    assert max(plan.num_tokens for plan in plans) == LENGTH - 1


def mixed_wishes(runner: Runner) -> tuple[list[dict[int, int]], dict[int, list[int]]]:
    """A penalised request, one with bias and logprobs, and a plain one, in steps together and alone: tokens, and ids of logprobs."""
    plans, results = Plans(), list[StepResult]()
    sampling = [
        penalised(),
        SamplingParams(temperature=0.8, seed=3, logit_bias={7: 3.0}, logprobs=2, max_tokens=None),
        SamplingParams(temperature=0.9, seed=4, top_p=0.8, max_tokens=None),
    ]
    prompts = [np.random.default_rng(10 + i).integers(0, VOCAB, 4).tolist() for i in range(3)]
    init = [slot_init(i, prompts[i], [1 + 4 * i + j for j in range(4)], sampling=sampling[i]) for i in range(3)]
    results.append(settle(runner.launch(plans([Row(i, 0, 4, True) for i in range(3)], init=init))))
    lengths = [4, 4, 4]
    for slots in ([0, 1, 2], [2], [0], [1, 2], [2], [0, 1, 2], [2]):
        results.append(settle(runner.launch(plans([Row(s, lengths[s], 1, True) for s in slots]))))
        for s in slots:
            lengths[s] += 1
    tokens = [dict(zip(r.slots.tolist(), r.tokens.tolist(), strict=True)) for r in results]
    return tokens, {i: sorted(r.logprobs[1][0].top_ids) for i, r in enumerate(results) if r.logprobs}


def test_rows_that_want_more_of_the_sampler_replay_up_to_their_logits(models: dict[str, Model], device: torch.device) -> None:
    expected = mixed_wishes(runner_of(models["plain"], device, kernels=False, graphs=False)[0])
    runner, spy = runner_of(models["kernels"], device, kernels=True, graphs=True)
    assert mixed_wishes(runner) == expected
    assert spy is not None
    assert (len(spy.sampled), len(spy.launches)) == (5, 3)
    assert list(expected[1]) == [0, 1, 4, 6]


@pytest.mark.parametrize(
    "shape", [GraphShape(1, 1), GraphShape(3, 3), GraphShape(130, 130), GraphShape(5, 19, 3), GraphShape(256, 512, 32)]
)
def test_layout_columns_are_apart_and_aligned(shape: GraphShape) -> None:
    layout = Layout(shape, 24 * shape.tokens, 16)
    bounds = layout.bounds
    assert all(begin % 4 == 0 for begin, _ in bounds)
    assert all(bounds[i][1] == bounds[i + 1][0] for i in range(len(bounds) - 1))
    columns = layout.split(np.zeros(layout.size, np.int32))
    for column in (columns.slots, columns.contexts, columns.modes):
        assert len(column) >= shape.rows
    assert len(columns.keys) >= 2 * shape.rows
    assert len(columns.plan) >= 24 * shape.tokens
    assert len(columns.diffs) == 3 * layout.max_diffs
    assert layout.max_diffs >= shape.rows + (shape.tokens // 16 if shape.chunks else 0)
    assert len(columns.row_of_token) >= (shape.tokens if shape.chunks else 0)


@pytest.mark.parametrize("rows", [1, 3, 32, 64, 100, 256, 300, 1024])
@pytest.mark.parametrize("tokens", [8, 300, 8192])
def test_shapes_cover_all_steps_and_the_first_do_so_coarsely(rows: int, tokens: int) -> None:
    plan = capture_plan(rows, tokens)
    most = min(rows, tokens)
    assert len(set(plan.shapes)) == len(plan.shapes)
    decodes = sorted((s for s in plan.shapes if not s.chunks), key=lambda s: s.tokens)
    assert all(s.rows == s.tokens for s in decodes)
    assert (decodes[0].tokens, decodes[-1].tokens) == (1, most)
    chunks = [s for s in plan.shapes if s.chunks]
    assert all(s.rows <= min(most, s.tokens) and s.chunks <= s.tokens for s in chunks)
    first = (*plan.largest, *plan.next)
    assert decodes[-1] in plan.largest
    for size in ("tokens", "rows", "chunks"):
        assert max(getattr(s, size) for s in plan.largest) == max(getattr(s, size) for s in plan.shapes)

    def smallest(of: Sequence[GraphShape], step: GraphShape) -> int:
        return min((s.tokens for s in of if s.chunks and s.tokens >= step.tokens and s.rows >= step.rows), default=0)

    for count in range(1, min(tokens, 1024) + 1, 7):
        for together in {1, min(20, count, most), min(200, count, most), min(count, most)}:
            step = GraphShape(together, count)
            final, early = smallest(plan.shapes, step), smallest(first, step)
            assert bool(final) is bool(early) is (tokens >= 16)
            if tokens >= 16:
                assert final <= max(count + 64, 1.5 * count), "a step is never much smaller than its graph"
                assert early <= max(64, 2.7 * count)


def test_room_for_many_rows_is_taken_only_where_it_is_needed() -> None:
    plan = capture_plan(1024, 8192)
    by_tokens = {n: sorted(s.rows for s in plan.shapes if s.chunks and s.tokens == n) for n in (16, 64, 256, 512, 1024)}
    assert by_tokens == {16: [16], 64: [32, 64], 256: [32, 256], 512: [32, 256, 512], 1024: [32, 256, 1024]}
