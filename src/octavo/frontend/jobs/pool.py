"""Gives jobs to processes: a few at a time, the others in line, each with an answer in the end, if it is that there was no time.

Most jobs take milliseconds, and some take seconds until they are stopped. One that proves long goes on beside the others, so that those behind it
in line, of the same client too, wait for a moment only.

One thread a process waits for it (the kernel ends a process with the thread that started it). Threads and processes are started when there is
work, and end when there has been none for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from octavo.errors import EngineDead, InvalidRequest, OctavoError, Overloaded
from octavo.frontend.jobs.line import Line
from octavo.frontend.jobs.process import Gone, JobProcess, Late, Room, Starved

MAX_PROCESSES = 2
MAX_LONG = 2
"""Processes beyond those, for jobs that have proved long; one of a client."""
PATIENCE = 0.5
"""Seconds after which a job is long."""
MAX_WAITING = 128
MAX_WAIT = 30.0
"""Seconds in line, after which a job is given up."""
IDLE_SECONDS = 600.0
"""An idle process ends after this."""
RETRY_AFTER = 5.0


@dataclass(eq=False)
class _Waiting:
    job: bytes
    answer: Future[bytes] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class JobPool:
    """Processes for jobs of one kind. Safe to use from any thread.

    Args:
        setup: what each process is told first; asked for once, on a thread of the pool.
    """

    def __init__(self, room: Room, setup: Callable[[], bytes] = bytes, *, processes: int = MAX_PROCESSES) -> None:
        self._room = room
        self._setup = setup
        self._setup_bytes: bytes | None = None
        self._setup_lock = threading.Lock()
        self._most = processes
        # While one client's jobs are long, the last process is for the others.
        self._line: Line[_Waiting] = Line(MAX_WAITING, max(1, processes - 1))
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._long: set[str] = set()
        """Clients that have a long job running which counts neither as theirs nor as one of `_most`."""
        self._processes: set[JobProcess] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Of the processes there are."""
        with self._changed:
            return [process.pid for process in self._processes]

    def submit(self, client: str, job: bytes) -> Future[bytes]:
        """The reply to a job, soon; or one of the errors that `ask` raises. Cancelling it takes the job out of the line.

        Raises:
            Overloaded: too many wait already.
            EngineDead: this pool is closed.
        """
        waiting = _Waiting(job)
        with self._changed:
            if self._closed:
                raise EngineDead("The server is stopping.")
            refused = self._line.put(client, waiting)
            if refused is not waiting:
                waiting.answer.add_done_callback(lambda answer: self._leave(client, waiting) if answer.cancelled() else None)
                self._want_threads()
                self._changed.notify()
        if refused is waiting:
            raise self._full()
        if refused is not None:
            _fail(refused, self._full())
        return waiting.answer

    async def ask(self, client: str, job: bytes) -> bytes:
        """The reply to a job.

        Raises:
            Overloaded: too many wait, or it waited too long.
            InvalidRequest: it was stopped, for its time or its memory; the message says for which.
            EngineDead, OctavoError: there are no processes.
        """
        return await asyncio.wrap_future(self.submit(client, job))

    def close(self) -> None:
        """End the processes; a job that is running, or waits, ends with an error."""
        with self._changed:
            self._closed = True
            rest = self._line.clear()
            for process in self._processes:
                process.kill()
            self._changed.notify_all()
        for waiting in rest:
            _fail(waiting, EngineDead("The server is stopping."))

    def _full(self) -> Overloaded:
        return Overloaded(
            f"The server is busy: too many {self._room.name} wait for one of {self._most} processes. Try again later.",
            retry_after=RETRY_AFTER,
        )

    def _leave(self, client: str, waiting: _Waiting) -> None:
        with self._changed:
            self._line.remove(client, waiting)

    def _want_threads(self) -> None:
        """Start one more if there is work for it. With the lock held."""
        if len(self._line) > self._idle and self._threads < self._most + len(self._long):
            self._threads += 1
            threading.Thread(target=self._serve, name=f"octavo-{self._room.name}", daemon=True).start()

    # On threads of the pool

    def _serve(self) -> None:
        process: JobProcess | None = None
        try:
            while (taken := self._next()) is not None:
                client, waiting = taken
                stands_aside = threading.Event()
                try:
                    process = self._run(process, waiting, functools.partial(self._stand_aside, client, stands_aside))
                finally:
                    with self._changed:
                        if stands_aside.is_set():
                            self._long.discard(client)
                        else:
                            self._line.done(client)
                        self._changed.notify()
        finally:
            if process is not None:
                self._end(process)

    def _stand_aside(self, client: str, aside: threading.Event) -> None:
        """The job of `client` that this thread waits for has proved long: others, of the same client too, are not to wait for it."""
        with self._changed:
            if client not in self._long and len(self._long) < MAX_LONG and not self._closed:
                aside.set()
                self._long.add(client)
                self._line.relieve(client)
                self._want_threads()
                self._changed.notify()

    def _next(self) -> tuple[str, _Waiting] | None:
        """The next job; None when this thread is to end."""
        deadline = time.monotonic() + IDLE_SECONDS
        with self._changed:
            self._idle += 1
            try:
                while not self._closed and self._threads <= self._most + len(self._long):
                    if (taken := self._line.take()) is not None:
                        return taken
                    if (left := deadline - time.monotonic()) <= 0:
                        break
                    self._changed.wait(left)
                self._threads -= 1
                self._changed.notify()  # whoever woke us may have meant any of us
                return None
            finally:
                self._idle -= 1

    def _run(self, process: JobProcess | None, waiting: _Waiting, impatient: Callable[[], None]) -> JobProcess | None:
        """Answer one job; `impatient` is called when it proves long. Returns the process for the next; None: it is gone."""
        if not waiting.answer.set_running_or_notify_cancel():
            return process
        if time.monotonic() - waiting.since > MAX_WAIT:
            _fail(waiting, self._full())
            return process
        try:
            if process is not None and not process.alive:
                self._end(process)
                process = None
            if process is None:
                process = self._started()
            reply = process.ask(waiting.job, patience=PATIENCE, impatient=impatient)
        except BaseException as error:
            if process is not None:
                self._end(process)
            _fail(waiting, self._said(error))
            return None
        waiting.answer.set_result(reply)
        return process

    def _said(self, error: BaseException) -> BaseException:
        """What whoever sent the job is told."""
        match error:
            case Late():
                return InvalidRequest(f"it ran for more than {self._room.seconds:g} seconds", code=STOPPED)
            case Gone():
                return EngineDead("The server is stopping.") if self._closed else InvalidRequest(TOO_MUCH_MEMORY, code=STOPPED)
            case Starved():
                return self._full()
        return error

    def _started(self) -> JobProcess:
        with self._setup_lock:
            if self._setup_bytes is None:
                self._setup_bytes = self._setup()
        with self._changed:
            if self._closed:
                raise EngineDead("The server is stopping.")
            process = JobProcess(self._room)
            self._processes.add(process)
        try:
            process.set_up(self._setup_bytes)
        except (Late, Starved, Gone):
            self._end(process)
            raise OctavoError(f"The process for {self._room.name} does not start.") from None
        return process

    def _end(self, process: JobProcess) -> None:
        with self._changed:
            self._processes.discard(process)
        process.end()


TOO_MUCH_MEMORY = "it needed more memory than it may have"
STOPPED = "stopped"
"""The code of an error that says only why a job was stopped, for its owner to put into a sentence."""


def _fail(waiting: _Waiting, error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
        waiting.answer.set_exception(error)
