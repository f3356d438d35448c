"""A process that a signal has stopped, as who waits for it sees it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from octavo.protocol import stopped
from octavo.protocol.stopped import LONGEST_PAUSE, StoppedClock, is_stopped


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as one:
        yield one
        one.kill()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while not is_stopped(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_how_long_it_has_been_stopped(process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(stopped.time, "monotonic", lambda: now)
    clock = StoppedClock(process.pid)
    assert clock.seconds() == 0.0
    monkeypatch.undo()
    stop(process)
    monkeypatch.setattr(stopped.time, "monotonic", lambda: now)
    seen = []
    for pause in (0.5, 0.5, 1.0, 1.5, 60.0):  # in the last one, who looks was stopped too
        now += pause
        seen.append(clock.seconds())
    assert seen == [0.0, 0.0, 1.0, 2.5, 2.5 + LONGEST_PAUSE]
    process.send_signal(signal.SIGCONT)
    while is_stopped(process.pid):
        pass
    now += 1.0
    assert clock.seconds() == 0.0


def test_what_is_gone_is_not_stopped(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert not is_stopped(process.pid)
