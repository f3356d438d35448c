"""Who goes first: the waiting queue and the three scheduling policies.

A policy sorts waiting requests into lanes and ranks the lanes; inside a lane the preempted go first, then the order is by arrival.
FCFS has one lane, priority one a priority level, fair share one a fair key. All orders are total, so that they are the same
everywhere and in every run.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Literal, Protocol

import numpy as np

from octavo.core.request import Request, RequestState
from octavo.protocol.step import Int32

IDLE_KEYS_REMEMBERED = 4096

Lane = int | str


class Policy(Protocol):
    """Ordering of requests. `enter` and `leave` bracket a request's life in the core."""

    charges: bool
    """Whether it wants to be told what was computed for whom (`charge`)."""

    def enter(self, request: Request) -> None: ...

    def leave(self, request: Request) -> None: ...

    def lane(self, request: Request) -> Lane: ...

    def rank(self, lane: Lane) -> int:
        """Smaller goes first."""

    def charge(self, shares: Int32, tokens: Int32) -> None:
        """`tokens[i]` tokens were computed for requests with `share` = `shares[i]`."""

    def importance(self, request: Request) -> int:
        """Smaller is kept when memory runs short."""


class Fcfs:
    """First come, first served."""

    charges = False

    def enter(self, request: Request) -> None:
        pass

    def leave(self, request: Request) -> None:
        pass

    def lane(self, request: Request) -> Lane:
        return 0

    def rank(self, lane: Lane) -> int:
        return 0

    def charge(self, shares: Int32, tokens: Int32) -> None:
        pass

    def importance(self, request: Request) -> int:
        return 0


class Priority(Fcfs):
    """Lower priority numbers first, then by arrival."""

    def lane(self, request: Request) -> Lane:
        return request.priority

    def rank(self, lane: Lane) -> int:
        return int(lane)

    def importance(self, request: Request) -> int:
        return request.priority


class FairShare:
    """The key that has been served the fewest tokens goes first.

    A virtual token counter (Sheng et al. 2024, "Fairness in Serving Large Language Models"): a key that becomes active is lifted to
    the least-served active key, so that idling earns no credit, and a key that went idle keeps its debt.
    """

    charges = True

    def __init__(self) -> None:
        self._columns: dict[str, int] = {}
        self._active: dict[str, int] = {}
        self._served = np.zeros(16, np.int64)
        self._spare: list[int] = list(range(15, -1, -1))
        self._idle: OrderedDict[str, int] = OrderedDict()
        self._last_left = 0

    def served(self, key: str) -> int:
        """Tokens on the counter of `key`."""
        column = self._columns.get(key)
        return self._idle.get(key, 0) if column is None else int(self._served[column])

    def enter(self, request: Request) -> None:
        key = request.fair_key
        if key not in self._columns:
            floor = min((int(self._served[c]) for c in self._columns.values()), default=self._last_left)
            if not self._spare:
                size = len(self._served)
                self._served = np.concatenate([self._served, np.zeros(size, np.int64)])
                self._spare = list(range(2 * size - 1, size - 1, -1))
            column = self._columns[key] = self._spare.pop()
            self._served[column] = max(floor, self._idle.pop(key, 0))
            self._active[key] = 0
        self._active[key] += 1
        request.share = self._columns[key]

    def leave(self, request: Request) -> None:
        key = request.fair_key
        self._active[key] -= 1
        if self._active[key]:
            return
        del self._active[key]
        column = self._columns.pop(key)
        self._last_left = self._idle[key] = int(self._served[column])
        self._spare.append(column)
        if len(self._idle) > IDLE_KEYS_REMEMBERED:
            self._idle.popitem(last=False)

    def lane(self, request: Request) -> Lane:
        return request.fair_key

    def rank(self, lane: Lane) -> int:
        return self.served(str(lane))

    def charge(self, shares: Int32, tokens: Int32) -> None:
        np.add.at(self._served, shares, tokens)

    def importance(self, request: Request) -> int:
        return self.served(request.fair_key)


def make_policy(name: Literal["fcfs", "priority", "fair"]) -> Policy:
    match name:
        case "fcfs":
            return Fcfs()
        case "priority":
            return Priority()
        case "fair":
            return FairShare()


Entry = tuple[int, float, int, Request]


class WaitingQueue:
    """Requests that could be admitted, best first by the policy. O(log n) a change, plus one look at each lane for a peek."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lanes: dict[Lane, list[Entry]] = {}
        self._size = 0
        self._stale = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        """Queue `request`; a preempted one goes before all others of its lane that were not."""
        first = 0 if request.state is RequestState.PREEMPTED else 1
        lane = self._lanes.setdefault(self._policy.lane(request), [])
        heapq.heappush(lane, (first, request.arrival, request.order, request))
        request.queued = True
        self._size += 1

    def remove(self, request: Request) -> None:
        """Take `request` out, wherever it is in the queue."""
        if not request.queued:
            return
        request.queued = False
        self._size -= 1
        self._stale += 1
        if self._stale > self._size + 64:
            for lane, entries in self._lanes.items():
                self._lanes[lane] = [entry for entry in entries if entry[3].queued]
                heapq.heapify(self._lanes[lane])
            self._stale = 0

    def peek(self) -> Request | None:
        """The request to admit next."""
        best: tuple[int, Entry] | None = None
        empty: list[Lane] = []
        for lane, entries in self._lanes.items():
            while entries and not entries[0][3].queued:
                heapq.heappop(entries)
                self._stale -= 1
            if not entries:
                empty.append(lane)
                continue
            candidate = (self._policy.rank(lane), entries[0])
            if best is None or (candidate[0], candidate[1][:3]) < (best[0], best[1][:3]):
                best = candidate
        for lane in empty:
            del self._lanes[lane]
        return best[1][3] if best else None
