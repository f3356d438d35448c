"""What a frontend hands the engine process at birth, pickled through its standard input.

The pipe stays open afterwards: when it closes, the parent is gone and the child ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import octavo
from octavo.config.types import EngineConfig

GREETING = b""
"""The first thing that a child gets: it says nothing before, so that both connections stand when the socket files are removed."""
DEFAULT_BUILDER = "octavo.engine.build:build_server_engine"

PR_SET_PDEATHSIG = 1

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""For every process that adds up over GPUs: NVLink's multicast stays unused. A program that ends while it uses it can leave the GPUs of a whole
host unusable for everybody on it."""


@dataclass(frozen=True)
class EngineBoot:
    config: EngineConfig
    inbox: str
    """ZMQ address that the engine binds, to pull `ToEngine` messages from."""
    outbox: str
    """ZMQ address the engine pushes `FromEngine` messages to."""
    log_level: int
    from_main_thread: bool
    """The parent's main thread starts the process: it may be killed when that thread ends."""
    builder: str = DEFAULT_BUILDER
    """`module:function` that makes the engine core; tests put a scripted one here."""


PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}


def child_environment() -> dict[str, str]:
    """For processes that we start: they must import the same octavo as we did, wherever that came from.

    Threads of torch's operations sleep while they wait, unless the user has said how they are to: on cores that others use too, those
    that spin wait for each other's turns, and an operation takes ten times as long.
    """
    source = str(Path(octavo.__file__).parents[1])
    return {**PATIENT, **os.environ, **NO_MULTICAST, "PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])}


def start_process(module: str, boot: object, pass_fds: Sequence[int], *, own_session: bool = False) -> subprocess.Popen[bytes]:
    """`python -m module` with `boot` pickled on its standard input, which stays open: when it closes, we are gone, and so is the process.

    Args:
        own_session: Ctrl-C in a terminal goes to us alone, and its own children can be ended as a group.
    """
    process = subprocess.Popen(
        # -P: a torch.py in the user's folder must not shadow the real one.
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        env=child_environment(),
        pass_fds=pass_fds,
        start_new_session=own_session,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once: the exit code tells
        process.stdin.write(pickle.dumps(boot))
        process.stdin.flush()
    return process


def how_it_ended(code: int, *, by_us: bool = False) -> str:
    """What a process's exit code means, for people.

    Args:
        by_us: we have killed it, so that nobody need look for who did.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (often the kernel's way to say that memory ran out)" if -code == signal.SIGKILL and not by_us else ""
    return f"was ended by {name}{hint}"


def die_with_starter() -> None:
    """The kernel ends us with the thread that started us."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_parent(from_main_thread: bool) -> None:
    """No orphan, ever: a closed pipe ends us; and so does the kernel, even when native code holds the interpreter.

    The kernel's signal comes when the *thread* that started us ends, so it is asked for only if that was the main thread.
    """
    if from_main_thread:
        die_with_starter()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)  # not sys.exit: whatever the main thread is doing, nobody waits for it any more

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
