from typing import Any

import pytest

from octavo.core.lifecycle import MOST_SIBLINGS
from octavo.core.request import RequestState
from octavo.protocol.engine import FinishReason
from octavo.protocol.params import SamplingParams
from tests.support.core_engine import EOS, Engine, new_request
from tests.support.fake_worker import FakeWorker, expected_tokens

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def alone(prompt: list[int], index: int = 0, **sampling: Any) -> list[int]:
    sampling.setdefault("seed", 7)
    sampling.setdefault("max_tokens", 8)
    return expected_tokens(prompt, SamplingParams(**sampling), index=index, eos=[EOS])


def computed(engine: Engine) -> int:
    """Tokens that went through the model."""
    return sum(p.num_tokens for p in engine.worker.plans)


# Arrival


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [3] * 64}, "64 tokens"),
        ({"prompt_token_ids": [3, -1]}, "negative"),
        ({"prompt_token_ids": [2**40]}, "could not be read"),
        ({"prompt_token_ids": [3, "x"]}, "could not be read"),
        ({"output_token_ids": [-5]}, "negative"),
    ],
)
def test_what_cannot_be_served_ends_with_a_reason(change: dict[str, Any], says: str) -> None:
    engine = Engine()
    good = engine.add("good", PROMPT)
    request = engine.add("spare", PROMPT, max_tokens=1)
    request.request_id = "bad"
    for name, value in change.items():
        setattr(request, name, value)
    engine.core.add(request)
    engine.run()
    assert engine.seen["bad", 0].reason == FinishReason.ERROR
    assert says in (engine.seen["bad", 0].error or "")
    assert engine.tokens("good") == alone(good.prompt_token_ids)
    assert engine.core.stats().rejected == 1
    engine.check_idle()


def test_an_absurd_n_is_refused_without_making_the_siblings() -> None:
    engine = Engine()
    request = new_request("a", PROMPT)
    request.sampling.n = 10**12  # SamplingParams refuses it; the core does not rely on that
    engine.core.add(request)
    engine.run()
    assert len(engine.seen) == MOST_SIBLINGS
    assert "n must be at most" in (engine.seen["a", 0].error or "")


def test_a_duplicate_id_is_refused_and_the_first_goes_on() -> None:
    engine = Engine()
    engine.add("a", PROMPT)
    engine.add("a", [3, 4])
    deltas = engine.core.step().deltas
    assert [d.finish_reason for d in deltas if d.error] == [FinishReason.ERROR]
    tokens = [t for d in deltas for t in d.token_ids]
    while engine.core.has_work():
        tokens += [t for d in engine.core.step().deltas for t in d.token_ids]
    assert tokens == alone(PROMPT)
    engine.add("a", PROMPT)
    assert engine.core.life.num_live == 1, "an id can be used again after its end"


def test_siblings_of_one_id_may_arrive_one_by_one() -> None:
    engine = Engine()
    for index in (0, 1):
        full = alone(PROMPT, index, ignore_eos=True)
        engine.add("a", PROMPT, index=index, output_token_ids=full[:3], ignore_eos=True)
    engine.run()
    for index in (0, 1):
        assert engine.tokens("a", index) == alone(PROMPT, index, ignore_eos=True)[3:]


def test_a_resumed_request_counts_its_old_tokens() -> None:
    full = alone(PROMPT, ignore_eos=True)
    engine = Engine()
    engine.add("a", PROMPT, output_token_ids=full[:7], ignore_eos=True)
    engine.add("done", PROMPT, output_token_ids=full, ignore_eos=True)
    engine.add("stopped", PROMPT, output_token_ids=[4, EOS])
    engine.add("stop id", PROMPT, output_token_ids=[4, 9], stop_token_ids=[9])
    engine.add("too early", PROMPT, output_token_ids=[EOS], min_tokens=2, max_tokens=3)
    engine.run()
    assert engine.tokens("a") == full[7:]
    for name, reason, stop in (
        ("done", FinishReason.LENGTH, None),
        ("stopped", FinishReason.STOP, None),
        ("stop id", FinishReason.STOP, 9),
    ):
        seen = engine.seen[name, 0]
        assert (seen.tokens, seen.reason, seen.stop_reason) == ([], reason, stop)
    assert len(engine.tokens("too early")) >= 1
    engine.check_idle()


def test_a_resumed_request_with_several_siblings_is_refused() -> None:
    engine = Engine()
    engine.add("a", PROMPT, output_token_ids=[4], n=2)
    engine.run()
    assert {s.reason for s in engine.seen.values()} == {FinishReason.ERROR}
    assert len(engine.seen) == 2


# Siblings


@pytest.mark.parametrize("inflight", [0, 1])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 8, 10])
def test_siblings_compute_the_prompt_once(inflight: int, prefix_caching: bool, length: int) -> None:
    engine = Engine(inflight=inflight, prefix_caching=prefix_caching)
    prompt = PROMPT[:length]
    engine.add("a", prompt, n=4, ignore_eos=True)
    engine.run()
    for index in range(4):
        assert engine.tokens("a", index) == alone(prompt, index, ignore_eos=True)
    # The prompt, its last token again for each other sibling, and 7 decodes each.
    assert computed(engine) == length + 3 + 4 * 7
    engine.check_idle()
    assert engine.core.stats().prompt_tokens == length


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_more_siblings_than_slots_still_share_a_leader_that_has_ended(prefix_caching: bool) -> None:
    engine = Engine(FakeWorker(max_num_seqs=2), prefix_caching=prefix_caching)
    engine.add("a", PROMPT, n=5, max_tokens=3, ignore_eos=True)
    engine.run()
    for index in range(5):
        assert engine.tokens("a", index) == alone(PROMPT, index, max_tokens=3, ignore_eos=True)
    assert computed(engine) == 10 + 4 + 5 * 2
    assert not engine.core.life.held
    engine.check_idle()


def test_siblings_report_what_the_prompt_found_in_the_cache() -> None:
    engine = Engine()
    engine.add("warm", PROMPT, max_tokens=1)
    engine.run()
    engine.add("a", PROMPT, n=3, ignore_eos=True)
    engine.run()
    assert [engine.seen["a", i].cached for i in range(3)] == [9, 9, 9]
    stats = engine.core.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (20, 9)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("inflight", [0, 1])
@pytest.mark.parametrize("index", [0, 1])
def test_one_sibling_can_be_aborted_at_any_time(turns: int, inflight: int, index: int) -> None:
    engine = Engine(FakeWorker(max_num_seqs=2), budget=4, inflight=inflight)
    engine.add("a", PROMPT, n=3, ignore_eos=True)
    for _ in range(turns):
        engine.step()
    engine.abort("a", index=index)
    engine.run()
    assert engine.seen["a", index].reason == FinishReason.ABORT
    for other in {0, 1, 2} - {index}:
        assert engine.tokens("a", other) == alone(PROMPT, other, ignore_eos=True)
    engine.check_idle()


def test_a_failed_leader_is_succeeded() -> None:
    worker = FakeWorker(max_num_seqs=4)
    worker.row_errors = lambda plan: {0: "Broken."} if plan.step_id == 0 else {}
    engine = Engine(worker, budget=8)
    engine.add("a", PROMPT, n=3, ignore_eos=True)
    engine.run()
    assert engine.seen["a", 0].error == "Broken."
    for index in (1, 2):
        assert engine.tokens("a", index) == alone(PROMPT, index, ignore_eos=True)
    engine.check_idle()


# Aborts


@pytest.mark.parametrize("inflight", [0, 1, 2])
@pytest.mark.parametrize("turns", [0, 1, 2, 4, 6])
def test_an_abort_frees_everything_in_every_state(inflight: int, turns: int) -> None:
    engine = Engine(FakeWorker(max_num_seqs=2), budget=6, inflight=inflight)
    for name in "abc":
        engine.add(name, [ord(name), *PROMPT], ignore_eos=True, max_tokens=20)
    for _ in range(turns):
        engine.step()
    engine.abort("a", "b", "c", "unknown")
    engine.abort("a")
    engine.run()
    assert [engine.seen[n, 0].reason for n in "abc"] == [FinishReason.ABORT] * 3
    engine.check_idle()


# Held requests


def test_children_fork_from_a_held_parent() -> None:
    for prefix_caching in (True, False):
        engine = Engine(prefix_caching=prefix_caching)
        engine.add("parent", PROMPT, max_tokens=1, hold=True)
        engine.run()
        before = computed(engine)
        base = [*PROMPT, *engine.tokens("parent")]
        for token in (20, 21):
            engine.add(f"child {token}", [*base, token], max_tokens=2, ignore_eos=True, parent_id="parent")
        engine.run()
        engine.release("parent")
        for token in (20, 21):
            assert engine.tokens(f"child {token}") == alone([*base, token], max_tokens=2, ignore_eos=True)
            assert engine.seen[f"child {token}", 0].cached == 10
        # Two new tokens of the prompt and one decode, each.
        assert computed(engine) - before == 2 * (2 + 1)
        engine.check_idle()


def test_a_child_shares_as_far_as_the_tokens_agree() -> None:
    engine = Engine(prefix_caching=False)
    engine.add("parent", PROMPT, max_tokens=1, hold=True)
    engine.run()
    engine.add("child", [*PROMPT[:6], 40, 41], max_tokens=1, parent_id="parent")
    engine.run()
    assert engine.seen["child", 0].cached == 6
    assert engine.tokens("child") == alone([*PROMPT[:6], 40, 41], max_tokens=1)


def test_held_blocks_are_kept_until_released() -> None:
    engine = Engine(prefix_caching=False)
    engine.add("parent", PROMPT, max_tokens=1, hold=True)
    engine.run()
    assert engine.core.stats().kv_blocks_used == 3
    assert engine.core.stats().kv_tokens_live == 10
    engine.release("unknown")
    engine.release("parent")
    assert engine.core.stats().kv_blocks_used == 0
    engine.check_idle()


@pytest.mark.parametrize("how", ["abort", "release early", "abort running"])
def test_held_requests_do_not_leak(how: str) -> None:
    engine = Engine(inflight=1)
    engine.add("parent", PROMPT, max_tokens=4, hold=True, ignore_eos=True)
    engine.step()
    engine.step()
    if how == "abort running":
        engine.abort("parent")
    if how == "release early":
        engine.release("parent")
    engine.run()
    if how == "abort":
        (held,) = engine.core.life.held
        assert held.state is RequestState.HELD
        engine.abort("parent")
    assert not engine.core.life.held
    engine.check_idle()


def test_releasing_siblings_while_others_still_wait() -> None:
    engine = Engine(FakeWorker(max_num_seqs=2))
    engine.add("a", PROMPT, n=6, max_tokens=3, ignore_eos=True, hold=True)
    while ("a", 1) not in engine.seen or not engine.seen["a", 1].ends:
        engine.step()
    engine.release("a")
    engine.run()
    assert not engine.core.life.held
    engine.check_idle()


def test_a_child_does_not_fork_from_what_a_parent_is_only_about_to_copy() -> None:
    engine = Engine()
    engine.add("warm", PROMPT, max_tokens=1)
    engine.run()
    engine.add("parent", [*PROMPT[:7], 20, 21], max_tokens=9, ignore_eos=True)
    engine.add("child", [*PROMPT[:7], 20, 22], max_tokens=3, ignore_eos=True, parent_id="parent", skip_reading_prefix_cache=True)
    engine.run()
    assert engine.seen["parent", 0].cached == 7
    assert engine.seen["child", 0].cached == 4, "the full block is shared; the copy does not exist yet"
    assert engine.tokens("child") == alone([*PROMPT[:7], 20, 22], max_tokens=3, ignore_eos=True)


def test_the_id_of_a_held_request_is_in_use() -> None:
    engine = Engine()
    engine.add("parent", PROMPT, max_tokens=1, hold=True)
    engine.run()
    engine.add("parent", PROMPT)
    assert "in use" in (engine.core.step().deltas[0].error or "")


def test_a_parent_given_up_under_pressure_is_recomputed() -> None:
    engine = Engine(FakeWorker(num_blocks=13), prefix_caching=False)
    engine.add("parent", PROMPT, max_tokens=1, hold=True)
    engine.run()
    base = [*PROMPT, *engine.tokens("parent")]
    engine.add("big", [30] * 20, max_tokens=25, ignore_eos=True)
    engine.run()
    assert not engine.core.life.held
    engine.add("child", [*base, 20], max_tokens=2, ignore_eos=True, parent_id="parent")
    engine.run()
    assert engine.tokens("child") == alone([*base, 20], max_tokens=2, ignore_eos=True)
    assert engine.seen["child", 0].cached == 0


# Cache


def test_the_prefix_cache_is_exact_to_the_token() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=4, ignore_eos=True)
    engine.run()
    turn_two = [*PROMPT, *engine.tokens("a")[:3], 30, 31]
    engine.add("b", turn_two, max_tokens=2)
    engine.add("c", PROMPT[:7], max_tokens=2)
    engine.add("d", PROMPT, max_tokens=2, extra_key="salt")
    engine.add("e", PROMPT, max_tokens=2, skip_reading_prefix_cache=True)
    engine.run()
    assert [engine.seen[n, 0].cached for n in "bcde"] == [13, 6, 0, 0]


def test_a_reset_forgets_everything_even_while_requests_run() -> None:
    engine = Engine()
    engine.add("old", PROMPT, max_tokens=2)
    engine.add("held", [30, *PROMPT], max_tokens=1, hold=True)
    engine.run()
    engine.add("running", [40, *PROMPT], max_tokens=12, ignore_eos=True)
    engine.step()
    engine.step()
    assert engine.core.reset_prefix_cache()
    assert engine.core.stats().kv_blocks_cached == 0
    engine.run()
    engine.add("child", [30, *PROMPT, 4, 4, 4, 4], max_tokens=1, parent_id="held")
    engine.run()
    engine.release("held")
    for name, first in (("x", []), ("y", [30]), ("z", [40])):
        engine.add(name, [*first, *PROMPT, 45], max_tokens=1)
        engine.run()
        assert engine.seen[name, 0].cached == 0
    assert engine.tokens("running") == alone([40, *PROMPT], max_tokens=12, ignore_eos=True)
    engine.check_idle()
