"""One incarnation of a process that we started, seen from here: its pipe, its two sockets, its birth and its death.

Whoever supervises it makes a new one after a crash. Every incarnation has sockets of its own, so that no message of a dead
process can reach, or be taken for, a message of the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from octavo.config.scratch import remove_scratch, scratch_folder
from octavo.protocol.boot import GREETING, how_it_ended, start_process

Sent = TypeVar("Sent")
Received = TypeVar("Received")

RECONNECT_MS = 10
MAX_IPC_PATH = 100
"""A Unix socket path holds 107 bytes on Linux; room for the file names."""


@dataclass(frozen=True)
class Addresses:
    """What a child must know to reach us."""

    inbox: str
    """ZMQ address that it binds, to pull messages from."""
    outbox: str
    """ZMQ address that it connects to, to push messages."""
    from_main_thread: bool
    """It is started by our main thread: it may be killed when that thread ends."""


class ChildProcess(Generic[Sent, Received]):
    """Starts the process at once; nothing here waits for it except `kill`.

    Args:
        module: run as `python -m`, with what `boot` makes pickled on its standard input. That must fit into a pipe's buffer
            unless the child reads it at once.
        received: the type of its messages, for the decoder.
        pass_fds: descriptors that it inherits, under the same numbers.
    """

    def __init__(self, module: str, boot: Callable[[Addresses], object], received: Any, *, pass_fds: Sequence[int] = ()) -> None:
        self._folder = _private_folder()
        self._context = zmq.asyncio.Context()
        self._outbox: zmq.Socket[bytes] = zmq.Context.shadow(self._context.underlying).socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        for socket in (self._outbox, self._inbox):
            socket.setsockopt(zmq.SNDHWM, 0)  # never blocks the event loop; what is live is bounded by the client
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
        inbox, outbox = f"ipc://{self._folder}/in", f"ipc://{self._folder}/out"
        # Connecting, not binding: what is sent before the child has its end is kept for it.
        self._outbox.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._outbox.connect(inbox)
        self._outbox.send(GREETING, zmq.NOBLOCK)
        self._inbox.bind(outbox)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(received)
        addresses = Addresses(inbox, outbox, threading.current_thread() is threading.main_thread())
        self._popen = start_process(module, boot(addresses), pass_fds, own_session=True)
        self._killed = False
        """By us."""
        self._release = weakref.finalize(self, _release, self._popen, self._folder)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, message: Sent) -> None:
        """Never blocks."""
        self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def receive(self) -> Received:
        """The next message; waits for it, for ever if the process is dead."""
        message: Received = self._decoder.decode(await self._inbox.recv())
        return message

    def unlink_sockets(self) -> None:
        """Once both ends are connected nobody needs the files: however this process ends, it leaves none behind."""
        remove_scratch(self._folder)

    def exit_code(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self._popen.poll()

    def describe_exit(self) -> str:
        """How it ended, for people."""
        code = self._popen.poll()
        return "is still running" if code is None else how_it_ended(code, by_us=self._killed)

    def kill(self) -> None:
        """End it now, with everything it started."""
        self._killed = self._popen.poll() is None
        _kill(self._popen)

    def close(self) -> None:
        """Kill it if it still runs, wait for its end, and free sockets and files. May be called twice.

        Blocks while the kernel frees the process's memory: `aclose` does not.
        """
        self._close_sockets()
        self._release()

    async def aclose(self) -> None:
        self._close_sockets()  # on this thread: they belong to its event loop
        await asyncio.to_thread(self._release)

    def _close_sockets(self) -> None:
        self._outbox.close(linger=0)
        self._inbox.close(linger=0)
        self._context.term()


def _private_folder() -> Path:
    folder = scratch_folder()
    if len(str(folder)) > MAX_IPC_PATH - len("/out"):
        remove_scratch(folder)
        folder = scratch_folder("/tmp")
    return folder


def _kill(popen: subprocess.Popen[bytes]) -> None:
    if popen.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.kill()
    popen.wait()


def _release(popen: subprocess.Popen[bytes], folder: Path) -> None:
    _kill(popen)
    if popen.stdin is not None:
        with contextlib.suppress(OSError):
            popen.stdin.close()
    remove_scratch(folder)
