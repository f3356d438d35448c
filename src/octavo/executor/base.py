"""The executor contract: the core plans, an executor gets the plan to every rank and brings the result back.

Steps are settled in the order they were submitted. `submit` returns as soon as the step is launched (an executor without an
asynchronous device may simply run it); `collect` waits for the oldest step not yet collected.
"""

from __future__ import annotations

from typing import Protocol

from octavo.protocol.engine import EngineReady
from octavo.protocol.step import CacheShape, StepPlan, StepResult


class Executor(Protocol):
    """Owned by one EngineCore. Not thread-safe."""

    @property
    def cache_shape(self) -> CacheShape: ...

    @property
    def ready_report(self) -> EngineReady: ...

    @property
    def tries(self) -> bool:
        """Whether a plan may have a `Trial`: the step has been computed when `submit` returns, in the core's process."""

    def submit(self, plan: StepPlan) -> None:
        """Launch a step.

        Raises:
            Exception: the step could not run. The core fails the requests in the plan, not the loop.
        """

    def collect(self) -> StepResult:
        """The result of the oldest submitted step; blocks until it is there.

        Raises:
            Exception: the step failed. The core fails the requests in that step, not the loop.
        """

    def prepare(self, *, idle: bool) -> bool:
        """Do a piece of work that makes later steps quicker, if one is left.

        Args:
            idle: nobody waits for a step.

        Returns:
            whether something is left to do.
        """

    def shutdown(self) -> None: ...
