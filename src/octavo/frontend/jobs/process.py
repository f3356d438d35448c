"""One process that does jobs, as its owner sees it: started, asked, and ended when it is late.

What counts against a job's time is the work of its process, not the wait for a turn on a busy machine.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.frontend.jobs.worker import LENGTH_BYTES
from octavo.protocol.boot import child_environment

START_SECONDS = 60.0
"""A process that does not come up in this time never will."""
BUSY_FACTOR = 12
"""How many times its seconds a job may take by the clock, where the machine lets it work little."""

_MODULE = "octavo.frontend.jobs.worker"


class Late(Exception):
    """The job used up its time."""


class Starved(Exception):
    """The job could not use its time: the machine has too much else to do."""


class Gone(Exception):
    """The process has ended."""


@dataclass(frozen=True)
class Room:
    """What jobs of one kind need and may use."""

    name: str
    """Of the kind, for people."""
    module: str
    """That has `open_room`."""
    seconds: float
    """Work of one job, after which its process is ended."""
    memory: int
    """Bytes that jobs may take beyond what an idle process has."""
    longest_reply: int = 1 << 26


class JobProcess:
    """Started at once. One thread uses it; any thread may `kill` it."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, room.module, str(room.memory), str(room.seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**child_environment(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C in a terminal goes to the server alone
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def set_up(self, setup: bytes) -> None:
        """Tell it what its jobs need, and wait until it takes them. Raises Late, Starved or Gone when it does not come up."""
        self._send(setup)
        self._read_frame(_Clock(self._process.pid, START_SECONDS))

    def ask(self, job: bytes, *, patience: float | None = None, impatient: Callable[[], None] | None = None) -> bytes:
        """The reply to a job.

        Args:
            patience: seconds after which `impatient` is called, if there is no reply yet.

        Raises:
            Late, Starved, Gone: there is none, and the process is of no more use.
        """
        clock = _Clock(self._process.pid, self._room.seconds)
        self._send(job)  # it waits for jobs, so that writing never blocks for long
        if patience is not None and impatient is not None and not self._replies(patience):
            impatient()
        return self._read_frame(clock)

    def _replies(self, seconds: float) -> bool:
        """Whether a reply begins, or the process ends, within some seconds."""
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout.fileno(), select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _send(self, frame: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(len(frame).to_bytes(LENGTH_BYTES, "big"))
            self._process.stdin.write(frame)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise Gone from None

    def _read_frame(self, clock: _Clock) -> bytes:
        size = int.from_bytes(self._read(LENGTH_BYTES, clock), "big")
        if size > self._room.longest_reply:
            raise Gone
        return self._read(size, clock)

    def _read(self, size: int, clock: _Clock) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        parts: list[bytes] = []
        while size:
            if not poll.poll(clock.left() * 1000):
                continue
            part = os.read(pipe, min(size, 1 << 20))
            if not part:
                raise Gone
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Kill it, and free what it had of ours."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()


class _Clock:
    """What is left of the time of one job."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid = pid
        self._seconds = seconds
        self._begun = time.monotonic()
        self._worked = _worked(pid)

    def left(self) -> float:
        """Seconds after which to ask again, more than 0.

        Raises:
            Late, Starved
        """
        passed = time.monotonic() - self._begun
        if passed >= BUSY_FACTOR * self._seconds:
            raise Starved
        worked = _worked(self._pid)
        used = passed if worked is None or self._worked is None else worked - self._worked
        if used >= self._seconds:
            raise Late
        return max(0.01, self._seconds - used)


def _worked(pid: int) -> float | None:
    """Seconds of processor time that a process has used; None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
