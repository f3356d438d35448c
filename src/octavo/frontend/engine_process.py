"""The engine process, seen from the frontend."""

from __future__ import annotations

import logging

from octavo.config.types import EngineConfig
from octavo.frontend.child_process import Addresses, ChildProcess
from octavo.protocol.boot import DEFAULT_BUILDER, EngineBoot
from octavo.protocol.engine import FromEngine, ToEngine


class EngineProcess(ChildProcess[ToEngine, FromEngine]):
    """One incarnation of it, started at once."""

    def __init__(self, config: EngineConfig, *, builder: str = DEFAULT_BUILDER) -> None:
        def boot(to: Addresses) -> EngineBoot:
            level = logging.getLogger("octavo").getEffectiveLevel()
            return EngineBoot(config, to.inbox, to.outbox, level, to.from_main_thread, builder)

        super().__init__("octavo.engine.process", boot, FromEngine)
