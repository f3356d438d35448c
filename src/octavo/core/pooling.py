"""The engine core of a model that pools: requests in order of arrival (or priority), batched up to the token budget of a step.

Every request is one step's work, so there is nothing to preempt and nothing to keep. Nothing a request does ends the loop: one
that fails ends with an error, the others of its batch are computed again without it.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from octavo.config.types import EngineConfig
from octavo.errors import clause
from octavo.protocol.engine import (
    AbortRequests,
    EngineReady,
    EngineStats,
    FinishReason,
    NewRequest,
    ReleaseHeld,
    RequestTimes,
    StepOutputs,
    TokenDelta,
    Vocabulary,
)
from octavo.protocol.params import PoolingParams
from octavo.protocol.pooling import Pooled, PoolRow

logger = logging.getLogger(__name__)


class PoolingRank(Protocol):
    """What the core needs of a worker that pools."""

    ready_report: EngineReady

    def pool(self, rows: Sequence[PoolRow]) -> list[Pooled | str]:
        """The result of each row, or why there is none."""

    def shutdown(self) -> None: ...


class PoolingCore:
    """Implements what a client needs of a core (`frontend.client.Core`). Not thread-safe: one thread calls everything."""

    def __init__(self, config: EngineConfig, worker: PoolingRank) -> None:
        self._worker = worker
        self._budget = config.scheduler.max_num_batched_tokens
        self._most = config.scheduler.max_num_seqs
        self._by_priority = config.scheduler.policy == "priority"
        self._waiting: list[tuple[int, int, NewRequest]] = []
        """Heap of (priority, arrival, request)."""
        self._live: set[str] = set()
        self._outbox: list[TokenDelta] = []
        self._arrivals = 0
        self._stats = EngineStats(last_step_time=time.monotonic())

    def add(self, request: NewRequest) -> None:
        """Take in a request."""
        if request.pooling is None:
            self._outbox.append(_failed(request, "This engine pools; it does not generate."))
            return
        self._arrivals += 1
        self._live.add(request.request_id)
        heapq.heappush(self._waiting, (request.priority if self._by_priority else 0, self._arrivals, request))

    def abort(self, message: AbortRequests) -> None:
        """End requests that wait. Unknown ids are ignored."""
        ids = self._live.intersection(message.request_ids)
        self._live -= ids
        self._outbox += [TokenDelta(request_id, 0, [], finish_reason=FinishReason.ABORT) for request_id in sorted(ids)]

    def release(self, message: ReleaseHeld) -> None:
        """Nothing is ever held."""

    def set_vocabulary(self, message: Vocabulary) -> None:
        """Nothing is written here that a grammar could hold."""

    def reset_prefix_cache(self) -> bool:
        """There is no cache."""
        return True

    def has_work(self) -> bool:
        return bool(self._live or self._outbox)

    def prepare(self) -> bool:
        """Nothing is ever left to prepare."""
        return False

    def shutdown(self) -> None:
        self._worker.shutdown()

    def step(self) -> StepOutputs:
        """One turn: pool the next requests that fit together."""
        deltas, self._outbox = self._outbox, []
        batch = self._next_batch()
        if batch:
            scheduled = time.monotonic()
            results = self._pool(batch)
            ended = time.monotonic()
            for request, result in zip(batch, results, strict=True):
                self._live.discard(request.request_id)
                deltas.append(_delta(request, result, scheduled, ended))
            tokens = sum(len(request.prompt_token_ids) for request in batch)
            stats = self._stats
            stats.step += 1
            stats.step_tokens, stats.last_step_time = tokens, ended
            stats.prompt_tokens += tokens
        return StepOutputs(deltas, self.stats())

    def stats(self) -> EngineStats:
        """A snapshot."""
        self._stats.waiting = len(self._live)
        return EngineStats(**{name: getattr(self._stats, name) for name in EngineStats.__struct_fields__})

    def _next_batch(self) -> list[NewRequest]:
        batch: list[NewRequest] = []
        tokens = 0
        while self._waiting and len(batch) < self._most:
            request = self._waiting[0][2]
            if request.request_id in self._live:
                if batch and tokens + len(request.prompt_token_ids) > self._budget:
                    break
                tokens += len(request.prompt_token_ids)
                batch.append(request)
            heapq.heappop(self._waiting)
        return batch

    def _pool(self, batch: list[NewRequest]) -> list[Pooled | str]:
        rows = [PoolRow(r.prompt_token_ids, r.second_from, r.pooling or PoolingParams()) for r in batch]
        try:
            return self._worker.pool(rows)
        except Exception as error:
            if len(batch) == 1:
                logger.exception("Pooling request %s failed.", batch[0].request_id)
                return [f"The engine failed while computing this request: {clause(error)}."]
        logger.warning("A batch of %d failed; its requests are computed one by one.", len(batch))
        return [self._pool([request])[0] for request in batch]


def _delta(request: NewRequest, result: Pooled | str, scheduled: float, ended: float) -> TokenDelta:
    if isinstance(result, str):
        return _failed(request, result)
    times = RequestTimes(queued=request.arrival_time, scheduled=scheduled, first_token=ended, last_token=ended)
    return TokenDelta(
        request.request_id, request.index, [], finish_reason=FinishReason.STOP, num_cached_tokens=0, times=times, pooled=result
    )


def _failed(request: NewRequest, why: str) -> TokenDelta:
    return TokenDelta(request.request_id, request.index, [], finish_reason=FinishReason.ERROR, error=why)
