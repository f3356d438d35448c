import subprocess
import sys

import pytest

from octavo.core.loop import IDLE_TURNS
from octavo.errors import NO_MEMORY
from octavo.protocol.engine import FinishReason
from octavo.protocol.params import SamplingParams
from octavo.protocol.step import StepPlan
from tests.support.core_engine import EOS, Engine
from tests.support.fake_worker import FakeWorker, expected_tokens

PROMPT = [5, 6, 7, 8, 9]


def test_an_idle_core_has_no_work() -> None:
    engine = Engine()
    assert not engine.core.has_work()
    assert engine.step() == []
    engine.add("a", PROMPT, max_tokens=2)
    assert engine.core.has_work()
    engine.run()
    assert not engine.core.has_work()
    engine.core.shutdown()
    assert engine.worker.closed


def test_errors_and_aborts_are_work_to_deliver() -> None:
    engine = Engine()
    engine.add("bad", [])
    assert engine.core.has_work()
    assert [d.finish_reason for d in engine.step()] == [FinishReason.ERROR]
    engine.add("a", PROMPT)
    engine.abort("a")
    assert engine.core.has_work()
    assert [d.finish_reason for d in engine.step()] == [FinishReason.ABORT]
    assert not engine.core.has_work()


@pytest.mark.parametrize("inflight", [0, 1, 2])
def test_steps_in_flight(inflight: int) -> None:
    engine = Engine(inflight=inflight)
    engine.add("a", PROMPT, max_tokens=6, ignore_eos=True)
    first = next(turn for turn in range(10) if engine.step())
    assert first == inflight, "the first token is seen when the pipeline is full"
    engine.run()
    assert engine.tokens("a") == expected_tokens(PROMPT, SamplingParams(seed=7, max_tokens=6, ignore_eos=True), eos=[EOS])


def test_tokens_do_not_depend_on_the_steps_in_flight_nor_on_the_budget() -> None:
    outcomes = []
    for inflight, budget, stages in ((0, 64, 1), (1, 64, 1), (2, 5, 1), (0, 3, 1), (1, 7, 1), (1, 64, 2), (2, 7, 2), (3, 64, 3)):
        engine = Engine(inflight=inflight, budget=budget, stages=stages)
        for i in range(12):
            engine.add(f"r{i}", [*PROMPT[: i % 4 + 1], i + 2], max_tokens=5 + i, n=1 + i % 3)
        engine.run()
        engine.check_idle()
        outcomes.append({key: seen.tokens for key, seen in engine.seen.items()})
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("overlap", [0, 1])
def test_stages_share_the_decodes_evenly_however_requests_come(stages: int, overlap: int) -> None:
    """No more steps a token than stages: each reads all weights anew."""
    engine = Engine(FakeWorker(num_blocks=400, max_num_seqs=24), inflight=stages - 1 + overlap, stages=stages)
    for i in range(24):
        engine.add(f"r{i}", [i + 2, *PROMPT[: i % 5]], max_tokens=40, ignore_eos=True)
        for _ in range(i % 3):
            engine.step()
    while sum(bool(seen.tokens) for seen in engine.seen.values()) < 24:
        engine.step()
    for _ in range(4 * stages):  # what was uneven has been made even
        engine.step()
    before, begin = len(engine.worker.plans), [len(engine.tokens(f"r{i}")) for i in range(24)]
    while len(engine.worker.plans) < before + 5 * stages:
        engine.step()
    assert {len(plan.slots) for plan in engine.worker.plans[before:]} == {24 // stages}
    got = [len(engine.tokens(f"r{i}")) - begin[i] for i in range(24)]
    assert max(got) - min(got) <= 1 and min(got) >= 4, got
    engine.run()
    engine.check_idle()


@pytest.mark.parametrize("stages", [2, 3])
def test_the_first_stage_has_its_next_step_before_tokens_are_delivered(stages: int) -> None:
    engine = Engine(inflight=stages, stages=stages)
    engine.add("a", PROMPT, max_tokens=9, ignore_eos=True)
    while not engine.step():
        pass
    for _ in range(7):
        before = len(engine.worker.plans)
        assert engine.step()
        assert (len(engine.worker.plans), len(engine.core._flights)) == (before + 1, 1)
    assert engine.step()  # the last
    assert not engine.core.has_work()


def test_a_prompt_is_computed_while_every_share_of_the_decodes_is_in_flight() -> None:
    engine = Engine(inflight=2, stages=2)
    for name in "ab":
        engine.add(name, [ord(name) % 40, *PROMPT], max_tokens=30, ignore_eos=True)
    while sum(bool(seen.tokens) for seen in engine.seen.values()) < 2:
        engine.step()
    while len(engine.core._flights) < 2:
        engine.step()
    engine.add("c", PROMPT, max_tokens=3, ignore_eos=True)
    engine.step()
    assert engine.worker.plans[-1].num_tokens == len(PROMPT)
    engine.run()
    engine.check_idle()


@pytest.mark.parametrize("inflight", [0, 1, 2])
@pytest.mark.parametrize("where", ["submit", "collect"])
def test_a_failed_step_ends_its_requests_and_no_other(inflight: int, where: str) -> None:
    worker = FakeWorker(max_num_seqs=2)

    def fails(plan: StepPlan) -> bool:
        return plan.step_id == 3

    setattr(worker, f"fail_{where}", fails)
    engine = Engine(worker, inflight=inflight)
    for i in range(5):
        engine.add(f"r{i}", [i + 2, *PROMPT], max_tokens=8, ignore_eos=True)
    engine.run()
    for i in range(5):
        seen = engine.seen[f"r{i}", 0]
        if i < 2:
            assert seen.reason == FinishReason.ERROR
            assert "simulated" in (seen.error or "")
        else:
            assert seen.reason == FinishReason.LENGTH
            assert seen.tokens == expected_tokens([i + 2, *PROMPT], SamplingParams(seed=7, max_tokens=8, ignore_eos=True), eos=[EOS])
    engine.check_idle()


def test_a_launch_that_failed_loses_no_freed_slot_and_no_pin() -> None:
    worker = FakeWorker(max_num_seqs=3)
    engine = Engine(worker)
    for name in ("a", "a2"):
        engine.add(name, PROMPT, max_tokens=2, ignore_eos=True)
    engine.run()
    # The next plan frees both slots and copies a tail into one of them; it is lost.
    worker.fail_submit = lambda plan: bool(len(plan.free_slots) and len(plan.copy_src))
    engine.add("b", [*PROMPT, 9, 9], max_tokens=2, ignore_eos=True)
    engine.run()
    assert engine.seen["b", 0].reason == FinishReason.ERROR
    lost = worker.plans[-1]
    assert len(lost.free_slots) == 2
    engine.check_idle()
    worker.fail_submit = lambda plan: False
    for name in ("c", "d"):
        engine.add(name, [*PROMPT, 9, 9], max_tokens=2, ignore_eos=True)
    engine.run()
    again = [plan for plan in worker.plans if plan.step_id == lost.step_id + 1]
    assert sorted(again[0].free_slots.tolist()) == sorted(lost.free_slots.tolist())
    engine.check_idle()


def test_two_lost_launches_behind_a_step_in_flight_leave_nothing() -> None:
    worker = FakeWorker(max_num_seqs=4)
    worker.fail_submit = lambda plan: plan.step_id in (1, 2)
    engine = Engine(worker, inflight=2, budget=4)
    for name in "ab":
        engine.add(name, [ord(name), *PROMPT], max_tokens=2)
    engine.run()
    assert {s.reason for s in engine.seen.values()} == {FinishReason.ERROR}
    engine.check_idle()


def test_every_launch_failing_ends_everybody_and_nothing_else() -> None:
    worker = FakeWorker()
    worker.fail_submit = lambda plan: True
    engine = Engine(worker, inflight=1)
    for i in range(20):
        engine.add(f"r{i}", [i + 2, *PROMPT])
    engine.run()
    assert {s.reason for s in engine.seen.values()} == {FinishReason.ERROR}
    engine.check_idle()


@pytest.mark.parametrize("stage", ["_plan_decodes", "_admit", "_finish"])
@pytest.mark.parametrize("inflight", [0, 1])
def test_planning_that_fails_as_a_whole_ends_the_running(monkeypatch: pytest.MonkeyPatch, stage: str, inflight: int) -> None:
    engine = Engine(inflight=inflight)
    engine.add("a", PROMPT, ignore_eos=True)
    engine.step()
    monkeypatch.setattr(engine.core.scheduler, stage, lambda *a: 1 / 0)
    engine.step()
    monkeypatch.undo()
    engine.add("b", PROMPT, ignore_eos=True)
    engine.run()
    assert engine.seen["a", 0].reason == FinishReason.ERROR
    assert engine.seen["b", 0].reason == FinishReason.LENGTH
    engine.check_idle()


def test_settling_that_fails_ends_the_requests_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.add("a", PROMPT, ignore_eos=True)
    engine.step()
    monkeypatch.setattr(engine.core.settler, "_ends", lambda *a: 1 / 0)
    engine.step()
    monkeypatch.undo()
    engine.add("b", PROMPT, ignore_eos=True)
    engine.run()
    assert engine.seen["a", 0].reason == FinishReason.ERROR
    assert engine.seen["b", 0].reason == FinishReason.LENGTH
    engine.check_idle()


def test_work_that_can_never_be_planned_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    monkeypatch.setattr(engine.core.scheduler, "plan", lambda *a: None)
    engine.add("a", PROMPT)
    for _ in range(IDLE_TURNS):
        engine.step()
    assert engine.seen["a", 0].reason == FinishReason.ERROR
    engine.check_idle()


def test_statistics() -> None:
    engine = Engine(FakeWorker(max_num_seqs=2))
    for i in range(3):
        engine.add(f"r{i}", [i + 2, *PROMPT], max_tokens=4, ignore_eos=True)
    engine.step()
    stats = engine.core.stats()
    assert (stats.running, stats.waiting, stats.step, stats.step_tokens) == (2, 1, 1, 12)
    assert (stats.kv_blocks_total, stats.kv_blocks_used, stats.kv_tokens_live) == (63, 4, 12)
    engine.run()
    stats = engine.core.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used, stats.kv_tokens_live) == (0, 0, 0, 0)
    assert stats.kv_blocks_cached == 9
    assert (stats.prompt_tokens, stats.generation_tokens) == (18, 12)


def test_shared_blocks_count_once() -> None:
    engine = Engine()
    engine.add("a", PROMPT * 2, n=4, max_tokens=5, ignore_eos=True)
    for _ in range(3):
        engine.step()
    stats = engine.core.stats()
    # Two full blocks are shared; each sibling has the rest for itself.
    assert stats.running == 4
    scheduled = [int(engine.core.batch.scheduled[s]) for s in range(4)]
    assert stats.kv_tokens_live == 8 + sum(n - 8 for n in scheduled)
    assert min(scheduled) > 8


def test_the_worker_may_shorten_the_context() -> None:
    worker = FakeWorker(max_model_len=16)
    engine = Engine(worker, max_model_len=64)
    engine.add("a", PROMPT, max_tokens=50, ignore_eos=True)
    engine.run()
    assert len(engine.tokens("a")) == 11


def test_the_core_needs_no_torch() -> None:
    code = "import sys, octavo.core.loop, octavo.core.kv.waste; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")]
)
def test_a_lack_of_memory_is_told_in_words_for_users(error: Exception) -> None:
    worker = FakeWorker(max_num_seqs=2)

    def fails(plan: StepPlan) -> bool:
        if plan.step_id == 1:
            raise error
        return False

    worker.fail_submit = fails
    engine = Engine(worker)
    for i in range(4):
        engine.add(f"r{i}", [i + 2, *PROMPT], max_tokens=4, ignore_eos=True)
    engine.run()
    assert [engine.seen[f"r{i}", 0].error for i in range(4)] == [NO_MEMORY, NO_MEMORY, None, None]
