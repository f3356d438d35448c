"""Requests that wait for a grammar: they hold nobody up, can be aborted, fail alone, and leave nothing behind."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from octavo.errors import NO_MEMORY
from octavo.grammar.compiler import LEAST_ROOM, GrammarCompiler, Matcher, Words
from octavo.protocol.engine import FinishReason, Vocabulary
from octavo.protocol.params import OutputConstraint
from tests.support.core_engine import EOS, Engine
from tests.support.fake_worker import FakeWorker

ANY = OutputConstraint(grammar="start: /x*/")
"""Every token of the test vocabulary is an x."""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Grammars are compiled when this is set."""
    go = threading.Event()
    compile_now = GrammarCompiler.compile

    def compile_later(self: GrammarCompiler, source: str, cost: int) -> Future[Any]:
        real, later = compile_now(self, source, cost), Future[Any]()

        def wait() -> None:
            go.wait(10)
            try:
                later.set_result(real.result())
            except Exception as error:
                later.set_exception(error)

        threading.Thread(target=wait, daemon=True).start()
        return later

    monkeypatch.setattr(GrammarCompiler, "compile", compile_later)
    return go


@pytest.mark.parametrize("inflight", [0, 1])
def test_a_request_that_waits_holds_nobody_up(slow: threading.Event, inflight: int) -> None:
    engine = Engine(inflight=inflight)
    engine.add("grammar", [3] * 5, max_tokens=4, ignore_eos=True, constraint=ANY)
    engine.add("plain", [4] * 5, max_tokens=6, ignore_eos=True)
    while not engine.seen.get(("plain", 0)) or not engine.seen["plain", 0].ends:
        engine.step()
    assert ("grammar", 0) not in engine.seen
    assert engine.core.has_work()
    slow.set()
    engine.run()
    assert len(engine.tokens("grammar")) == 4
    assert engine.seen["grammar", 0].error is None
    engine.check_idle()


def test_waiting_for_long_is_not_being_stuck(slow: threading.Event) -> None:
    engine = Engine()
    engine.add("a", [3] * 5, max_tokens=2, ignore_eos=True, constraint=ANY)
    for _ in range(50):
        engine.step()
    assert not engine.seen
    slow.set()
    engine.run()
    assert engine.seen["a", 0].reason is FinishReason.LENGTH


@pytest.mark.parametrize("index", [None, 0, 1])
def test_aborted_while_it_waits(slow: threading.Event, index: int | None) -> None:
    engine = Engine()
    engine.add("a", [3] * 5, n=3, max_tokens=3, ignore_eos=True, constraint=ANY)
    engine.step()
    engine.abort("a", index=index)
    engine.step()
    slow.set()
    engine.run()
    for i in range(3):
        aborted = index in (None, i)
        assert engine.seen["a", i].reason is (FinishReason.ABORT if aborted else FinishReason.LENGTH)
        assert len(engine.seen["a", i].tokens) == (0 if aborted else 3)
    engine.check_idle()


def test_a_grammar_that_is_ready_while_it_is_asked_about_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_now = GrammarCompiler.compile

    class LateFuture(Future[Any]):
        """Done for everyone who asks after the first."""

        asked = 0

        def done(self) -> bool:
            self.asked += 1
            return self.asked > 1

    def compile_later(self: GrammarCompiler, source: str, cost: int) -> Future[Any]:
        late = LateFuture()
        late.set_result(compile_now(self, source, cost).result())
        return late

    monkeypatch.setattr(GrammarCompiler, "compile", compile_later)
    engine = Engine()
    engine.add("a", [3] * 5, n=2, max_tokens=3, ignore_eos=True, constraint=ANY)
    engine.run()
    assert all(engine.seen["a", i].reason is FinishReason.LENGTH for i in range(2))
    engine.check_idle()


def test_a_grammar_that_cannot_be_compiled_fails_every_sibling_and_nobody_else() -> None:
    engine = Engine()
    engine.add("bad", [3] * 5, n=3, max_tokens=3, constraint=OutputConstraint(grammar="start: nothing"))
    engine.add("good", [3] * 5, max_tokens=3, ignore_eos=True)
    engine.run()
    for i in range(3):
        assert engine.seen["bad", i].reason is FinishReason.ERROR
        assert "nothing" in (engine.seen["bad", i].error or "")
    assert len(engine.tokens("good")) == 3
    engine.check_idle()


def test_no_vocabulary_is_an_error_of_the_request() -> None:
    engine = Engine()
    engine.core.set_vocabulary(Vocabulary([], [], [EOS]))
    engine.add("a", [3] * 5, max_tokens=3, constraint=ANY)
    engine.run()
    assert "vocabulary" in (engine.seen["a", 0].error or "")
    engine.check_idle()


def test_a_token_that_the_grammar_forbids_fails_the_request() -> None:
    """Workers obey masks; one that does not must not be believed."""
    engine = Engine()
    engine.core.set_vocabulary(Vocabulary([b"x"] * 64, [], [EOS]))
    engine.add("a", [3] * 5, max_tokens=9, ignore_eos=True, constraint=OutputConstraint(grammar='start: "xx"'))
    engine.run()
    assert engine.seen["a", 0].reason in (FinishReason.ERROR, FinishReason.STOP)
    assert len(engine.seen["a", 0].tokens) <= 3
    engine.check_idle()


@pytest.mark.parametrize("inflight", [0, 1, 2])
def test_a_constrained_row_gets_a_token_in_every_step(inflight: int) -> None:
    engine = Engine(inflight=inflight)
    engine.add("a", [3] * 5, max_tokens=10, ignore_eos=True, constraint=ANY)
    engine.add("b", [4] * 5, max_tokens=60, ignore_eos=True)
    engine.run()
    assert len(engine.tokens("a")) == 10
    assert engine.seen["b", 0].error is None
    masked = [i for i, plan in enumerate(engine.worker.plans) if plan.masks is not None]
    assert masked == list(range(masked[0], masked[0] + 10))


def test_a_resumed_request_goes_on_in_its_grammar() -> None:
    engine = Engine()
    engine.add("a", [3] * 5, output_token_ids=[7, 8], max_tokens=6, ignore_eos=True, constraint=OutputConstraint(grammar="start: /x{6}/"))
    engine.run()
    assert engine.seen["a", 0].error is None
    assert len(engine.tokens("a")) == 4


@pytest.fixture
def slow_masks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Masks of grammars take 20 ms. Returns the threads that computed them."""
    threads: list[int] = []
    fill_now = Matcher.fill

    def fill(self: Matcher, words: Words) -> None:
        time.sleep(0.02)
        threads.append(threading.get_ident())
        fill_now(self, words)

    monkeypatch.setattr(Matcher, "fill", fill)
    return threads


@pytest.mark.parametrize("inflight", [0, 1, 2])
def test_slow_masks_hold_nobody_up(slow_masks: list[int], inflight: int) -> None:
    """Two sequences with slow masks beside a plain one, which gets its tokens in the time of one mask or so."""
    engine = Engine(inflight=inflight)
    for name in "ab":
        engine.add(name, [3] * 5, max_tokens=12, ignore_eos=True, constraint=ANY)
    while not all(engine.seen.get((name, 0)) and engine.tokens(name) for name in "ab"):
        engine.step()
    engine.add("plain", [4] * 5, max_tokens=50, ignore_eos=True)
    while not engine.seen.get(("plain", 0)) or not engine.seen["plain", 0].ends:
        engine.step()
    assert all(len(engine.seen[name, 0].tokens) < 12 for name in "ab")
    engine.run()
    for name in "ab":
        assert len(engine.tokens(name)) == 12
        assert engine.seen[name, 0].error is None
    assert len(engine.tokens("plain")) == 50
    assert slow_masks.count(threading.get_ident()) <= 4  # before they were known to be slow
    engine.check_idle()


def test_tokens_are_the_same_with_slow_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[list[int]]:
        engine = Engine()
        for i in range(6):
            engine.add(f"r{i}", [3 + i] * 5, max_tokens=9, seed=i, temperature=1.0, constraint=OutputConstraint(grammar="start: /x{0,7}/"))
        engine.run()
        return [engine.tokens(f"r{i}") for i in range(6)]

    usual = run()
    monkeypatch.setattr("octavo.core.constraint.SLOW_SECONDS", -1.0)
    assert run() == usual


def test_aborting_and_failing_with_slow_masks(slow_masks: list[int]) -> None:
    engine = Engine()
    engine.core.set_vocabulary(Vocabulary([b"x"] * 64, [], [EOS]))
    engine.add("gone", [3] * 5, max_tokens=12, ignore_eos=True, constraint=ANY)
    engine.add("wrong", [3] * 5, max_tokens=12, ignore_eos=True, constraint=OutputConstraint(grammar='start: "xxxxx"'))
    while not engine.seen.get(("gone", 0)) or len(engine.seen["gone", 0].tokens) < 3:
        engine.step()
    engine.abort("gone")
    engine.run()
    assert engine.seen["gone", 0].reason is FinishReason.ABORT
    assert engine.seen["wrong", 0].reason in (FinishReason.ERROR, FinishReason.STOP)
    assert len(engine.seen["wrong", 0].tokens) <= 6
    engine.check_idle()


def test_many_usual_masks_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they may take longer than one slow one: they are timed one by one now and then, and stay where they are."""
    together: list[int] = []
    fill_now = GrammarCompiler.fill

    def fill(self: GrammarCompiler, matchers: Any, words: Words) -> None:
        time.sleep(0.01)
        together.append(len(matchers))
        fill_now(self, matchers, words)

    monkeypatch.setattr(GrammarCompiler, "fill", fill)
    engine = Engine()
    for i in range(8):
        engine.add(f"r{i}", [3] * 5, max_tokens=20, ignore_eos=True, constraint=ANY)
    engine.run()
    assert not engine.core.batch.slow.any()
    assert together.count(8) >= 8


@pytest.mark.parametrize("tries", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_scarce_addresses_end_constrained_requests_alone(monkeypatch: pytest.MonkeyPatch, begun: bool, tries: bool) -> None:
    """The grammar engine ends the process where it is refused memory: it is asked nothing then, and asked again once there is some."""
    scarce = not begun
    monkeypatch.setattr("octavo.config.address_space.lacks", lambda needed: scarce and needed >= LEAST_ROOM)
    engine = Engine(FakeWorker(tries=tries))
    for name in "ab":
        engine.add(name, [3] * 5, max_tokens=12, ignore_eos=True, constraint=ANY)
    engine.add("plain", [4] * 5, max_tokens=12, ignore_eos=True)
    if begun:
        while not all(engine.seen.get((name, 0)) and engine.tokens(name) for name in "ab"):
            engine.step()
        scarce = True
    engine.run()
    assert [engine.seen[name, 0].error for name in "ab"] == [NO_MEMORY] * 2
    assert len(engine.tokens("plain")) == 12
    scarce = False
    engine.add("again", [3] * 5, max_tokens=12, ignore_eos=True, constraint=ANY)
    engine.run()
    assert len(engine.tokens("again")) == 12
    engine.check_idle()
