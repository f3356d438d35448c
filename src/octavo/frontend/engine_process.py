"""One incarnation of the engine process, seen from the frontend: its pipe, its two sockets, its birth and its death.

The supervisor (process_client.py) makes a new one after a crash. Every incarnation has sockets of its own, so that no message
of a dead engine can reach, or be taken for, a message of the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

import octavo
from octavo.config.types import EngineConfig
from octavo.protocol.boot import DEFAULT_BUILDER, EngineBoot
from octavo.protocol.engine import FromEngine, ToEngine

logger = logging.getLogger(__name__)

MAX_IPC_PATH = 100
"""A Unix socket path holds 107 bytes on Linux; room for the file names."""


class EngineProcess:
    """Starts the process at once; nothing here waits for it except `kill`."""

    def __init__(self, config: EngineConfig, *, builder: str = DEFAULT_BUILDER) -> None:
        self._folder = _private_folder()
        self._context = zmq.asyncio.Context()
        self._outbox: zmq.Socket[bytes] = zmq.Context.shadow(self._context.underlying).socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        for socket in (self._outbox, self._inbox):
            socket.setsockopt(zmq.SNDHWM, 0)  # never blocks the event loop; what is live is bounded by the client
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
        to_engine, from_engine = f"ipc://{self._folder}/in", f"ipc://{self._folder}/out"
        self._outbox.bind(to_engine)
        self._inbox.bind(from_engine)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        boot = EngineBoot(
            config=config,
            inbox=to_engine,
            outbox=from_engine,
            log_level=logging.getLogger("octavo").getEffectiveLevel(),
            from_main_thread=threading.current_thread() is threading.main_thread(),
            builder=builder,
        )
        self._popen = _spawn(boot)
        self._release = weakref.finalize(self, _release, self._popen, self._folder)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, message: ToEngine) -> None:
        """Never blocks."""
        self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def receive(self) -> FromEngine:
        """The next message; waits for it, for ever if the process is dead."""
        message: FromEngine = self._decoder.decode(await self._inbox.recv())
        return message

    def unlink_sockets(self) -> None:
        """Once both ends are connected nobody needs the files: however this process ends, it leaves none behind."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def exit_code(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self._popen.poll()

    def describe_exit(self) -> str:
        """How it ended, for people."""
        code = self._popen.poll()
        if code is None:
            return "is still running"
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            hint = " (often the kernel's way to say that memory ran out)" if -code == signal.SIGKILL else ""
            return f"was ended by {name}{hint}"
        return f"ended with exit code {code}"

    def kill(self) -> None:
        """End it now, with everything it started."""
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


def _private_folder() -> str:
    folder = tempfile.mkdtemp(prefix="octavo-")  # mode 0700: nobody else can connect
    if len(folder) > MAX_IPC_PATH - len("/out"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="octavo-", dir="/tmp")
    return folder


def _spawn(boot: EngineBoot) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    # The child must import the same octavo as we did, wherever that came from.
    source = str(Path(octavo.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [environment.get("PYTHONPATH")])])
    popen = subprocess.Popen(
        # -P: a torch.py in the user's folder must not shadow the real one.
        [sys.executable, "-P", "-m", "octavo.engine.process"],
        stdin=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # Ctrl-C in a terminal goes to us alone, and its own children can be ended as a group
    )
    assert popen.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once: the exit code tells
        popen.stdin.write(pickle.dumps(boot))
        popen.stdin.flush()
    return popen


def _kill(popen: subprocess.Popen[bytes]) -> None:
    if popen.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.kill()
    popen.wait()


def _release(popen: subprocess.Popen[bytes], folder: str) -> None:
    _kill(popen)
    if popen.stdin is not None:
        with contextlib.suppress(OSError):
            popen.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)
