"""Checks grammars of requests, in a process of `frontend.jobs`."""

from __future__ import annotations

import msgspec

from octavo.frontend.jobs.worker import Answer
from octavo.grammar.check import Checker, answer_check, job_of
from octavo.grammar.stack import on_deep_stack
from octavo.protocol.engine import Vocabulary


def open_room(setup: bytes) -> Answer:
    """The setup: the vocabulary, or nil."""
    checker = Checker(msgspec.msgpack.decode(setup, type=Vocabulary | None))

    def answer(job: bytes) -> bytes:
        return msgspec.msgpack.encode(on_deep_stack(answer_check, checker, job_of(job)))

    return answer
