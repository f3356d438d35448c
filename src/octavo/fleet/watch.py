"""A process beside each of a fleet, which ends it when a signal has stopped it: Ray finds out after a minute, and then waits for it to drain."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys

from octavo.protocol.boot import start_process
from octavo.protocol.stopped import LOOK_SECONDS, STOPPED_SECONDS, StoppedClock


def watched() -> subprocess.Popen[bytes]:
    """Have this process watched, until it ends."""
    return start_process("octavo.fleet.watch", os.getpid(), ())


def main() -> None:
    pid: int = pickle.load(sys.stdin.buffer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the other one decides
    clock = StoppedClock(pid)
    while not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:  # closed when the other one has ended
        if (stopped := clock.seconds()) >= STOPPED_SECONDS:
            print(f"Process {pid} has been stopped for {stopped:.0f} s, by a signal; it is killed.", file=sys.stderr)
            os.kill(pid, signal.SIGKILL)
            return


if __name__ == "__main__":
    main()
