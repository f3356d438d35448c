"""Requests that have come, but for which the worker must get something ready that takes longer than a step."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from octavo.protocol.engine import NewRequest
from octavo.protocol.params import SamplingParams

WAIT_SECONDS = 0.002
"""How long a turn with nothing else to do waits for it."""

GettingReady = Callable[[SamplingParams], "Future[Any] | None"]
"""What requests with these parameters wait for; None: nothing. Where it fails, its exception says to the user why they are not served."""


def nothing_first(sampling: SamplingParams) -> None:
    """For workers that are ready for everything."""


class Anteroom:
    """Keeps requests in the order they came."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Future[Any], NewRequest]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def keep(self, future: Future[Any], new: NewRequest) -> None:
        self._waiting.append((future, new))

    def leave(self, *, wait: bool) -> list[tuple[NewRequest, str | None]]:
        """Those that need not wait any more, each with why it cannot be served, where what it waited for failed.

        Args:
            wait: for a moment, if there are none.
        """
        if wait and self._waiting:
            concurrent.futures.wait([future for future, _ in self._waiting], WAIT_SECONDS, concurrent.futures.FIRST_COMPLETED)
        return [(new, _problem(future)) for future, new in self._take(lambda future, _: future.done())]

    def call(self, request_id: str) -> list[NewRequest]:
        """Those with this id, ready or not."""
        return [new for _, new in self._take(lambda _, new: new.request_id == request_id)]

    def _take(self, wanted: Callable[[Future[Any], NewRequest], bool]) -> list[tuple[Future[Any], NewRequest]]:
        taken: list[tuple[Future[Any], NewRequest]] = []
        kept: list[tuple[Future[Any], NewRequest]] = []
        for entry in self._waiting:  # each is asked once: its answer may change
            (taken if wanted(*entry) else kept).append(entry)
        self._waiting = kept
        return taken


def _problem(done: Future[Any]) -> str | None:
    error = done.exception()
    return None if error is None else str(error)
