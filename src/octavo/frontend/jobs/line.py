"""Who is next: a bounded line of jobs, fair between clients. Not thread-safe; the pool holds a lock around it.

Clients take turns, whatever each of them has waiting. A full line takes a client with few jobs in it all the same: the one with the most
loses its last.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, TypeVar

Job = TypeVar("Job")


class Line(Generic[Job]):
    """Jobs by client.

    Args:
        most: jobs that may wait.
        most_running: jobs of one client that may run at a time.
    """

    def __init__(self, most: int, most_running: int) -> None:
        self._most = most
        self._most_running = most_running
        self._waiting: dict[str, deque[Job]] = {}
        """In the order of turns: whoever got one goes to the end."""
        self._running: Counter[str] = Counter()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def waiting(self, client: str) -> int:
        return len(self._waiting.get(client, ()))

    def put(self, client: str, job: Job) -> Job | None:
        """Add a job. Returns the one that there is no place for now: this one, another, or None."""
        dropped: Job | None = None
        if self._size >= self._most:
            greediest = max(self._waiting, key=self.waiting)
            if self.waiting(greediest) <= self.waiting(client) + 1:
                return job
            dropped = self._waiting[greediest].pop()
            self._size -= 1
        self._waiting.setdefault(client, deque()).append(job)
        self._size += 1
        return dropped

    def take(self) -> tuple[str, Job] | None:
        """The next job to run, and whose it is; None when there is none, or its client has enough running. `done` must follow."""
        client = next((one for one in self._waiting if self._running[one] < self._most_running), None)
        if client is None:
            return None
        jobs = self._waiting.pop(client)
        job = jobs.popleft()
        self._size -= 1
        self._running[client] += 1
        if jobs:
            self._waiting[client] = jobs
        return client, job

    def done(self, client: str) -> None:
        """A job of `client` that ran has ended."""
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]

    def relieve(self, client: str) -> None:
        """A job of `client` that runs counts no longer; there is to be no `done` for it."""
        self.done(client)

    def remove(self, client: str, job: Job) -> bool:
        """Take back a job that still waits. Returns whether it did."""
        jobs = self._waiting.get(client)
        if jobs is None or job not in jobs:
            return False
        jobs.remove(job)
        self._size -= 1
        if not jobs:
            del self._waiting[client]
        return True

    def clear(self) -> list[Job]:
        """Everything that waits, which does no longer."""
        jobs = [job for waiting in self._waiting.values() for job in waiting]
        self._waiting.clear()
        self._size = 0
        return jobs
