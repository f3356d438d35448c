"""A rank in another process, as the engine sees it: what it says, what is wrong with it, how it ends."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Protocol

from octavo.executor.door import Guest
from octavo.executor.frames import FrameBuffer
from octavo.executor.ring import RingWriter
from octavo.protocol.boot import how_it_ended, start_process
from octavo.protocol.ranks import FromRank, RankAlive, RankBoot, RankReady, decode_up
from octavo.protocol.stopped import STOPPED_SECONDS, StoppedClock, is_stopped

SILENT_SECONDS = 10.0
"""A rank on another host says more often than this that it is alive."""
_READ = 1 << 16


class RankEnd(Protocol):
    rank: int
    ready: bool
    """Its model is loaded."""

    def fileno(self) -> int:
        """Readable when it says something or is gone."""

    def read(self) -> list[FromRank] | None:
        """What it has said since; None: it is gone. Does not wait for more."""

    def farewell(self) -> str:
        """How it ended, for people."""

    def silent(self) -> str | None:
        """What to say if it should have been heard of, or cannot go on. To be asked now and then."""

    def trouble(self) -> str | None:
        """What seems to be wrong with it when a step does not end, if anything."""

    def abandon(self) -> None:
        """End it, without waiting: whoever waits for it in a sum finds out. From any thread."""

    def end(self, deadline: float, *, now: bool) -> None:
        """Wait until it has ended by itself; no longer than to `deadline`, and not at all with `now`."""


class LocalRank:
    """A process that we started. Implements `RankEnd`.

    Args:
        module: what it runs.
        status: reading end of the pipe that it says things through.
        pass_fds: descriptors that it inherits, under the same numbers.
    """

    def __init__(self, boot: RankBoot, module: str, status: int, pass_fds: tuple[int, ...]) -> None:
        self.rank = boot.rank
        self.ready = False
        self.ring: RingWriter | None = None
        """What it gets plans through, and where among its readers it is."""
        self.reader = 0
        self._status = status
        self._frames = FrameBuffer()
        self.process = start_process(module, boot, pass_fds)
        self._stopped = StoppedClock(self.process.pid)
        self._killed = False
        """By us."""

    def fileno(self) -> int:
        return self._status

    def read(self) -> list[FromRank] | None:
        try:
            data = os.read(self._status, _READ)
        except OSError:  # closed by us
            return None
        return [decode_up(message) for message in self._frames.feed(data)] if data else None

    def farewell(self) -> str:
        return f"Rank {self.rank} {describe_exit(self.process, by_us=self._killed)}."

    @property
    def killed_by_others(self) -> bool:
        """A signal has ended it that was not ours."""
        return not self._killed and (self.process.poll() or 0) < 0

    def stopped_for(self) -> float:
        """Seconds, as far as it has been looked at: to be asked now and then."""
        return self._stopped.seconds()

    def silent(self) -> str | None:
        if (stopped := self.stopped_for()) < STOPPED_SECONDS:
            return None
        return f"Rank {self.rank} (process {self.process.pid}) has been stopped for {stopped:.0f} s, by a signal."

    def trouble(self) -> str | None:
        who = f"rank {self.rank} (process {self.process.pid})"
        if is_stopped(self.process.pid):
            return f"{who} is stopped, by a signal"
        if self.ring is not None and self.ring.taken(self.reader) < self.ring.sent:
            return f"{who} has not taken it"
        return None

    def abandon(self) -> None:
        self._killed = self._killed or self.process.poll() is None
        self.process.kill()

    def end(self, deadline: float, *, now: bool) -> None:
        if now:
            self.abandon()
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.abandon()
            self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        os.close(self._status)


class LinkedRank:
    """A rank on another host. Implements `RankEnd`."""

    def __init__(self, guest: Guest) -> None:
        self.rank = guest.rank
        self.ready = False
        self.link = guest.link
        self._where = guest.host if guest.node == 0 else f"node {guest.node}, {guest.host}"
        self._taken = 0
        self._heard = time.monotonic()

    def fileno(self) -> int:
        return self.link.fileno()

    def read(self) -> list[FromRank] | None:
        messages = self.link.read()
        if messages:
            self._heard = time.monotonic()
        for message in messages or ():
            if isinstance(message, RankAlive):
                self._taken = message.taken
            elif isinstance(message, RankReady):
                self.ready = True
        return messages

    def farewell(self) -> str:
        why = f" ({self.link.lost})" if self.link.lost else ""
        return f"Rank {self.rank} ({self._where}) has ended, or its host has{why}."

    def silent(self) -> str | None:
        quiet = time.monotonic() - self._heard
        if not self.ready or quiet < SILENT_SECONDS:  # libraries that load may keep every thread of it waiting; then the kernel watches
            return None
        where = f"Rank {self.rank} ({self._where})"
        return f"{where} has not been heard of for {quiet:.0f} s: it is stopped, or its host is gone, or the network between."

    def trouble(self) -> str | None:
        if self._taken < self.link.sent:
            return f"rank {self.rank} ({self._where}) has not taken it"
        return None

    def abandon(self) -> None:
        self.link.hang_up()

    def end(self, deadline: float, *, now: bool) -> None:
        while not now and (left := deadline - time.monotonic()) > 0 and self.link.more(left):
            pass
        self.link.close()


def describe_exit(process: subprocess.Popen[bytes], *, by_us: bool = False) -> str:
    """How a rank's process ended, for people."""
    try:
        code = process.wait(2.0)
    except subprocess.TimeoutExpired:
        return "closed its end without ending"
    return how_it_ended(code, by_us=by_us)
