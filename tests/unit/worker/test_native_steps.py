"""Steps as one native call against the same steps operation by operation, and against a model on torch's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.attention.kinds import SlidingBlocks
from octavo.attention.native_cpu import NativeCpuAttention
from octavo.attention.torch_paged import TorchPagedAttention
from octavo.models.compiled import CompiledDecoder
from octavo.models.decoder import Model
from octavo.models.loader import load_model
from octavo.ops.cpu import abi
from octavo.ops.registry import load_ops
from octavo.protocol.params import OutputConstraint, SamplingParams
from octavo.protocol.step import StepPlan, TokenMasks
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplerState
from octavo.worker.native_steps import NativeSteps, steps_of
from octavo.worker.runner import Runner, settle
from octavo.worker.slots import SlotTables
from tests.support.engine_configs import engine_config
from tests.support.mixed_steps import BLOCK, BLOCKS, LENGTH, SLOTS, VOCAB, play
from tests.support.step_plans import Plans, Row, slot_init

pytestmark = pytest.mark.skipif(abi.library() is None, reason="the compiled kernels were not built")

CONFIG: dict[str, Any] = {
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


class Counting:
    """Counts the steps that ran whole."""

    def __init__(self, steps: NativeSteps) -> None:
        self.steps, self.launches = steps, 0

    def fits(self, plan: StepPlan) -> bool:
        return self.steps.fits(plan)

    def launch(self, plan: StepPlan) -> torch.Tensor:
        self.launches += 1
        return self.steps.launch(plan)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    config = engine_config(hf_config=CONFIG, architecture="Qwen3ForCausalLM", vocab_size=VOCAB)
    return {name: load_model(config, load_ops(name), torch.device("cpu"), lambda *_: None) for name in ("cpu", "native")}


def runner_of(model: Model, *, native: bool, whole: bool) -> tuple[Runner, Counting | None]:
    device = torch.device("cpu")
    tables, state = SlotTables(SLOTS, LENGTH, BLOCK, device), SamplerState(SLOTS, device)
    if not native:
        attention = TorchPagedAttention(model.layer_specs, BLOCKS, BLOCK, torch.float32, device)
        return Runner(model, attention, tables, state, Sampler(state, tables.tokens)), None
    assert isinstance(model, CompiledDecoder)
    cache = NativeCpuAttention(model.layer_specs, BLOCKS, BLOCK, torch.float32, device)
    sampler = Sampler(state, tables.tokens, draw=model.draw)
    steps = Counting(NativeSteps(steps_of(model, cache, tables, state), tables, state)) if whole else None
    return Runner(model, cache, tables, state, sampler, native=steps), steps  # type: ignore[arg-type]


def test_whole_steps_give_the_tokens_of_single_operations_and_of_torch(models: dict[str, Model]) -> None:
    expected = play(runner_of(models["cpu"], native=False, whole=False)[0])
    assert play(runner_of(models["native"], native=True, whole=False)[0]) == expected
    runner, counted = runner_of(models["native"], native=True, whole=True)
    assert play(runner) == expected
    assert counted is not None
    assert counted.launches == len(expected) - 1, "all but the step with logprobs"


def test_unusable_logits_fail_their_request_alone(models: dict[str, Model]) -> None:
    """An infinity in the cache of one request: it ends with an error, its neighbour goes on."""
    runner, counted = runner_of(models["native"], native=True, whole=True)
    plans, greedy = Plans(), SamplingParams(temperature=0.0, max_tokens=None)
    init = [slot_init(slot, [3, 4, 5], [slot + 1], sampling=greedy) for slot in range(2)]
    alone = settle(runner.launch(plans([Row(slot, 0, 3, True) for slot in range(2)], init=init)))
    assert not alone.errors
    runner._attention._values[0][1].fill_(torch.inf)  # type: ignore[attr-defined]
    result = settle(runner.launch(plans([Row(slot, 3, 1, True) for slot in range(2)])))
    assert counted is not None and counted.launches == 2
    assert list(result.errors or {}) == [0]
    assert result.tokens[1] >= 0


def masked(runner: Runner, seed: int) -> list[dict[int, int]]:
    """Greedy, random, filtered and unmasked rows under masks of every density, whose rows are in another order than the plan's."""
    chance = np.random.default_rng(seed)
    held = OutputConstraint(grammar="x")
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=None, constraint=held),
        SamplingParams(temperature=1.0, seed=5, max_tokens=None, constraint=held),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.9, seed=6, max_tokens=None, constraint=held),
        SamplingParams(temperature=0.9, seed=7, max_tokens=None),
    ]
    plans, results = Plans(), []
    width = -(-VOCAB // 32)
    for step in range(8):
        rows = [Row(slot, 0, 3, True) if step == 0 else Row(slot, step + 2, 1, True) for slot in range(4)]
        init = [slot_init(slot, [3, 4, slot], [1 + 4 * slot + j for j in range(4)], sampling=sampling[slot]) for slot in range(4)]
        plan = plans(rows, init=init if step == 0 else [])
        allowed = chance.random((3, width * 32)) < (0.5, 0.02, 1.0, 0.2)[step % 4]
        allowed[:, chance.integers(0, VOCAB)] = True
        words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
        plan.masks = TokenMasks(np.asarray([2, 0, 1], np.int32), words)
        result = settle(runner.launch(plan))
        tokens = dict(zip(result.slots.tolist(), result.tokens.tolist(), strict=True))
        assert not result.errors
        assert all(allowed[row, tokens[slot]] for row, slot in enumerate((2, 0, 1)))
        results.append(tokens)
    return results


@pytest.mark.parametrize("seed", range(3))
def test_masks_hold_in_whole_steps_as_operation_by_operation(models: dict[str, Model], seed: int) -> None:
    expected = masked(runner_of(models["cpu"], native=False, whole=False)[0], seed)
    assert masked(runner_of(models["native"], native=True, whole=False)[0], seed) == expected
    runner, counted = runner_of(models["native"], native=True, whole=True)
    assert masked(runner, seed) == expected
    assert counted is not None
    assert counted.launches == 8


def test_a_mask_that_allows_nothing_fails_its_request_alone(models: dict[str, Model]) -> None:
    runner, _ = runner_of(models["native"], native=True, whole=True)
    held = SamplingParams(temperature=0.0, max_tokens=None, constraint=OutputConstraint(grammar="x"))
    init = [slot_init(slot, [3, 4, 5], [slot + 1], sampling=held) for slot in range(2)]
    plan = Plans()([Row(slot, 0, 3, True) for slot in range(2)], init=init)
    words = np.zeros((2, -(-VOCAB // 32)), np.int32)
    words[1] = 1 << 7
    plan.masks = TokenMasks(np.asarray([0, 1], np.int32), words)
    result = settle(runner.launch(plan))
    assert list(result.errors or {}) == [0]
    assert result.tokens[1] % 32 == 7


SLIDING: dict[str, Any] = CONFIG | {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 300.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
RING = 5
"""Blocks that a request of `long_requests` has of the second kind: its window, and a chunk."""


def long_requests(runner: Runner, *, two_kinds: bool) -> list[dict[int, int]]:
    """Two requests in chunks of 8 tokens, then decodes far past the window, one of which draws at random. Of the second kind each has a few
    blocks only, that come round again."""
    plans, results = Plans(), []
    sampling = [SamplingParams(temperature=0.0, max_tokens=None), SamplingParams(temperature=1.0, seed=3, max_tokens=None)]
    prompts = [np.random.default_rng(i).integers(0, VOCAB, 16).tolist() for i in range(2)]
    column = runner._tables.first_column

    def table(slot: int, first: int, last: int) -> list[tuple[int, int, int]]:
        blocks = range(-(-first // BLOCK), -(-last // BLOCK))
        main = [(slot, i, 1 + 16 * slot + i) for i in blocks]
        return [*main, *((slot, column + i, 1 + RING * slot + i % RING) for i in blocks)] if two_kinds else main

    def step(rows: list[Row], **more: Any) -> None:
        diffs = [entry for row in rows for entry in table(row.slot, row.start, row.start + row.count)]
        result = settle(runner.launch(plans(rows, table=diffs, **more)))
        assert not result.errors
        results.append(dict(zip(result.slots.tolist(), result.tokens.tolist(), strict=True)))

    init = [slot_init(slot, prompts[slot], [], sampling=sampling[slot]) for slot in range(2)]
    step([Row(slot, 0, 8, False) for slot in range(2)], init=init)
    step([Row(slot, 8, 8, True) for slot in range(2)])
    for position in range(16, 60):
        step([Row(slot, position, 1, True) for slot in range(2)])
    return results


@pytest.mark.parametrize("whole", [False, True])
def test_layers_that_slide_have_tables_of_their_own_in_whole_steps(whole: bool) -> None:
    config = engine_config(hf_config=SLIDING, architecture="Gemma3ForCausalLM", vocab_size=VOCAB)
    model = load_model(config, load_ops("native"), torch.device("cpu"), lambda *_: None)
    assert isinstance(model, CompiledDecoder)
    tokens = []
    for two_kinds in (False, True):
        device = torch.device("cpu")
        tables, state = SlotTables(SLOTS, LENGTH, BLOCK, device, two_kinds=two_kinds), SamplerState(SLOTS, device)
        second = SlidingBlocks(frozenset({0, 2}), 1 + 2 * RING) if two_kinds else None
        cache = NativeCpuAttention(model.layer_specs, BLOCKS, BLOCK, torch.float32, device, sliding=second)
        steps = NativeSteps(steps_of(model, cache, tables, state), tables, state) if whole else None
        runner = Runner(model, cache, tables, state, Sampler(state, tables.tokens, draw=model.draw), native=steps)
        tokens.append(long_requests(runner, two_kinds=two_kinds))
    assert tokens[0] == tokens[1]
    assert len({t for one in tokens[0] for t in one.values()}) > 5
