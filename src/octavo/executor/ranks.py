"""`RanksExecutor`: one process a rank on this host; rank 0 is this process itself.

Every rank gets every plan and computes its share; sampling has the same result on each, so that nothing but failures comes back. A rank
that dies leaves the others waiting in a sum: a thread watches the processes, and says so at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import selectors
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from octavo.config.types import EngineConfig
from octavo.errors import EngineDead
from octavo.executor.inline import Rank
from octavo.executor.ring import RING_BYTES, RingWriter, make_memory
from octavo.protocol.boot import child_environment
from octavo.protocol.engine import EngineReady
from octavo.protocol.ranks import PrepareNow, RankBoot, RankFailed, RankReady, RunStep, StopRank, decode_up, encode
from octavo.protocol.step import CacheShape, StepPlan, StepResult

logger = logging.getLogger(__name__)

Lost = Callable[[str, str], None]
"""(message, kind of OctavoError): a rank is gone, and the engine with it. Called from any thread, perhaps from several."""

_LENGTH = struct.Struct("<I")
STOP_SECONDS = 5.0
WATCH_SECONDS = 1.0


class FirstRank(Rank, Protocol):
    """What `RanksExecutor` needs of rank 0."""

    @property
    def left_to_prepare(self) -> bool:
        """Whether there is anything left for `prepare`."""

    def preparation_due(self, *, idle: bool) -> bool:
        """Whether now is the time."""


@dataclass
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    status: int
    """File descriptor of its messages."""
    ready: bool = False


class RanksExecutor:
    """Implements `executor.base.Executor`.

    Args:
        worker_factory: makes rank 0, here and now, once the others are on their way; given what raises if one of them is gone.
        rendezvous: where the ranks find each other.
        module: what a rank's process runs.
        lost: what to do when a rank is gone; may never return.
        defer: leave for `prepare` what can wait.

    Raises:
        EngineDead, OctavoError: a rank could not load; says which.
    """

    def __init__(
        self,
        config: EngineConfig,
        worker_factory: Callable[[Callable[[], None]], FirstRank],
        *,
        rendezvous: str,
        module: str,
        lost: Lost,
        defer: bool,
    ) -> None:
        self._config = config
        self._defer = defer
        self._lost = lost
        self._closing = False
        self._failure: str | None = None
        self._kind = ""
        self._submitted: list[float] = []
        """When each step not collected yet was."""
        self._late = config.device.kind == "cpu" and config.parallel.pipeline > 1
        """A CPU computes when it launches: our stage's share waits until a result is wanted, so that the stages before can be ahead."""
        self._waiting: deque[StepPlan] = deque()
        self._children: list[_Child] = []
        self._changed = threading.Condition()
        self._start(rendezvous, module)
        self._watcher = threading.Thread(target=self._watch, name="octavo-ranks", daemon=True)
        self._watcher.start()
        try:
            self._worker = worker_factory(self._check)
            self._until_ready()
        except BaseException:
            self._end_children()
            raise

    def _start(self, rendezvous: str, module: str) -> None:
        size = self._config.parallel.world
        memory = make_memory()
        pipes = []
        for rank in range(1, size):
            read_headers, write_headers = os.pipe()
            read_status, write_status = os.pipe()
            boot = RankBoot(
                config=self._config,
                rank=rank,
                local_rank=rank,
                rendezvous=rendezvous,
                ring=memory,
                ring_bytes=RING_BYTES,
                reader=rank - 1,
                headers=read_headers,
                status=write_status,
                defer=self._defer,
                from_main_thread=threading.current_thread() is threading.main_thread(),
                log_level=logging.getLogger().getEffectiveLevel(),
            )
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                env=child_environment(),
                pass_fds=(memory, read_headers, write_status),
            )
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(boot))
            process.stdin.flush()  # stays open: when it closes, we are gone
            os.close(read_headers)
            os.close(write_status)
            pipes.append(write_headers)
            self._children.append(_Child(rank, process, read_status))
        self._ring = RingWriter(memory, pipes)
        os.close(memory)

    # Executor

    @property
    def cache_shape(self) -> CacheShape:
        return self._worker.cache_shape

    @property
    def ready_report(self) -> EngineReady:
        return self._worker.ready_report

    def submit(self, plan: StepPlan) -> None:
        """Send the plan, and launch rank 0's share of it."""
        self._check()
        self._send(encode(RunStep(plan)))
        self._submitted.append(time.monotonic())
        if self._late:
            self._waiting.append(plan)
        else:
            self._launch(plan)

    def collect(self) -> StepResult:
        """Rank 0's result: it is in the last stage, and every rank of that has the same."""
        try:
            if self._waiting:
                self._launch(self._waiting.popleft())
            with self._together():
                return self._worker.collect()
        finally:
            self._submitted.pop(0)

    def _launch(self, plan: StepPlan) -> None:
        with self._together():
            self._worker.submit(plan)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Around what every rank does: if it fails here, the others wait for us in it."""
        try:
            yield
        except Exception as e:
            # If it failed because one of them is gone, that is the better word.
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None, WATCH_SECONDS)
            self._fail(f"Rank 0 could not run a step that the other ranks are in: {type(e).__name__}: {e}", "")
            self._check()
            raise

    def prepare(self, *, idle: bool) -> bool:
        """Rank 0 decides when; then all do it, since what is captured holds sums over ranks."""
        if not self._worker.preparation_due(idle=idle):
            return self._worker.left_to_prepare
        self._send(encode(PrepareNow()))
        return self._worker.prepare(idle=True)

    def shutdown(self) -> None:
        """End the other ranks, then release rank 0. Calling it again does nothing."""
        if self._closing:
            return
        self._end_children()
        self._worker.shutdown()

    # Ranks

    def _send(self, data: bytes) -> None:
        try:
            self._ring.send(data, self._check)
        except BrokenPipeError:
            self._check()
            raise EngineDead("A rank does not take steps any more.") from None

    def _check(self) -> None:
        """Go no further if a rank is gone: requests would get an error for what a restart mends."""
        if self._failure is not None:
            self._lost(self._failure, self._kind)
            raise EngineDead(self._failure)

    def _fail(self, message: str, kind: str) -> None:
        with self._changed:
            first = self._failure is None and not self._closing
            if first:
                self._failure, self._kind = message, kind
            self._changed.notify_all()
        if first:
            logger.error("%s", message)
            self._lost(message, kind)

    def _until_ready(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or all(child.ready for child in self._children))
        self._check()

    def _watch(self) -> None:
        """Read what ranks say, and notice when one ends or hangs."""
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.status, selectors.EVENT_READ, child)
            pause = min(WATCH_SECONDS, self._config.reliability.hang_timeout / 20)
            while selector.get_map() and not self._closing:
                for key, _ in selector.select(pause):
                    if not self._listen(key.data):
                        selector.unregister(key.fd)
                self._look_for_hung()

    def _listen(self, child: _Child) -> bool:
        """One message of a rank; False when it is gone."""
        try:
            head = _exactly(child.status, _LENGTH.size)
            message = None if head is None else _exactly(child.status, _LENGTH.unpack(head)[0])
        except OSError:  # closed by us
            return False
        if message is None:
            if not self._closing:
                self._fail(f"Rank {child.rank} {describe_exit(child.process)}.", "")
            return False
        told = decode_up(message)
        if isinstance(told, RankReady):
            with self._changed:
                child.ready = True
                self._changed.notify_all()
        elif isinstance(told, RankFailed):
            self._fail(f"Rank {child.rank}: {told.message}", told.kind)
        return True

    def _look_for_hung(self) -> None:
        oldest = self._submitted[0] if self._submitted else None
        limit = 0.8 * self._config.reliability.hang_timeout  # so that who is named comes before the frontend's own verdict
        if oldest is None or time.monotonic() - oldest < limit:
            return
        states = [state for child in self._children if (state := self._what_of(child))]
        self._fail(f"A step has not been finished for {limit:.0f} s: {', '.join(states) or 'every rank is at work on it'}.", "")

    def _what_of(self, child: _Child) -> str | None:
        """What seems to be wrong with a rank, if anything."""
        if _stopped(child.process.pid):
            return f"rank {child.rank} (process {child.process.pid}) is stopped, by a signal or a debugger"
        if self._ring.taken(child.rank - 1) < self._ring.sent:
            return f"rank {child.rank} (process {child.process.pid}) has not taken it"
        return None

    def _end_children(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError, EngineDead):
            self._ring.send(encode(StopRank()), self._give_up)
        deadline = time.monotonic() + STOP_SECONDS
        for child in self._children:
            if self._failure is not None:
                child.process.kill()
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            if child.process.stdin is not None:
                child.process.stdin.close()
            os.close(child.status)
        self._ring.close()

    @staticmethod
    def _give_up() -> None:
        raise EngineDead("no room for the last message")


def _stopped(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def describe_exit(process: subprocess.Popen[bytes]) -> str:
    """How a rank's process ended, for people."""
    try:
        code = process.wait(2.0)
    except subprocess.TimeoutExpired:
        return "closed its end without ending"
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (often the kernel's way to say that memory ran out)" if code == -9 else ""
    return f"was ended by signal {-code}{hint}"


def _exactly(descriptor: int, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        more = os.read(descriptor, count - len(data))
        if not more:
            return None
        data += more
    return data


def say(descriptor: int, message: RankReady | RankFailed) -> None:
    """Send a message up. A rank's side of `RanksExecutor`."""
    data = encode(message)
    os.write(descriptor, _LENGTH.pack(len(data)) + data)
