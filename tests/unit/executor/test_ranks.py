"""What `RanksExecutor` does about a rank that its own device has given up waiting for. Ranks that die: tests/engine/test_ranks.py."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from octavo.errors import EngineDead
from octavo.executor.ranks import RanksExecutor
from tests.support.engine_configs import engine_config


class FirstRank:
    """Computes without end, until somebody says that it waits in vain."""

    left_to_prepare = False

    def __init__(self) -> None:
        self.given_up = ""
        self.over = threading.Event()

    def check_ranks(self) -> None:
        if self.given_up:
            raise EngineDead(self.given_up)

    def submit(self, plan: object) -> None:
        self.given_up = "Rank 3 did not take part"

    def collect(self) -> object:
        assert self.over.wait(30)
        raise RuntimeError("whatever came of it")

    def shutdown(self) -> None:
        """Nothing to release."""


class Door:
    """Somebody is awaited, so that the watcher goes on."""

    def arrivals(self) -> tuple[()]:
        return ()

    def check(self) -> None:
        """Nobody is refused."""

    def close(self) -> None:
        """Nothing is open."""


def test_a_step_that_waits_in_vain_ends_the_engine_though_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config()
    config = replace(config, parallel=replace(config.parallel, tensor=2), reliability=replace(config.reliability, hang_timeout=300.0))
    rank, said = FirstRank(), list[tuple[str, str]]()

    def lost(message: str, kind: str) -> None:
        said.append((message, kind))
        rank.over.set()

    monkeypatch.setattr(RanksExecutor, "_until_ready", lambda self: None)
    executor = RanksExecutor(config, lambda check: rank, rendezvous="", module="", local=range(0), door=Door(), lost=lost, defer=False)  # type: ignore[arg-type, return-value]
    began = time.monotonic()
    executor._submitted.append(began)
    executor._launch(None)  # type: ignore[arg-type]
    with pytest.raises(EngineDead, match="Rank 3 did not take part"):
        executor.collect()
    assert said[0] == ("Rank 3 did not take part", "")
    assert time.monotonic() - began < 10
    executor.shutdown()
