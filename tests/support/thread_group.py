"""Ranks as threads: a `TensorGroup` whose sums meet at a barrier, a `Pipeline` of queues. Every rank's arithmetic, without processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from octavo.ops.reference.norm import rms_norm

T = TypeVar("T")


class ThreadGroup:
    """One rank. Implements `parallel.group.TensorGroup`."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, shared: list[object]) -> None:
        self.rank = rank
        self.size = size
        self._barrier = barrier
        self._shared = shared
        self.sums = 0
        self.fuses = False
        """Whether it adds up, adds and norms at once."""
        self.joined = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return sum(self._exchange(x)[1:], self._exchange(x)[0].clone())

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self.fuses:
            return None
        self.joined += 1
        residual += self.sum(x)
        return rms_norm(residual, weight, eps), residual  # another rank may still be reading x

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), -1)

    def _exchange(self, mine: T) -> list[T]:
        self._shared[self.rank] = mine
        self._barrier.wait(60)
        everybody = list(self._shared)
        self._barrier.wait(60)
        return everybody  # type: ignore[return-value]


class ThreadPipeline:
    """One stage. Implements `parallel.pipeline.Pipeline`."""

    def __init__(self, stage: int, queues: list[queue.SimpleQueue[torch.Tensor]]) -> None:
        self.stage = stage
        self.stages = len(queues) + 1
        self._queues = queues

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        got = self._queues[self.stage - 1].get(timeout=60)
        assert (got.shape, got.dtype) == (out.shape, out.dtype)
        return out.copy_(got)

    def send(self, x: torch.Tensor) -> None:
        self._queues[self.stage].put(x.clone())


def one_after_the_other(stages: int, run: Callable[[ThreadPipeline], T]) -> list[T]:
    """What `run` returns on each of `stages` ranks."""
    queues: list[queue.SimpleQueue[torch.Tensor]] = [queue.SimpleQueue() for _ in range(stages - 1)]
    with ThreadPoolExecutor(stages) as pool:
        return [result.result() for result in [pool.submit(run, ThreadPipeline(stage, queues)) for stage in range(stages)]]


def together(size: int, run: Callable[[ThreadGroup], T]) -> list[T]:
    """What `run` returns on each of `size` ranks. If one fails, the others do."""
    barrier, shared = threading.Barrier(size), [None] * size

    def one(rank: int) -> T:
        try:
            return run(ThreadGroup(rank, size, barrier, shared))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        results = [pool.submit(one, rank) for rank in range(size)]
        errors = [e for r in results if (e := r.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [r.result() for r in results]
