"""Random traffic through the whole core, over a simulated KV memory.

Every sequence must get exactly the tokens it would get alone on an empty machine, whatever is shared, copied, evicted, preempted or
aborted around it, and however steps are cut and overlapped. After every turn the block accounting is checked; in the end nothing is
left. OCTAVO_FUZZ_EXAMPLES sets the number of scenarios (default: what a CI run can afford, the same ones each time);
OCTAVO_FUZZ_NOSHRINK=1 reports a failure as it was found.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from octavo.protocol.engine import FinishReason
from octavo.protocol.params import OutputConstraint, SamplingParams
from octavo.protocol.step import StepPlan, window_blocks
from tests.support.core_engine import EOS, Engine
from tests.support.fake_worker import FakeWorker, expected_tokens

EXAMPLES = int(os.environ.get("OCTAVO_FUZZ_EXAMPLES", "250"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[p for p in Phase if p is not Phase.shrink] if os.environ.get("OCTAVO_FUZZ_NOSHRINK") else list(Phase),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=EXAMPLES == 250,
)

MAX_MODEL_LEN = 48
BLOCK = 4


@dataclass(frozen=True)
class Setup:
    """One engine configuration."""

    inflight: int = 0
    stages: int = 1
    prefix_caching: bool = True
    budget: int = 32
    num_blocks: int = 200
    max_num_seqs: int = 6
    policy: str = "fcfs"
    target_step_ms: float | None = None
    chunked: bool = True
    threshold: int = 0
    windows: tuple[int | None, ...] = (None,)
    """Of the kinds of layers."""
    roomy: bool = True
    """The second kind of cache is as large as the first one; else it holds hardly more than one sequence."""

    def engine(self, **worker: Any) -> Engine:
        return Engine(
            FakeWorker(
                self.num_blocks, BLOCK, self.max_num_seqs, MAX_MODEL_LEN, step_seconds=lambda p: 1e-3 + 1e-4 * p.num_tokens,
                **self.kinds(), **worker,
            ),
            inflight=self.inflight + self.stages - 1, stages=self.stages, prefix_caching=self.prefix_caching, budget=self.budget, policy=self.policy,
            target_step_ms=self.target_step_ms, chunked=self.chunked, threshold=self.threshold,
        )  # fmt: skip

    def kinds(self) -> dict[str, Any]:
        if len(self.windows) == 1:
            return {"window": self.windows[0]}
        window = self.windows[1]
        assert window is not None
        return {"sliding_window": window, "sliding_blocks": self.num_blocks if self.roomy else 1 + window_blocks(window, BLOCK)}


setups = st.builds(
    Setup,
    inflight=st.sampled_from([0, 1, 2]),
    stages=st.sampled_from([1, 1, 2, 3]),
    prefix_caching=st.booleans(),
    budget=st.sampled_from([3, 7, 16, 64]),
    # 13 blocks hold one longest sequence (12 blocks) and hardly more.
    num_blocks=st.sampled_from([13, 16, 24, 60]),
    max_num_seqs=st.sampled_from([1, 3, 8]),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    target_step_ms=st.sampled_from([None, 3.0]),
    chunked=st.booleans(),
    threshold=st.sampled_from([0, 5]),
    windows=st.sampled_from([(None,), (None,), (2,), (6,), (13,), (None, 2), (None, 7), (None, 12)]),
    roomy=st.booleans(),
)


@dataclass(frozen=True)
class Add:
    prefix: int
    prefix_length: int
    suffix: tuple[int, ...]
    n: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stops: tuple[int, ...]
    hold: bool
    priority: int
    fair_key: str
    extra_key: str
    prompt_logprobs: bool
    skip_cache: bool
    structured: bool
    resume: int


@dataclass(frozen=True)
class Step:
    turns: int


@dataclass(frozen=True)
class Abort:
    which: int
    index: int | None


@dataclass(frozen=True)
class Fork:
    """Children of a held request, then (perhaps) its release: a step of beam search."""

    which: int
    tokens: tuple[int, ...]
    release: bool
    hold: bool


@dataclass(frozen=True)
class Reset:
    pass


adds = st.builds(
    Add,
    prefix=st.integers(0, 2),
    prefix_length=st.integers(1, 30),
    suffix=st.lists(st.integers(2, 5), max_size=6).map(tuple),
    n=st.sampled_from([1, 1, 1, 2, 3, 5]),
    max_tokens=st.integers(1, 14),
    min_tokens=st.sampled_from([0, 0, 0, 1, 4]),
    ignore_eos=st.booleans(),
    stops=st.sampled_from([(), (), (2, 3), tuple(range(2, 14))]),
    hold=st.sampled_from([False, False, True]),
    priority=st.integers(-1, 1),
    fair_key=st.sampled_from(["a", "b"]),
    extra_key=st.sampled_from(["", "", "salt"]),
    prompt_logprobs=st.sampled_from([False, False, False, True]),
    skip_cache=st.sampled_from([False, False, False, True]),
    structured=st.sampled_from([False, False, True]),
    resume=st.sampled_from([0, 0, 0, 3]),
)
steps = st.builds(Step, turns=st.integers(1, 12))
aborts = st.builds(Abort, which=st.integers(0, 30), index=st.sampled_from([None, None, 0, 1]))
forks = st.builds(
    Fork,
    which=st.integers(0, 30),
    tokens=st.lists(st.integers(2, 40), min_size=1, max_size=3).map(tuple),
    release=st.booleans(),
    hold=st.booleans(),
)
resets = st.builds(Reset)
scenarios = st.lists(st.one_of(adds, adds, steps, steps, aborts, forks, forks, resets), min_size=1, max_size=28)


def prompt_of(add: Add) -> list[int]:
    rng = random.Random(add.prefix)
    return [rng.randrange(2, 40) for _ in range(add.prefix_length)] + list(add.suffix)


@dataclass
class Expected:
    """What a sequence must come to."""

    prompt: list[int]
    tokens: list[int]
    """Those still to be delivered."""
    aborted: bool = False
    may_fail: bool = False


@dataclass
class Traffic:
    """Plays a scenario on an engine and remembers what must come out."""

    engine: Engine
    windows: tuple[int | None, ...] = (None,)
    expected: dict[tuple[str, int], Expected] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    holding: list[str] = field(default_factory=list)

    def play(self, scenario: list[Any]) -> None:
        for action in scenario:
            match action:
                case Add():
                    self.add(action)
                case Step():
                    for _ in range(action.turns):
                        self.engine.step()
                case Abort():
                    self.abort(action)
                case Fork():
                    self.fork(action)
                case Reset():
                    assert self.engine.core.reset_prefix_cache()
                    self.engine.check()
        self.engine.run()
        for request_id in self.holding:
            self.engine.release(request_id)
        self.engine.run()
        self.engine.check()
        self.engine.check_idle()
        assert not self.engine.core.life.held

    def add(self, add: Add) -> None:
        request_id = f"r{len(self.ids)}"
        prompt = prompt_of(add)
        sampling: dict[str, Any] = {
            "max_tokens": add.max_tokens, "min_tokens": min(add.min_tokens, add.max_tokens), "ignore_eos": add.ignore_eos,
            "stop_token_ids": list(add.stops), "n": add.n, "seed": add.prefix_length, "logprobs": 1,
            "prompt_logprobs": 1 if add.prompt_logprobs else None, "skip_reading_prefix_cache": add.skip_cache,
        }  # fmt: skip
        outputs: list[int] = []
        if add.resume and add.n == 1:
            outputs = self.tokens_of(prompt, SamplingParams(**sampling))[: add.resume]
        if add.structured:
            sampling["constrained"] = True
        self.submit(
            request_id, prompt, outputs, sampling, hold=add.hold, priority=add.priority, fair_key=add.fair_key, extra_key=add.extra_key
        )

    def submit(self, request_id: str, prompt: list[int], outputs: list[int], sampling: dict[str, Any], **options: Any) -> None:
        self.ids.append(request_id)
        if options.get("hold"):
            self.holding.append(request_id)
        constrained = sampling.pop("constrained", False)
        params = SamplingParams(**sampling)
        for index in range(params.n):
            tokens = self.tokens_of(prompt, params, index)
            self.expected[request_id, index] = Expected(prompt, tokens[len(outputs) :])
        if constrained:
            # Reasoning that nothing ends: never more than one step in flight, and every token is allowed.
            sampling["constraint"] = OutputConstraint(reasoning_end_ids=[2**31 - 1])
        self.engine.add(request_id, prompt, output_token_ids=outputs, **sampling, **options)

    def tokens_of(self, prompt: list[int], params: SamplingParams, index: int = 0) -> list[int]:
        return expected_tokens(prompt, params, index=index, eos=[EOS], limit=MAX_MODEL_LEN, windows=self.windows)

    def abort(self, abort: Abort) -> None:
        if not self.ids:
            return
        request_id = self.ids[abort.which % len(self.ids)]
        for (name, index), expected in self.expected.items():
            if name == request_id and abort.index in (None, index):
                expected.aborted = True
        self.engine.abort(request_id, index=abort.index)

    def fork(self, fork: Fork) -> None:
        ended = [i for i in self.holding if (i, 0) in self.engine.seen and self.engine.seen[i, 0].ends]
        if not ended:
            return
        parent = ended[fork.which % len(ended)]
        base = self.expected[parent, 0].prompt + self.engine.tokens(parent)
        for token in fork.tokens:
            if len(base) + 2 > MAX_MODEL_LEN:
                continue
            sampling = {"max_tokens": 1 + token % 3, "seed": token}
            self.submit(f"r{len(self.ids)}", [*base, token], [], sampling, hold=fork.hold, parent_id=parent)
        if fork.release:
            self.holding.remove(parent)
            self.engine.release(parent)

    def verify(self) -> None:
        """Every sequence ended exactly once, with the right tokens."""
        for key, expected in self.expected.items():
            seen = self.engine.seen[key]
            assert seen.ends == 1
            assert seen.tokens == expected.tokens[: len(seen.tokens)], key
            if seen.reason == FinishReason.ABORT:
                assert expected.aborted
            elif seen.reason == FinishReason.ERROR:
                assert expected.may_fail, seen.error
            else:
                assert seen.tokens == expected.tokens, key
                assert [row.token_id for row in seen.logprobs] in (seen.tokens, [])
            if seen.prompt_logprobs is not None:
                assert seen.prompt_logprobs[0] is None
                assert [row.token_id for row in seen.prompt_logprobs[1:] if row] == expected.prompt[1:]
        assert set(self.engine.seen) == set(self.expected)


@fuzz
@given(setups, scenarios)
def test_every_sequence_gets_its_own_tokens(setup: Setup, scenario: list[Any]) -> None:
    traffic = Traffic(setup.engine(), setup.windows)
    traffic.play(scenario)
    traffic.verify()


@fuzz
@given(setups, scenarios, st.integers(0, 2**32 - 1))
def test_failing_steps_end_only_their_requests(setup: Setup, scenario: list[Any], seed: int) -> None:
    rng = random.Random(seed)
    doomed: set[tuple[str, int]] = set()
    engine: Engine

    def blame(slots: list[int]) -> None:
        doomed.update((r.id, r.index) for s in slots if (r := engine.core.batch.requests[s]) is not None)

    def fails(plan: StepPlan) -> bool:
        if rng.random() < 0.06:
            blame(plan.slots.tolist())
            return True
        return False

    def row_errors(plan: StepPlan) -> dict[int, str]:
        if rng.random() < 0.06:
            slot = rng.choice(plan.slots.tolist())
            blame([slot])
            return {slot: "The model produced NaN."}
        return {}

    engine = setup.engine(fail_submit=fails, fail_collect=fails, row_errors=row_errors)
    traffic = Traffic(engine, setup.windows)
    traffic.play(scenario)
    for key in doomed:
        if key in traffic.expected:
            traffic.expected[key].may_fail = True
    traffic.verify()


def test_blocks_that_a_preemption_has_freed_are_for_whom_it_was_done() -> None:
    """Every other plan lets newcomers go first, and there were two plans a preemption: one took the blocks each time, and gave them back."""
    plain: dict[str, Any] = {
        "prefix": 2, "prefix_length": 14, "min_tokens": 0, "ignore_eos": True, "stops": (), "hold": False, "priority": 0, "fair_key": "a",
        "extra_key": "", "prompt_logprobs": False, "skip_cache": False, "resume": 0,
    }  # fmt: skip
    setup = Setup(inflight=2, stages=2, prefix_caching=False, budget=64, num_blocks=60, max_num_seqs=8, windows=(None, 7), roomy=False)
    scenario = [
        Add(suffix=(3,), n=5, max_tokens=8, structured=True, **plain),
        Abort(which=11, index=0),
        Add(suffix=(4, 5, 2), n=3, max_tokens=2, structured=False, **plain),
    ]
    traffic = Traffic(setup.engine(), setup.windows)
    traffic.play(scenario)
    traffic.verify()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("inflight", [0, 1, 2])
def test_a_tiny_pool_gives_the_tokens_of_a_huge_one(policy: str, inflight: int) -> None:
    scenario = [
        Add(
            i % 3,
            8 + i % 7,
            (2, 3 + i % 2),
            1 + i % 3,
            10 + i % 5,
            0,
            i % 2 == 0,
            (),
            False,
            i % 2,
            "ab"[i % 2],
            "",
            False,
            False,
            False,
            0,
        )
        for i in range(24)
    ]
    small = Traffic(Setup(inflight=inflight, num_blocks=18, max_num_seqs=8, policy=policy).engine())
    small.play(scenario)
    small.verify()
    huge = Traffic(Setup(num_blocks=2000, max_num_seqs=8).engine())
    huge.play(scenario)
    huge.verify()
    assert {k: s.tokens for k, s in small.engine.seen.items()} == {k: s.tokens for k, s in huge.engine.seen.items()}
    assert huge.engine.core.stats().preemptions == 0


def test_many_requests_in_a_pool_for_one_are_preempted_and_all_finish() -> None:
    """Predictions are set far too low, so that admission lets everybody in and memory runs out again and again."""
    for inflight in (0, 1, 2):
        engine = Setup(inflight=inflight, num_blocks=14, max_num_seqs=8, prefix_caching=inflight != 1).engine()
        engine.core.life.output_length.mean = 1.0
        engine.core.life.output_length.weight = 0.0
        traffic = Traffic(engine)
        for i in range(12):
            traffic.add(Add(i % 3, 5, (i % 4 + 2,), 1, 30, 30, False, (), False, 0, "", "", False, False, False, 0))
        traffic.play([])
        traffic.verify()
        assert engine.core.stats().preemptions > 5
        assert engine.core.stats().recomputed_tokens > 0
        assert max(s.times.num_preemptions for s in engine.seen.values() if s.times) <= 12
