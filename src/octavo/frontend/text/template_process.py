"""Chat templates from requests, run where they can be killed.

The sandbox bounds what a template usually does. It cannot bound everything that a program may make of small steps: lists nested in
themselves sixty times, sums of lists, numbers of a million digits; inside one call of the interpreter no clock is looked at and no other
thread runs. So a template that comes with a request never runs in the server: a worker process renders it, one at a time, and is ended
when it is late. `MAX_WORKERS` of them, started when they are needed; requests beyond that wait in line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

from octavo.errors import EngineDead, InvalidRequest, OctavoError
from octavo.frontend.text.chat_template import ChatTemplates
from octavo.frontend.text.conversation_text import Conversation
from octavo.frontend.text.template_sandbox import MAX_CHARS, MAX_SECONDS
from octavo.frontend.text.template_worker import LENGTH_BYTES, TOO_MUCH_MEMORY
from octavo.protocol.boot import child_environment

MAX_WORKERS = 2
START_SECONDS = 60.0
"""A worker that does not come up in this time never will."""
GRACE = 2.0
"""Seconds beyond the sandbox's own limit, after which a worker is ended."""
_LONGEST_REPLY = 16 * MAX_CHARS
_MODULE = "octavo.frontend.text.template_worker"


class _Late(Exception):
    """The worker did not answer in time."""


class _Gone(Exception):
    """The worker has ended."""


class TemplateProcesses:
    """Renders conversations by templates that nobody vouches for. Safe to use from any thread."""

    def __init__(self) -> None:
        # Each thread of the pool waits for one worker, which the kernel ends with the thread: threads of a pool last as long as it.
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._closed = False

    async def render(self, templates: ChatTemplates, conversation: Conversation) -> str:
        """The text of `conversation`.

        Raises:
            InvalidRequest: see `ChatTemplates.render`; or the template took too long, or too much memory.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="octavo-template")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._render, templates, conversation)

    def close(self) -> None:
        """End the workers; a rendering that is going on ends with an error."""
        with self._lock:
            self._closed = True
            workers, self._idle = list(self._workers), []
        for worker in workers:
            worker.kill()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _worker(self) -> _Worker:
        with self._lock:
            while self._idle:
                idle = self._idle.pop()
                if idle.alive:
                    return idle
                self._workers.discard(idle)
                idle.end()
            if self._closed:
                raise EngineDead("The server is stopping.")
            worker = _Worker()
            self._workers.add(worker)
        try:
            worker.wait_ready()
        except (_Late, _Gone):
            self._end(worker)
            raise OctavoError("The process that renders chat templates of requests does not start.") from None
        return worker

    def _end(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.end()

    def _render(self, templates: ChatTemplates, conversation: Conversation) -> str:
        job = json.dumps({"templates": _fields(replace(templates, named={})), "conversation": _fields(conversation)}, default=str).encode()
        worker = self._worker()
        try:
            reply = worker.ask(job)
        except _Late:
            self._end(worker)
            raise InvalidRequest(
                f"The chat template was stopped: it ran for more than {MAX_SECONDS:g} seconds.", param="chat_template"
            ) from None
        except _Gone:
            self._end(worker)
            raise InvalidRequest(f"The chat template was stopped: {TOO_MUCH_MEMORY}.", param="chat_template") from None
        except BaseException:
            self._end(worker)
            raise
        with self._lock:
            self._idle.append(worker)
        if isinstance(text := reply.get("text"), str):
            return text
        raise InvalidRequest(str(reply.get("error")), param=reply.get("param"), code=reply.get("code"))


def _fields(data: Any) -> dict[str, Any]:
    """Without the deep copy of `asdict`: a conversation may be megabytes."""
    values = {field.name: getattr(data, field.name) for field in fields(data)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


class _Worker:
    """One process, started at once."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**child_environment(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C in a terminal goes to the server alone
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Raises _Late or _Gone when it does not come up."""
        self._read_frame(time.monotonic() + START_SECONDS)

    def ask(self, job: bytes) -> dict[str, Any]:
        """The reply to a job.

        Raises:
            _Late, _Gone: there is none, and the worker is of no more use.
        """
        assert self._process.stdin is not None
        try:  # it waits for jobs, so that writing never blocks for long
            self._process.stdin.write(len(job).to_bytes(LENGTH_BYTES, "big"))
            self._process.stdin.write(job)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise _Gone from None
        reply: dict[str, Any] = json.loads(self._read_frame(time.monotonic() + MAX_SECONDS + GRACE))
        return reply

    def _read_frame(self, deadline: float) -> bytes:
        size = int.from_bytes(self._read(LENGTH_BYTES, deadline), "big")
        if size > _LONGEST_REPLY:
            raise _Gone
        return self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        parts: list[bytes] = []
        while size:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise _Late
            part = os.read(pipe, min(size, 1 << 20))
            if not part:
                raise _Gone
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
