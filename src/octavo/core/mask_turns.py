"""When masks are computed: with the step they are for, or, where they take long, beside the steps of others.

A mask takes some 50 us, and steps wait for those of their rows. One of an ambiguous grammar may take a thousand times as long, at every
token. Such a row sits out until its mask is ready: a thread of low priority computes it, one at a time for all of them, while the others
go on. So however many such requests there are, they share the time of one thread. Tokens are the same either way.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from octavo.grammar.compiler import PARALLEL_FROM, GrammarCompiler, Words

if TYPE_CHECKING:
    from octavo.core.constraint import Constraint

SLOW_SECONDS = 0.004
"""Time of the masks of a sequence, those before the last counted less and less, from which they are computed beside the steps."""
DECAY = 0.9
NICE = 5
"""How much the thread for slow masks yields to the rest of the engine."""


class MaskTurns:
    """Computes masks for one engine core, whose thread makes every call."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._thread: ThreadPoolExecutor | None = None
        self._pending: set[Future[Words]] = set()
        self._patience = SLOW_SECONDS
        """Time of masks computed together, from which the next are timed one by one."""
        self._suspicious = False

    @property
    def num_pending(self) -> int:
        """Masks that are being computed beside the steps, or wait for it."""
        self._pending = {future for future in self._pending if not future.done()}
        return len(self._pending)

    def has(self, constraint: Constraint) -> bool:
        """Whether the mask of a sequence can be had without holding up a step; if not, it is begun."""
        if not constraint.slow or not constraint.follows_grammar:
            return True
        if constraint.later is None:
            if self._compiler.scarce:
                return True  # its step will be told
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "octavo-mask", initializer=_yield_to_others)
            constraint.later = self._thread.submit(_mask, constraint, self._compiler.num_words)
            self._pending.add(constraint.later)
        return constraint.later.done()

    def wait(self, seconds: float) -> None:
        """Until one of the pending masks is ready, but not longer."""
        if self.num_pending:
            concurrent.futures.wait(self._pending, timeout=seconds, return_when=concurrent.futures.FIRST_COMPLETED)

    def fill(self, rows: list[tuple[Constraint, int]], words: Words) -> None:
        """Write masks now.

        Args:
            rows: constraints whose grammar has the say, each with its row of `words` [rows, num_words].
        """
        now: list[tuple[Constraint, int]] = []
        for constraint, row in rows:
            if constraint.later is None:
                now.append((constraint, row))
            else:
                words[row] = constraint.later.result()
                constraint.later = None
        if len(now) < PARALLEL_FROM or self._suspicious:
            self._fill_each(now, words)
            return
        for constraint, _ in now:
            constraint.catch_up()
        begun = time.perf_counter()
        self._compiler.fill([(constraint.matcher, row) for constraint, row in now if constraint.matcher is not None], words)
        seconds = time.perf_counter() - begun
        self._suspicious = seconds > self._patience
        self._patience = max(SLOW_SECONDS, 0.99 * self._patience)

    def _fill_each(self, rows: list[tuple[Constraint, int]], words: Words) -> None:
        """One by one, each timed."""
        total, any_slow = 0.0, False
        for constraint, row in rows:
            seconds = constraint.fill(words[row])
            total += seconds
            any_slow |= constraint.slow
        if self._suspicious:
            self._suspicious = False
            if not any_slow:  # it is only that they are many: they are not to be timed all the time
                self._patience = max(self._patience, 2 * total)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None


def _mask(constraint: Constraint, num_words: int) -> Words:
    words: Words = np.zeros(num_words, np.int32)
    constraint.fill(words)
    if not constraint.problem():
        constraint.narrow(words)  # which computes masks too
        constraint.narrowed = constraint.restriction is not None
    return words


def _yield_to_others() -> None:
    if sys.platform == "linux":  # where priorities are those of threads
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
