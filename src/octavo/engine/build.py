"""Puts an engine together: worker, executor, core. The only module that knows all three."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.config.types import EngineConfig
from octavo.protocol.engine import EngineReady

if TYPE_CHECKING:
    from octavo.core.loop import EngineCore

Progress = Callable[[str, int, int], None]
"""(phase, done, total), called while the engine loads."""


def no_progress(phase: str, done: int, total: int) -> None:
    """For callers with nothing to draw."""


def build_server_engine(config: EngineConfig, progress: Progress = no_progress) -> tuple[EngineCore, EngineReady]:
    """`build_engine`, ready sooner: what is left to prepare is done in gaps, by a loop that calls `EngineCore.prepare`."""
    return build_engine(config, progress, defer=True)


def build_engine(config: EngineConfig, progress: Progress = no_progress, *, defer: bool = False) -> tuple[EngineCore, EngineReady]:
    """A loaded engine, ready for requests, and what it reports about itself. Takes as long as loading the model takes.

    Args:
        defer: leave for `EngineCore.prepare` what can wait.

    Raises:
        OctavoError: the model cannot be loaded or does not fit.
    """
    from octavo.core.loop import EngineCore
    from octavo.executor.inline import InlineExecutor

    if config.reliability.scripted_model is not None:
        # No torch: a scripted server starts in a fraction of a second.
        from octavo.worker.scripted import ScriptedWorker

        executor = InlineExecutor(lambda: ScriptedWorker(config, progress))
    else:
        from octavo.worker.worker import Worker

        executor = InlineExecutor(lambda: Worker(config, progress, defer_graphs=defer))
    try:
        return EngineCore(config, executor), executor.ready_report
    except BaseException:
        executor.shutdown()
        raise
