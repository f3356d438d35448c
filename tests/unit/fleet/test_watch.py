"""A process of a fleet that a signal has stopped is killed, and its watcher ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

PROGRAM = "import sys, time; from octavo.fleet.watch import watched; w = watched(); print(w.pid, flush=True); time.sleep(60)"


@pytest.mark.parametrize("stopped", [True, False])
def test_what_is_stopped_is_killed(stopped: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    watcher = psutil.Process(int(process.stdout.readline()))
    began = time.monotonic()
    if stopped:
        process.send_signal(signal.SIGSTOP)
        assert process.wait(30) == -signal.SIGKILL
        assert 4 < time.monotonic() - began < 20
    else:
        time.sleep(2.5)
        assert process.poll() is None and watcher.is_running()
        process.kill()
        process.wait()
    gone, _ = psutil.wait_procs([watcher], 10)
    assert gone
