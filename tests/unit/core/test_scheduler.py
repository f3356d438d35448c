from collections.abc import Callable
from itertools import pairwise

import pytest

from octavo.core.scheduler import CHUNK_FLOOR, MOST_EVICTIONS, plan_pairs
from octavo.protocol.engine import FinishReason
from octavo.protocol.params import SamplingParams
from octavo.protocol.step import StepPlan
from tests.support.core_engine import EOS, Engine
from tests.support.fake_worker import FakeWorker, expected_tokens


def rows(plan: StepPlan) -> dict[int, tuple[int, int, bool]]:
    return {
        s: (a, c, m) for s, a, c, m in zip(plan.slots.tolist(), plan.start.tolist(), plan.count.tolist(), plan.sample.tolist(), strict=True)
    }


def big(**options: int) -> FakeWorker:
    return FakeWorker(**{"num_blocks": 2000, "max_num_seqs": 16, "max_model_len": 2000, **options})  # type: ignore[arg-type]


def test_decodes_prompt_chunks_and_admissions_share_one_step() -> None:
    engine = Engine(big(), budget=16)
    engine.add("decoding", [5] * 4, ignore_eos=True, max_tokens=30)
    engine.step()
    engine.add("long", [6] * 40)
    engine.step()
    engine.add("short", [7] * 3)
    engine.step()
    engine.step()
    for plan in engine.worker.plans[1:3]:
        assert plan.num_tokens == 16, "the budget is used up while there is a prompt to compute"
        assert rows(plan)[0][1:] == (1, True)
    admitted = [plan for plan in engine.worker.plans if len(plan.init) and plan.init[0].token_ids.tolist() == [7] * 3]
    assert len(admitted[0].slots) == 3


def test_a_long_prompt_does_not_keep_a_short_one_waiting() -> None:
    engine = Engine(big(), budget=32)
    engine.add("long", [6] * 1500, max_tokens=2)
    engine.step()
    engine.add("short", [7] * 10, max_tokens=1)
    for _ in range(3):
        engine.step()
    assert engine.seen["short", 0].ends
    assert ("long", 0) not in engine.seen


def test_short_prompts_do_not_starve_a_long_one() -> None:
    engine = Engine(big(), budget=32)
    engine.add("long", [6] * 320, max_tokens=1)
    for i in range(60):
        engine.add(f"s{i}", [i + 2, *([7] * 29)], max_tokens=1)
        engine.step()
        if ("long", 0) in engine.seen:
            break
    assert i < 25, "the oldest prompt gets every other step"


def test_the_threshold_caps_chunks_of_long_prompts_only() -> None:
    engine = Engine(big(), budget=64, threshold=20)
    engine.add("long", [6] * 50, max_tokens=1)
    engine.add("short", [7] * 15, max_tokens=1)
    engine.run()
    assert max(c for plan in engine.worker.plans for c in plan.count) == 20
    assert rows(engine.worker.plans[0]) == {0: (0, 20, False), 1: (0, 15, True)}


def test_without_chunking_prompts_go_in_whole_when_they_can() -> None:
    engine = Engine(big(), budget=32, chunked=False)
    engine.add("a", [6] * 20, max_tokens=3, ignore_eos=True)
    engine.add("b", [7] * 20, max_tokens=3, ignore_eos=True)
    engine.add("huge", [8] * 70, max_tokens=3, ignore_eos=True)
    engine.run()
    chunks = [(s, *r) for plan in engine.worker.plans for s, r in rows(plan).items() if r[1] > 1]
    assert [(start, count) for slot, start, count, _ in chunks if slot in (0, 1) and start == 0][:2] == [(0, 20), (0, 20)]
    assert sum(count for slot, _, count, _ in chunks if slot == 2) == 70
    assert {i for i, _ in engine.seen} == {"a", "b", "huge"}


def stepping(per_token: float, base: float = 0.0) -> Callable[[StepPlan], float]:
    return lambda plan: base + per_token * plan.num_tokens


def test_chunks_are_sized_by_the_target_when_somebody_decodes() -> None:
    worker = big()
    worker.step_seconds = stepping(1e-3, base=0.01)
    engine = Engine(worker, budget=1024, target_step_ms=100.0)
    engine.add("decoding", [5] * 4, ignore_eos=True, max_tokens=200)
    for _ in range(10):
        engine.step()
    engine.add("long", [6] * 1800, max_tokens=1)
    while ("long", 0) not in engine.seen:
        engine.step()
    chunks = [p for p in worker.plans if p.num_tokens > 1 and len(p.slots) == 2]
    times = [worker.step_seconds(p) for p in chunks[:-1]]
    assert max(times) < 0.15
    assert sum(times[4:]) / len(times[4:]) == pytest.approx(0.1, rel=0.1), "once learned, steps last as long as they should"


def test_prompts_progress_however_slow_decoding_is() -> None:
    worker = big()
    worker.step_seconds = lambda plan: 5.0
    engine = Engine(worker, budget=1024, target_step_ms=100.0)
    engine.add("decoding", [5] * 4, ignore_eos=True, max_tokens=300)
    for _ in range(10):
        engine.step()
    engine.add("long", [6] * 640, max_tokens=1)
    begin = len(worker.plans)
    while ("long", 0) not in engine.seen:
        engine.step()
    assert len(worker.plans) - begin == 640 // CHUNK_FLOOR


def test_far_down_a_long_prompt_chunks_get_small_rather_than_slow() -> None:
    worker = big()
    worker.step_seconds = lambda plan: 1e-3 * plan.num_tokens + 4e-6 * plan_pairs(plan)
    engine = Engine(worker, budget=1024, target_step_ms=100.0)
    engine.add("decoding", [5] * 4, ignore_eos=True, max_tokens=300)
    for _ in range(10):
        engine.step()
    engine.add("long", [6] * 1800, max_tokens=1)
    while ("long", 0) not in engine.seen:
        engine.step()
    chunks = [p for p in worker.plans if len(p.slots) == 2 and p.num_tokens > 2]
    late = chunks[len(chunks) // 2 : -1]
    assert max(worker.step_seconds(p) for p in late) < 0.12
    assert min(p.num_tokens for p in late) < CHUNK_FLOOR


def test_alone_prompts_may_take_longer() -> None:
    worker = big()
    worker.step_seconds = stepping(1e-3)
    engine = Engine(worker, budget=1024, target_step_ms=100.0)
    engine.add("long", [6] * 1900, max_tokens=1)
    engine.run()
    counts = [p.num_tokens for p in worker.plans]
    assert counts[0] == 128
    assert all(b <= 2 * a for a, b in pairwise(counts))
    assert 350 < max(counts) < 450


def test_more_decodes_than_budget_take_turns() -> None:
    engine = Engine(big(), budget=3)
    for i in range(8):
        engine.add(f"r{i}", [i + 2], ignore_eos=True, max_tokens=12)
    engine.run()
    assert all(len(engine.tokens(f"r{i}")) == 12 for i in range(8))
    assert max(p.num_tokens for p in engine.worker.plans) == 3


def test_prompts_are_admitted_although_decodes_could_eat_the_budget() -> None:
    engine = Engine(big(), budget=4)
    for i in range(4):
        engine.add(f"r{i}", [i + 2], ignore_eos=True, max_tokens=200)
    for _ in range(8):
        engine.step()
    engine.add("late", [9, 9], max_tokens=1)
    for _ in range(4):
        engine.step()
    assert engine.seen["late", 0].ends


def test_admission_looks_at_the_whole_need() -> None:
    # 20 blocks of 4; each request will have 40 tokens, 39 of them with KV: 10 blocks.
    engine = Engine(FakeWorker(num_blocks=21), budget=64)
    for i in range(4):
        engine.add(f"r{i}", [i + 2] * 4, ignore_eos=True, max_tokens=36)
    engine.step()
    assert engine.core.stats().running == 2
    engine.run()
    assert engine.core.stats().preemptions == 0
    engine.check_idle()


def test_expected_lengths_are_learned() -> None:
    engine = Engine(FakeWorker(num_blocks=600, max_model_len=400, max_num_seqs=4), budget=64)
    for i in range(80):
        engine.add(f"r{i}", [i % 40 + 2, 3, 4], max_tokens=390, stop_token_ids=list(range(0, 50, 2)))
    engine.run(5000)
    assert engine.core.life.output_length.mean < 20


def test_a_request_that_could_never_fit_says_so() -> None:
    engine = Engine(FakeWorker(num_blocks=5, max_model_len=64))
    engine.add("big", [2] * 17)
    engine.add("fits", [2] * 16, max_tokens=40, ignore_eos=True)
    engine.run()
    assert engine.seen["big", 0].reason == FinishReason.ERROR
    assert "17 tokens" in (engine.seen["big", 0].error or "")
    # The cache is the context limit here: 16 tokens with KV, and the one sampled after them.
    assert engine.seen["fits", 0].reason == FinishReason.LENGTH
    assert len(engine.tokens("fits")) == 1
    engine.check_idle()


def crowd(engine: Engine, count: int = 6, **options: object) -> None:
    """Requests that are let in together and do not fit together."""
    engine.core.life.output_length.mean = 1.0
    engine.core.life.output_length.weight = 0.0
    for i in range(count):
        engine.add(f"r{i}", [i + 2, 3, 4, 5], max_tokens=40, min_tokens=40, arrival_time=float(i), **options)


@pytest.mark.parametrize("inflight", [0, 1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_requests_finish_with_their_tokens(inflight: int, prefix_caching: bool) -> None:
    engine = Engine(FakeWorker(num_blocks=25), budget=64, inflight=inflight, prefix_caching=prefix_caching)
    crowd(engine)
    engine.run()
    stats = engine.core.stats()
    assert stats.preemptions > 0
    assert stats.recomputed_tokens > 0
    for i in range(6):
        seen = engine.seen[f"r{i}", 0]
        assert len(seen.tokens) == 40
        assert seen.times is not None
        assert seen.times.num_preemptions <= MOST_EVICTIONS + 6
    sampling = SamplingParams(seed=7, max_tokens=40, min_tokens=40)
    for i in range(6):
        assert engine.tokens(f"r{i}") == expected_tokens([i + 2, 3, 4, 5], sampling, eos=[EOS])
    engine.check_idle()


def test_under_pressure_the_more_important_are_kept() -> None:
    engine = Engine(FakeWorker(num_blocks=25), budget=64, policy="priority")
    engine.core.life.output_length.mean = 1.0
    engine.core.life.output_length.weight = 0.0
    for i in range(6):
        engine.add(f"r{i}", [i + 2, 3, 4, 5], max_tokens=40, min_tokens=40, arrival_time=float(i), priority=0 if i == 5 else 1)
    engine.run()
    times = {i: engine.seen[f"r{i}", 0].times for i in range(6)}
    assert times[5] is not None
    assert times[5].num_preemptions == 0, "last to come, but most important"
    assert sum(t.num_preemptions for t in times.values() if t) > 0


def test_cached_and_held_blocks_go_before_anybody_is_preempted() -> None:
    engine = Engine(FakeWorker(num_blocks=13), budget=64)
    engine.add("cached", [9] * 12, max_tokens=1)
    engine.run()
    engine.add("held", [8] * 12, max_tokens=1, hold=True)
    engine.run()
    assert engine.core.life.held
    engine.core.life.output_length.mean = 1.0
    engine.add("a", [2] * 4, max_tokens=18, min_tokens=18)
    engine.add("b", [3] * 4, max_tokens=18, min_tokens=18)
    engine.run()
    stats = engine.core.stats()
    assert stats.evictions > 0
    assert stats.preemptions == 0
    assert not engine.core.life.held
    assert len(engine.tokens("a")) == len(engine.tokens("b")) == 18


def test_a_lone_request_may_evict_its_own_old_blocks() -> None:
    """It does not read the cache, so when resumed it computes blocks that the cache has already."""
    engine = Engine(FakeWorker(num_blocks=13), budget=64)
    engine.core.life.output_length.mean = 1.0
    engine.core.life.output_length.weight = 0.0
    for name, token in (("a", 5), ("b", 6)):
        engine.add(name, [token] * 8, max_tokens=38, min_tokens=38, skip_reading_prefix_cache=True)
    engine.run()
    assert len(engine.tokens("a")) == len(engine.tokens("b")) == 38
    engine.check_idle()


def test_policy_orders_admission() -> None:
    engine = Engine(FakeWorker(max_num_seqs=1), policy="priority")
    for name, priority in (("low", 5), ("high", -1), ("middle", 2)):
        engine.add(name, [3, 4], max_tokens=1, priority=priority)
    engine.run()
    assert [name for name, _ in engine.seen] == ["high", "middle", "low"]


def test_fair_share_alternates_between_keys() -> None:
    engine = Engine(FakeWorker(max_num_seqs=1), policy="fair")
    for i in range(4):
        engine.add(f"a{i}", [3, 4, i + 5], max_tokens=3, ignore_eos=True, fair_key="a", arrival_time=float(i))
    for i in range(2):
        engine.add(f"b{i}", [4, 4, i + 5], max_tokens=3, ignore_eos=True, fair_key="b", arrival_time=float(10 + i))
    engine.run()
    assert [name for name, _ in engine.seen] == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_request_that_cannot_be_planned_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    match_cached = engine.core.kv.match_cached

    def broken(tokens, extra_key, most):  # type: ignore[no-untyped-def]
        if extra_key == "cursed":
            raise ZeroDivisionError("oops")
        return match_cached(tokens, extra_key, most)

    monkeypatch.setattr(engine.core.kv, "match_cached", broken)
    engine.add("good", [3, 4, 5], ignore_eos=True)
    engine.add("bad", [3, 4, 5], extra_key="cursed")
    engine.add("also good", [3, 4, 6], ignore_eos=True)
    engine.run()
    assert engine.seen["bad", 0].reason == FinishReason.ERROR
    assert "oops" in (engine.seen["bad", 0].error or "")
    assert len(engine.tokens("good")) == 8
    assert len(engine.tokens("also good")) == 8
    engine.check_idle()


def test_pairs_of_a_plan() -> None:
    engine = Engine()
    engine.add("a", [3, 4, 5], max_tokens=3, ignore_eos=True)
    engine.run()
    assert [plan_pairs(p) for p in engine.worker.plans] == [1 + 2 + 3, 4, 5]


@pytest.mark.parametrize("inflight", [0, 1])
def test_a_burst_behind_one_prefix_computes_it_once(inflight: int) -> None:
    engine = Engine(big(), budget=64, inflight=inflight)
    shared = [3 + i % 40 for i in range(40)]
    for i in range(8):
        engine.add(f"r{i}", [*shared, 2 + i, 9, 9, 9], max_tokens=2, ignore_eos=True)
    engine.run()
    assert [engine.seen[f"r{i}", 0].cached for i in range(8)] == [0] + [40] * 7


def test_nobody_waits_for_a_prefix_that_will_not_be_shared() -> None:
    shared = [3 + i % 40 for i in range(40)]
    for options in ({"extra_key": "other"}, {"skip_reading_prefix_cache": True}):
        engine = Engine(big(), budget=128)
        engine.add("leader", [*shared, 2], max_tokens=2)
        engine.add("other", [*shared, 9], max_tokens=2, **options)
        engine.step()
        assert engine.worker.plans[0].num_tokens == 82, options
