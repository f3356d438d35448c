"""Steps as one native call against the same steps operation by operation, and against a model on torch's kernels."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from octavo.attention.kinds import SlidingBlocks
from octavo.attention.native_cpu import NativeCpuAttention
from octavo.attention.torch_paged import TorchPagedAttention
from octavo.errors import NO_MEMORY
from octavo.models.compiled import CompiledDecoder
from octavo.models.decoder import Model
from octavo.models.loader import load_model
from octavo.ops.cpu import abi
from octavo.ops.registry import load_ops
from octavo.protocol.boot import child_environment
from octavo.protocol.engine import LogprobRow
from octavo.protocol.params import OutputConstraint, SamplingParams
from octavo.protocol.step import StepPlan, StepResult, TokenMasks
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplerState
from octavo.worker.native_steps import NativeSteps, steps_over
from octavo.worker.runner import Runner
from octavo.worker.slots import SlotTables
from tests.support.engine_configs import engine_config
from tests.support.mixed_steps import BLOCK, BLOCKS, LENGTH, SLOTS, VOCAB, Run, by_operations, play
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


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    config = engine_config(hf_config=CONFIG, architecture="Qwen3ForCausalLM", vocab_size=VOCAB)
    return {name: load_model(config, load_ops(name), torch.device("cpu"), lambda *_: None) for name in ("cpu", "native")}


def runner_of(model: Model, *, native: bool) -> Runner:
    """Steps operation by operation."""
    device = torch.device("cpu")
    tables, state = SlotTables(SLOTS, LENGTH, BLOCK, device), SamplerState(SLOTS, device)
    if not native:
        attention = TorchPagedAttention(model.layer_specs, BLOCKS, BLOCK, torch.float32, device)
        return Runner(model, attention, tables, state, Sampler(state, tables.tokens))
    assert isinstance(model, CompiledDecoder)
    cache = NativeCpuAttention(model.layer_specs, BLOCKS, BLOCK, torch.float32, device)
    return Runner(model, cache, tables, state, Sampler(state, tables.tokens, draw=model.draw))


def steps_of(model: Model, *, processed: bool = False) -> NativeSteps:
    assert isinstance(model, CompiledDecoder)
    device = torch.device("cpu")
    cache = NativeCpuAttention(model.layer_specs, BLOCKS, BLOCK, torch.float32, device)
    state = SamplerState(SLOTS, device)
    return steps_over(model, cache, SlotTables(SLOTS, LENGTH, BLOCK, device), state, processed_logprobs=processed)


def test_whole_steps_give_the_tokens_of_single_operations_and_of_torch(models: dict[str, Model]) -> None:
    expected = play(by_operations(runner_of(models["cpu"], native=False)))
    assert play(by_operations(runner_of(models["native"], native=True))) == expected
    steps = steps_of(models["native"])
    assert play(steps.run) == expected
    assert steps.whole == len(expected) - 1, "all but the step with logprobs"


def test_unusable_logits_fail_their_request_alone(models: dict[str, Model]) -> None:
    """An infinity in the cache of one request: it ends with an error, its neighbour goes on."""
    steps = steps_of(models["native"])
    plans, greedy = Plans(), SamplingParams(temperature=0.0, max_tokens=None)
    init = [slot_init(slot, [3, 4, 5], [slot + 1], sampling=greedy) for slot in range(2)]
    alone = steps.run(plans([Row(slot, 0, 3, True) for slot in range(2)], init=init))
    assert not alone.errors
    steps._memory.values[0][1].fill(np.inf)
    result = steps.run(plans([Row(slot, 3, 1, True) for slot in range(2)]))
    assert list(result.errors or {}) == [0]
    assert result.tokens[1] >= 0


def masked(run: Run, seed: int) -> list[dict[int, int]]:
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
        result = run(plan)
        tokens = dict(zip(result.slots.tolist(), result.tokens.tolist(), strict=True))
        assert not result.errors
        assert all(allowed[row, tokens[slot]] for row, slot in enumerate((2, 0, 1)))
        results.append(tokens)
    return results


@pytest.mark.parametrize("seed", range(3))
def test_masks_hold_in_whole_steps_as_operation_by_operation(models: dict[str, Model], seed: int) -> None:
    expected = masked(by_operations(runner_of(models["cpu"], native=False)), seed)
    assert masked(by_operations(runner_of(models["native"], native=True)), seed) == expected
    steps = steps_of(models["native"])
    assert masked(steps.run, seed) == expected
    assert steps.whole == 8


def test_a_mask_that_allows_nothing_fails_its_request_alone(models: dict[str, Model]) -> None:
    held = SamplingParams(temperature=0.0, max_tokens=None, constraint=OutputConstraint(grammar="x"))
    init = [slot_init(slot, [3, 4, 5], [slot + 1], sampling=held) for slot in range(2)]
    plan = Plans()([Row(slot, 0, 3, True) for slot in range(2)], init=init)
    words = np.zeros((2, -(-VOCAB // 32)), np.int32)
    words[1] = 1 << 7
    plan.masks = TokenMasks(np.asarray([0, 1], np.int32), words)
    result = steps_of(models["native"]).run(plan)
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


def long_requests(run: Run, column: int, *, two_kinds: bool) -> list[dict[int, int]]:
    """Two requests in chunks of 8 tokens, then decodes far past the window, one of which draws at random. Of the second kind each has a few
    blocks only, that come round again."""
    plans, results = Plans(), []
    sampling = [SamplingParams(temperature=0.0, max_tokens=None), SamplingParams(temperature=1.0, seed=3, max_tokens=None)]
    prompts = [np.random.default_rng(i).integers(0, VOCAB, 16).tolist() for i in range(2)]

    def table(slot: int, first: int, last: int) -> list[tuple[int, int, int]]:
        blocks = range(-(-first // BLOCK), -(-last // BLOCK))
        main = [(slot, i, 1 + 16 * slot + i) for i in blocks]
        return [*main, *((slot, column + i, 1 + RING * slot + i % RING) for i in blocks)] if two_kinds else main

    def step(rows: list[Row], **more: Any) -> None:
        diffs = [entry for row in rows for entry in table(row.slot, row.start, row.start + row.count)]
        result = run(plans(rows, table=diffs, **more))
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
        runner = Runner(model, cache, tables, state, Sampler(state, tables.tokens, draw=model.draw))
        run = steps_over(model, cache, tables, state).run if whole else by_operations(runner)
        tokens.append(long_requests(run, tables.first_column, two_kinds=two_kinds))
    assert tokens[0] == tokens[1]
    assert len({t for one in tokens[0] for t in one.values()}) > 5


def wishes(seed: int) -> SamplingParams:
    """Any mixture of what a sampler can do."""
    pick = random.Random(seed).choice
    words = [[5], [3, 4], *([i, i + 1] for i in range(0, VOCAB - 1, 3))]
    some: dict[str, Any] = {
        "temperature": pick([0.0, 0.7, 1.3]),
        "repetition_penalty": pick([1.0, 0.6, 1.4]),
        "presence_penalty": pick([0.0, 1.5, -0.7]),
        "frequency_penalty": pick([0.0, 0.9]),
        "logit_bias": pick([None, {3: 4.0, 9: -100.0}, {17: 3.5}]),
        "allowed_token_ids": pick([None, None, list(range(1, VOCAB, 2))]),
        "bad_words_token_ids": pick([None, words]),
        "min_tokens": pick([0, 3]),
        "stop_token_ids": list(range(40, 60)),
        "logprobs": pick([None, 0, 3, -1]),
        "logprob_token_ids": pick([None, [7, 8, 9]]),
        "prompt_logprobs": pick([None, 2]),
        "top_k": pick([0, 30]),
        "top_p": pick([1.0, 0.8]),
        "min_p": pick([0.0, 0.02]),
    }
    return SamplingParams(max_tokens=None, seed=seed, **some)


def mixed(run: Run, seed: int) -> list[StepResult]:
    """Six requests with mixed wishes: prompts in two chunks, then decodes, some of them masked."""
    chance, plans = np.random.default_rng(seed), Plans()
    sampling = [wishes(97 * seed + slot) for slot in range(5)] + [SamplingParams(temperature=0.0, max_tokens=None)]
    sampling[1].constraint = OutputConstraint(grammar="x")
    prompts = [chance.integers(0, VOCAB, 7).tolist() for _ in sampling]
    init = [slot_init(slot, prompts[slot], [1 + 6 * slot + j for j in range(6)], sampling=p) for slot, p in enumerate(sampling)]
    results = [
        run(plans([Row(slot, 0, 4, False) for slot in range(6)], init=init)),
        run(plans([Row(slot, 4, 3, True) for slot in range(6)])),
    ]
    for length in range(7, 16):
        plan = plans([Row(slot, length, 1, True) for slot in range(6)])
        allowed = chance.random((1, -(-VOCAB // 32) * 32)) < 0.4
        allowed[0, 21] = True
        plan.masks = TokenMasks(np.asarray([1], np.int32), np.packbits(allowed, axis=1, bitorder="little").view(np.int32))
        results.append(run(plan))
    return results


def assert_near(ours: dict[int, list[LogprobRow]] | None, theirs: dict[int, list[LogprobRow]] | None) -> None:
    """By value, but for what float32 may differ by; what has no probability has no order."""
    assert (ours is None) == (theirs is None)
    for slot, rows in (theirs or {}).items():
        for row, expected in zip((ours or {})[slot], rows, strict=True):
            found, wanted = (dict(likely(one)) for one in (row, expected))
            assert (row.token_id, row.rank, list(found)) == (expected.token_id, expected.rank, list(wanted))
            assert [row.logprob, *found.values()] == pytest.approx([expected.logprob, *wanted.values()], abs=2e-5)


def likely(row: LogprobRow) -> list[tuple[int, float]]:
    assert len(row.top_ids) == len(set(row.top_ids)) == len(row.top_logprobs)
    return [(token, logprob) for token, logprob in zip(row.top_ids, row.top_logprobs, strict=True) if logprob > -np.inf]


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_requests_want_is_what_torch_makes_of_it(models: dict[str, Model], seed: int, processed: bool) -> None:
    runner = runner_of(models["native"], native=True)
    runner._sampler._processed = processed
    expected = mixed(by_operations(runner), seed)
    steps = steps_of(models["native"], processed=processed)
    found = mixed(steps.run, seed)
    assert steps.whole == 0
    for ours, theirs in zip(found, expected, strict=True):
        assert not ours.errors and not theirs.errors
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert_near(ours.logprobs, theirs.logprobs)
        assert_near(ours.prompt_logprobs, theirs.prompt_logprobs)


def test_scores_of_a_request_are_the_same_bits_in_any_batch(models: dict[str, Model]) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=None, logprobs=5, prompt_logprobs=5, presence_penalty=0.5)

    def scores(slots: list[int]) -> list[Any]:
        run, plans = steps_of(models["native"]).run, Plans()
        init = [slot_init(slot, [3, 4, 5 + slot], [1 + 6 * slot + j for j in range(6)], sampling=sampling) for slot in slots]
        first = run(plans([Row(slot, 0, 3, True) for slot in slots], init=init))
        second = run(plans([Row(slot, 3, 1, True) for slot in slots]))
        return [(first.prompt_logprobs or {})[2], (first.logprobs or {})[2], (second.logprobs or {})[2]]

    assert scores([2]) == scores([0, 1, 2, 3, 4, 5])


def test_a_prompt_that_is_no_number_fails_its_request_alone(models: dict[str, Model]) -> None:
    """Of a request that has its prompt scored, by what the cache holds of its beginning."""
    steps, plans = steps_of(models["native"]), Plans()
    sampling = [SamplingParams(temperature=0.0, max_tokens=None, prompt_logprobs=1, logprobs=n) for n in (1, 2)]
    init = [slot_init(slot, list(range(3, 11)), [1 + 2 * slot, 2 + 2 * slot], sampling=sampling[slot]) for slot in range(2)]
    assert not steps.run(plans([Row(slot, 0, 4, False) for slot in range(2)], init=init)).errors
    steps._memory.values[0][1].fill(np.nan)
    result = steps.run(plans([Row(slot, 4, 4, True) for slot in range(2)]))
    assert list(result.errors or {}) == [0]
    assert result.logprobs is not None and list(result.logprobs) == [1]
    assert result.tokens[1] >= 0


def test_a_step_without_memory_fails_and_the_next_one_runs(models: dict[str, Model]) -> None:
    """In a process of its own, whose address space is bounded once the model is loaded."""
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY], check=False, capture_output=True, text=True, env=child_environment(), timeout=120
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["MemoryError", "3"]


def test_trimming_gives_scratch_memory_back() -> None:
    program = WITHOUT_MEMORY.partition("used = ")[0] + TRIMMED
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=child_environment(), timeout=120)
    assert run.stdout.split() == ["True", "3"]


def short_of_memory(steps: NativeSteps, most_tokens: int) -> list[int]:
    """Have compiled calls of more than `most_tokens` tokens fail; the sizes that got through are written to the returned list."""
    inner: Any = steps._steps
    sizes: list[int] = []

    def limited(call: Any) -> Any:
        def run(plan: StepPlan, *args: Any, **more: Any) -> Any:
            if plan.num_tokens > most_tokens:
                raise MemoryError
            sizes.append(plan.num_tokens)
            return call(plan, *args, **more)

        return run

    inner.run, inner.run_to_logits = limited(inner.run), limited(inner.run_to_logits)
    return sizes


@pytest.mark.parametrize("most_tokens", [1, 2, 5])
def test_a_step_without_room_is_computed_in_parts(models: dict[str, Model], most_tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    """Same tokens, masked or not, with logprobs or not; one line in the log for each size, not one a step."""
    expected, held = play(steps_of(models["native"]).run), masked(steps_of(models["native"]).run, 3)
    caplog.set_level("WARNING")
    steps = steps_of(models["native"])
    sizes = short_of_memory(steps, most_tokens)
    assert play(steps.run) == expected
    assert masked(steps.run, 3) == held
    assert max(sizes) <= most_tokens < len(sizes)
    lines = [record.getMessage() for record in caplog.records if "in two halves" in record.getMessage()]
    assert 0 < len(lines) == len(set(lines))


def test_scores_of_parts_are_those_of_the_whole(models: dict[str, Model]) -> None:
    def scored(run: Run) -> list[Any]:
        wish = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=1, max_tokens=None)
        plans = Plans()
        init = [slot_init(slot, list(range(3, 14)), [1 + 3 * slot + j for j in range(3)], sampling=wish) for slot in range(2)]
        first = run(plans([Row(0, 0, 11, True), Row(1, 0, 7, False)], init=init))
        return [first, run(plans([Row(0, 11, 1, True), Row(1, 7, 4, True)]))]

    expected = scored(steps_of(models["native"]).run)
    steps = steps_of(models["native"])
    short_of_memory(steps, 3)
    for one, other in zip(scored(steps.run), expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (one.errors, one.logprobs, one.prompt_logprobs) == (None, other.logprobs, other.prompt_logprobs)


def test_requests_that_there_is_no_memory_for_fail_alone(models: dict[str, Model]) -> None:
    steps = steps_of(models["native"])
    inner: Any = steps._steps
    whole = inner.run

    def refuse(plan: StepPlan, *args: Any) -> Any:
        if 1 in plan.slots:
            raise MemoryError
        return whole(plan, *args)

    inner.run = refuse
    plans, greedy = Plans(), SamplingParams(temperature=0.0, max_tokens=None)
    init = [slot_init(slot, [3, 4, 5], [slot + 1], sampling=greedy) for slot in range(3)]
    first = steps.run(plans([Row(0, 0, 3, True), Row(1, 0, 2, False), Row(2, 0, 3, True)], init=init))
    assert first.errors == {1: NO_MEMORY}
    second = steps.run(plans([Row(slot, 3, 1, True) for slot in range(3)]))
    assert second.errors == {1: NO_MEMORY}
    tokens = dict(zip(second.slots.tolist(), second.tokens.tolist(), strict=True))
    assert tokens[0] == tokens[2] >= 0 > tokens[1]
    inner.run = whole
    assert not steps.run(plans([Row(slot, 4, 1, True) for slot in (0, 2)])).errors


WITHOUT_MEMORY = """
import resource
import numpy as np
from octavo.ops.cpu import abi

engine = abi.Engine(2)
weight = np.zeros(abi.loaded().octavo_packed_bytes(0, 16, 4096), np.uint8)
linear = abi.Linear((abi.Segment * 1)(abi.Segment(0, 16, abi.address(weight))), None, 1, 16, 4096, 0)

def multiply(tokens):
    x, out = np.zeros((1, 4096), np.float32), np.zeros((tokens, 16), np.float32)
    import ctypes
    abi.loaded().octavo_linear(engine.handle, ctypes.byref(linear), abi.address(x), 0, tokens, abi.address(out), 16, 0)
    return len(out)

multiply(2)
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))
try:
    multiply(2**16)
except MemoryError as error:
    print(type(error).__name__)
print(multiply(3))
"""
TRIMMED = """
multiply(2**12)
before = int(open("/proc/self/statm").read().split()[1])
abi.loaded().octavo_engine_trim(engine.handle)
print((before - int(open("/proc/self/statm").read().split()[1])) * 4096 > 2**26)  # at least 64 MiB
print(multiply(3))
"""
