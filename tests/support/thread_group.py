"""Ranks as threads: a `TensorGroup` whose sums meet at a barrier. Every rank's arithmetic, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class ThreadGroup:
    """One rank. Implements `parallel.group.TensorGroup`."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, shared: list[object]) -> None:
        self.rank = rank
        self.size = size
        self._barrier = barrier
        self._shared = shared
        self.sums = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return sum(self._exchange(x)[1:], self._exchange(x)[0].clone())

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), -1)

    def _exchange(self, mine: T) -> list[T]:
        self._shared[self.rank] = mine
        self._barrier.wait(60)
        everybody = list(self._shared)
        self._barrier.wait(60)
        return everybody  # type: ignore[return-value]


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
