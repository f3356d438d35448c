"""The executor of one rank in the engine's own process: a call is a call.

With an asynchronous device the worker itself launches and returns, so this adds nothing and hides nothing. The worker comes
from a factory, because an executor never imports a worker: only the composition root knows both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from octavo.protocol.engine import EngineReady
from octavo.protocol.step import CacheShape, StepPlan, StepResult


class Rank(Protocol):
    """What an executor needs of a worker."""

    @property
    def cache_shape(self) -> CacheShape: ...

    @property
    def ready_report(self) -> EngineReady: ...

    @property
    def tries(self) -> bool: ...

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...

    def prepare(self, *, idle: bool) -> bool: ...

    def shutdown(self) -> None: ...


class InlineExecutor:
    """Runs one worker in this process. Implements `Executor`.

    Args:
        worker_factory: makes the worker; it loads the model here and now, and its errors are the caller's.
    """

    def __init__(self, worker_factory: Callable[[], Rank]) -> None:
        self._worker = worker_factory()
        self._open = True

    @property
    def cache_shape(self) -> CacheShape:
        return self._worker.cache_shape

    @property
    def ready_report(self) -> EngineReady:
        return self._worker.ready_report

    @property
    def tries(self) -> bool:
        return self._worker.tries

    def submit(self, plan: StepPlan) -> None:
        self._worker.submit(plan)

    def collect(self) -> StepResult:
        return self._worker.collect()

    def prepare(self, *, idle: bool) -> bool:
        return self._worker.prepare(idle=idle)

    def shutdown(self) -> None:
        """Release the worker's memory. Calling it again does nothing."""
        if self._open:
            self._open = False
            self._worker.shutdown()
