"""The process that does jobs: one at a time, with bounded memory and time, and nothing to lose.

Run as `python -m`, with the name of a module that has `open_room(setup) -> answer`, where `answer` turns a job into a reply. Frames come
in on standard input and go out on standard output, each behind its length: first the setup, then jobs. A job that finds a way around the
bounds of its own code ends this process and no other: memory is limited by the kernel, and so is the time of one job, in case whoever
started us is not there to end it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from octavo.protocol.boot import die_with_starter

LENGTH_BYTES = 8
READY = b"ready"
NICE = 2
"""Streams that are being written go first."""

Answer = Callable[[bytes], bytes]


def read_frame(source: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    head = source.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "big")
    data = source.read(size)
    return data if len(data) == size else None


def write_frame(target: BinaryIO, data: bytes) -> None:
    target.write(len(data).to_bytes(LENGTH_BYTES, "big"))
    target.write(data)
    target.flush()


def _yield_to_others() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    with contextlib.suppress(OSError):  # a session of its own is a group of its own to the scheduler, if that looks at groups
        Path("/proc/self/autogroup").write_text(str(NICE))


def _limit_memory(more: int) -> None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more,) * 2)


def _limit_time(seconds: float) -> None:
    """The kernel ends us when one job takes far too long, whatever holds the interpreter."""
    with contextlib.suppress(OSError, ValueError):
        soft = int(time.process_time() + 2 * seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main() -> None:
    """Arguments: the module, bytes of memory that jobs may take beyond what an idle process has, seconds that one may take."""
    die_with_starter()
    module, memory, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not end up among the frames
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = read_frame(source)
    if setup is None:
        return
    answer: Answer = importlib.import_module(module).open_room(setup)
    _limit_memory(memory)
    _yield_to_others()  # from now on: whoever sent the first job waits for the start too
    write_frame(target, READY)
    while (job := read_frame(source)) is not None:
        _limit_time(seconds)
        write_frame(target, answer(job))


if __name__ == "__main__":
    main()
