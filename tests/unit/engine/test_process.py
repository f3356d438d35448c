"""The loop of the engine process, with a mailbox and an engine that write down what is asked of them."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.engine.process import seconds_alive, serve
from octavo.protocol.engine import AbortRequests, Shutdown, StepOutputs


class Mailbox:
    """Gives what is in `inbox`, and None where that has one. A blocking call on nothing would wait for ever: it ends the loop."""

    def __init__(self, inbox: list[Any]) -> None:
        self.inbox = deque(inbox)
        self.blocked = 0
        self.sent: list[Any] = []

    def receive(self, *, block: bool) -> Any:
        if block:
            self.blocked += 1
        if not self.inbox:
            return Shutdown() if block else None
        return self.inbox.popleft()

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Engine:
    def __init__(self, steps: int, pieces: int) -> None:
        self.steps, self.pieces, self.log = steps, pieces, list[str]()

    def has_work(self) -> bool:
        return self.steps > 0

    def step(self) -> StepOutputs:
        self.steps -= 1
        self.log.append("step")
        return StepOutputs([], SimpleNamespace())  # type: ignore[arg-type]

    def prepare(self) -> bool:
        self.pieces -= 1
        self.log.append("busy" if self.has_work() else "idle")
        return self.pieces > 0

    def abort(self, message: AbortRequests) -> None:
        self.log.append("abort")


def play(engine: Engine, inbox: list[Any]) -> Mailbox:
    mailbox = Mailbox(inbox)
    serve(engine, mailbox)  # type: ignore[arg-type]
    return mailbox


def test_what_is_left_to_prepare_is_done_before_the_loop_waits() -> None:
    engine = Engine(steps=0, pieces=3)
    mailbox = play(engine, [])
    assert engine.log == ["idle", "idle", "idle"]
    assert mailbox.blocked == 1


def test_messages_come_between_pieces_and_steps_go_on() -> None:
    engine = Engine(steps=2, pieces=4)
    mailbox = play(engine, [None, AbortRequests(["a"]), None, None])
    assert engine.log == ["step", "busy", "abort", "step", "idle", "idle", "idle"]
    assert len(mailbox.sent) == 2
    assert mailbox.blocked == 1


def test_nothing_to_prepare_means_no_more_questions() -> None:
    engine = Engine(steps=3, pieces=1)
    play(engine, [])
    assert engine.log == ["step", "busy", "step", "step"]


def test_the_age_of_the_process_is_that_of_the_test_run() -> None:
    assert 0 < seconds_alive() < 24 * 3600
    assert seconds_alive() == pytest.approx(seconds_alive(), abs=5)
