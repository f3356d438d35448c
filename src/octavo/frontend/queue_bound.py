"""The bound on waiting requests: past it a request is refused at the door, with a guess at when to come back."""

from __future__ import annotations

import time
from collections import deque

from octavo.config.types import SchedulerConfig
from octavo.errors import Overloaded


class QueueBound:
    """Counts ends of requests, to tell how fast the queue moves."""

    def __init__(self, limits: SchedulerConfig) -> None:
        self._limits = limits
        self._finish_times: deque[float] = deque(maxlen=64)

    def finished(self) -> None:
        """A request has ended."""
        self._finish_times.append(time.monotonic())

    def check(self, num_sequences: int) -> None:
        """May one more come, with so many live sequences?

        Raises:
            Overloaded
        """
        limits = self._limits
        waiting = num_sequences - limits.max_num_seqs
        if waiting >= limits.max_waiting:
            raise Overloaded(
                f"The server is full: {waiting} requests wait for one of {limits.max_num_seqs} places. Try again later.",
                retry_after=self._expected_wait(waiting),
            )

    def _expected_wait(self, waiting: int) -> float:
        """Seconds until about a tenth of the queue has gone, from how fast requests have been ending."""
        if len(self._finish_times) < 2:
            return 1.0
        rate = len(self._finish_times) / max(1e-3, time.monotonic() - self._finish_times[0])
        return min(60.0, max(1.0, waiting / 10 / rate))
