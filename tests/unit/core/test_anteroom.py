"""Requests that wait for something the worker gets ready: the others go on, and they are aborted like any other."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from octavo.protocol.engine import FinishReason
from octavo.protocol.params import SamplingParams
from tests.support.core_engine import EOS, Engine, new_request
from tests.support.fake_worker import expected_tokens

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def future() -> Future[None]:
    return Future()


@pytest.fixture
def engine(future: Future[None]) -> Engine:
    """Requests with a frequency penalty have to wait for the future."""
    engine = Engine()
    engine.core._getting_ready = lambda sampling: future if sampling.frequency_penalty and not future.done() else None
    return engine


def test_the_others_go_on(engine: Engine, future: Future[None]) -> None:
    engine.add("waits", PROMPT, max_tokens=4, frequency_penalty=1.0, ignore_eos=True)
    engine.add("a", PROMPT, max_tokens=3, ignore_eos=True)
    for _ in range(6):
        engine.step()
    assert len(engine.tokens("a")) == 3
    assert ("waits", 0) not in engine.seen or not engine.tokens("waits")
    assert engine.core.has_work() and engine.core.stats().waiting == 1
    future.set_result(None)
    engine.run()
    wanted = SamplingParams(seed=7, max_tokens=4, frequency_penalty=1.0, ignore_eos=True)
    assert engine.tokens("waits") == expected_tokens(PROMPT, wanted, eos=[EOS])
    assert not engine.core.has_work()
    engine.check_idle()


def test_what_cannot_be_got_ready_is_refused_with_its_reason_and_the_others_go_on(engine: Engine, future: Future[None]) -> None:
    engine.core._getting_ready = lambda sampling: future if sampling.frequency_penalty else None
    engine.add("waits", PROMPT, max_tokens=2, frequency_penalty=1.0, ignore_eos=True, n=2)
    engine.add("a", PROMPT, max_tokens=3, ignore_eos=True)
    engine.step()
    future.set_exception(ImportError("no such module"))
    engine.add("later", PROMPT, max_tokens=2, frequency_penalty=1.0, ignore_eos=True)  # it does not wait for what has failed
    engine.run()
    assert len(engine.tokens("a")) == 3
    for name, index in (("waits", 0), ("waits", 1), ("later", 0)):
        seen = engine.seen[name, index]
        assert (seen.tokens, seen.reason, seen.error) == ([], FinishReason.ERROR, "no such module")
    assert not engine.core.has_work() and engine.core.stats().rejected == 2
    engine.check_idle()


@pytest.mark.parametrize("index", [None, 1])
def test_abort_while_waiting(engine: Engine, index: int | None) -> None:
    engine.add("waits", PROMPT, max_tokens=2, frequency_penalty=1.0, ignore_eos=True, n=2)
    engine.step()
    engine.abort("waits", index=index)
    deltas = engine.step()
    ended = {delta.index for delta in deltas if delta.finish_reason is FinishReason.ABORT}
    assert ended == ({0, 1} if index is None else {1})
    engine.run()
    engine.check_idle()


def test_an_id_that_comes_twice_is_refused_once_both_are_in(engine: Engine, future: Future[None]) -> None:
    engine.add("waits", PROMPT, max_tokens=2, frequency_penalty=1.0, ignore_eos=True)
    engine.core.add(new_request("waits", PROMPT, max_tokens=2, frequency_penalty=1.0, ignore_eos=True))
    future.set_result(None)
    deltas = [delta for _ in range(8) for delta in engine.core.step().deltas]
    reasons = [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
    assert sorted(reasons) == sorted([FinishReason.LENGTH, FinishReason.ERROR])
