"""What a frontend hands the engine process at birth, pickled through its standard input.

The pipe stays open afterwards: when it closes, the parent is gone and the engine ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.types import EngineConfig

DEFAULT_BUILDER = "octavo.engine.build:build_server_engine"


@dataclass(frozen=True)
class EngineBoot:
    config: EngineConfig
    inbox: str
    """ZMQ address the engine pulls `ToEngine` messages from."""
    outbox: str
    """ZMQ address the engine pushes `FromEngine` messages to."""
    log_level: int
    from_main_thread: bool
    """The parent's main thread starts the process: it may be killed when that thread ends."""
    builder: str = DEFAULT_BUILDER
    """`module:function` that makes the engine core; tests put a scripted one here."""
