import numpy as np
import pytest

from octavo.protocol.engine import FinishReason
from octavo.protocol.params import StructuredOutputsParams
from octavo.protocol.step import StepPlan, StepResult
from tests.support.core_engine import EOS, Engine
from tests.support.fake_worker import FakeWorker


class Scripted(FakeWorker):
    """Answers with the tokens of a script, by how many outputs the request has; masks nothing."""

    def __init__(self, script: list[int]) -> None:
        super().__init__()
        self.script = script

    def _run(self, plan: StepPlan, blocks: dict[int, int]) -> StepResult:
        result = super()._run(plan, blocks)
        for i, slot in enumerate(result.slots.tolist()):
            state = self.slots[slot]
            outputs = len(state.tokens) - 1 - state.init.num_prompt_tokens
            state.tokens[-1] = result.tokens[i] = self.script[outputs]
        return result


def scripted(script: list[int], **options: object) -> Engine:
    engine = Engine(Scripted([*script, *([20] * 40)]))
    engine.add("a", [3, 4], **{"max_tokens": 10, **options})
    engine.run()
    engine.check_idle()
    return engine


def test_eos_ends_and_is_delivered() -> None:
    seen = scripted([7, EOS, 8]).seen["a", 0]
    assert (seen.tokens, seen.reason, seen.stop_reason) == ([7, EOS], FinishReason.STOP, None)


def test_stop_token_ids_say_which() -> None:
    seen = scripted([7, 9, 8], stop_token_ids=[8, 9]).seen["a", 0]
    assert (seen.tokens, seen.reason, seen.stop_reason) == ([7, 9], FinishReason.STOP, 9)


def test_ignore_eos() -> None:
    seen = scripted([7, EOS, 8], ignore_eos=True, max_tokens=3).seen["a", 0]
    assert (seen.tokens, seen.reason) == ([7, EOS, 8], FinishReason.LENGTH)
    seen = scripted([7, EOS, 8], ignore_eos=True, stop_token_ids=[EOS]).seen["a", 0]
    assert (seen.tokens, seen.stop_reason) == ([7, EOS], EOS)


@pytest.mark.parametrize(("min_tokens", "kept"), [(0, 1), (1, 3), (2, 3), (3, 5)])
def test_min_tokens_outputs_come_before_any_stop(min_tokens: int, kept: int) -> None:
    seen = scripted([EOS, 7, EOS, 7, EOS], min_tokens=min_tokens).seen["a", 0]
    assert len(seen.tokens) == kept
    assert seen.reason == FinishReason.STOP


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    seen = scripted([7, EOS], max_tokens=2).seen["a", 0]
    assert (seen.tokens, seen.reason) == ([7, EOS], FinishReason.STOP)


def test_more_stop_ids_than_the_table_has_columns() -> None:
    seen = scripted([7, 33, 8], stop_token_ids=list(range(22, 40))).seen["a", 0]
    assert (seen.tokens, seen.stop_reason) == ([7, 33], 33)


def test_max_model_len() -> None:
    engine = Engine(FakeWorker(max_model_len=20))
    engine.add("a", [3] * 15, max_tokens=50, ignore_eos=True)
    engine.run()
    assert len(engine.tokens("a")) == 5
    assert engine.seen["a", 0].reason == FinishReason.LENGTH


@pytest.mark.parametrize("inflight", [0, 1, 2])
def test_nothing_is_scheduled_past_a_known_limit(inflight: int) -> None:
    engine = Engine(inflight=inflight)
    engine.add("a", [3] * 5, max_tokens=6, ignore_eos=True)
    engine.run()
    assert sum(int(p.sample.sum()) for p in engine.worker.plans) == 6


def test_tokens_that_arrive_after_the_end_are_dropped() -> None:
    for inflight in (1, 2):
        worker = Scripted([7, EOS, 11, 12, *([20] * 30)])
        engine = Engine(worker, inflight=inflight)
        engine.add("a", [3, 4], max_tokens=10)
        engine.run()
        assert engine.tokens("a") == [7, EOS]
        assert sum(int(p.sample.sum()) for p in worker.plans) == 2 + inflight
        engine.check_idle()


def test_synchronous_requests_have_one_step_in_flight() -> None:
    engine = Engine(inflight=2)
    engine.add("a", [3] * 5, max_tokens=6, ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="x"))
    engine.add("b", [4] * 5, max_tokens=20, ignore_eos=True)
    engine.run()
    assert len(engine.tokens("a")) == 6


@pytest.mark.parametrize("budget", [3, 5, 64])
def test_prompt_logprobs_come_complete_and_once(budget: int) -> None:
    engine = Engine(budget=budget)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    engine.add("warm", prompt, max_tokens=2)
    engine.run()
    engine.add("a", prompt, n=2, prompt_logprobs=1, logprobs=1, max_tokens=3, ignore_eos=True)
    engine.run()
    seen = engine.seen["a", 0]
    assert seen.prompt_logprobs is not None
    assert [row and row.token_id for row in seen.prompt_logprobs] == [None, *prompt[1:]]
    assert seen.cached == 0, "they need every position computed"
    assert [row.token_id for row in seen.logprobs] == seen.tokens
    assert engine.seen["a", 1].prompt_logprobs is None


def test_times_and_counters() -> None:
    engine = Engine()
    engine.add("a", [3, 4, 5], max_tokens=4, ignore_eos=True, arrival_time=1.5)
    engine.run()
    times = engine.seen["a", 0].times
    assert times is not None
    assert times.queued == 1.5
    assert times.queued < times.scheduled <= times.first_token <= times.last_token
    stats = engine.core.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (3, 4)
    assert stats.last_step_time > 0
    assert stats.step == len(engine.worker.plans)


class Faulty(FakeWorker):
    """Returns results that do not match the plan, once."""

    fault = ""

    def prepare(self, *, idle: bool) -> bool:
        return False

    def collect(self) -> StepResult:
        result = super().collect()
        if self.fault and len(result.slots) > 1:
            fault, self.fault = self.fault, ""
            if fault == "missing":
                result.slots, result.tokens = result.slots[1:], result.tokens[1:]
            elif fault == "negative":
                result.tokens[0] = -1
            elif fault == "stranger":
                result.slots = np.append(result.slots, np.int32(7))
                result.tokens = np.append(result.tokens, np.int32(7))
            elif fault == "none":
                counts = np.ones(len(result.slots), np.int32)
                counts[0] = 0
                result.counts = counts
                self.slots[int(result.slots[0])].tokens.pop()
                result.tokens = result.tokens[1:]
            elif fault == "two":
                result.counts = np.ones(len(result.slots), np.int32)
                result.counts[0] = 2
                result.tokens = np.concatenate([result.tokens[:1], result.tokens])
            elif fault == "wrong step":
                result.step_id += 1
        return result


@pytest.mark.parametrize(
    ("fault", "failed"), [("missing", 1), ("negative", 1), ("stranger", 0), ("none", 0), ("two", 1), ("wrong step", 3)]
)
def test_results_that_do_not_fit_end_only_whom_they_concern(fault: str, failed: int) -> None:
    good = Engine()
    worker = Faulty()
    engine = Engine(worker)
    for each in (good, engine):
        for i in range(3):
            each.add(f"r{i}", [3, 4, i + 5], max_tokens=8, ignore_eos=True)
        for _ in range(3):
            each.step()
    worker.fault = fault
    good.run()
    engine.run()
    reasons = [engine.seen[f"r{i}", 0].reason for i in range(3)]
    assert reasons.count(FinishReason.ERROR) == failed
    for i, reason in enumerate(reasons):
        if reason != FinishReason.ERROR:
            assert engine.tokens(f"r{i}") == good.tokens(f"r{i}")
    engine.check_idle()


def test_row_errors_end_only_their_request() -> None:
    worker = FakeWorker()
    worker.row_errors = lambda plan: {1: "The logits are not finite."} if plan.step_id == 3 else {}
    engine = Engine(worker)
    for i in range(3):
        engine.add(f"r{i}", [3, 4, i + 5], max_tokens=8, ignore_eos=True)
    engine.run()
    assert engine.seen["r1", 0].error == "The logits are not finite."
    assert len(engine.tokens("r1")) == 3
    assert len(engine.tokens("r0")) == len(engine.tokens("r2")) == 8
    engine.check_idle()
