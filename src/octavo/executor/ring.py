"""One writer, several readers, one piece of shared memory: how a plan reaches the ranks of a host.

A message is written once, in pieces if it is large; a few bytes in a pipe wake each reader, so that a waiting one costs nothing. What
all readers have read may be overwritten. The kernel's calls around the pipe order the memory accesses.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable

import numpy as np

RING_BYTES = 8 << 20
MAX_READERS = 64
_LINE = 64
"""Bytes of a reader's own counters: no two share a cache line."""
_HEADER = struct.Struct("<I?")
"""(bytes of the piece, whether it is the last of its message)"""
_PAUSE = 2e-4


def make_memory(size: int = RING_BYTES) -> int:
    """A file descriptor of memory for a ring with `size` bytes of messages; gone when all who have it are."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("octavo-steps")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, MAX_READERS * _LINE + size)
    return descriptor


class _Memory:
    """The mapped memory: counters of the readers, then the messages."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(descriptor, MAX_READERS * _LINE + size)
        self.counters = np.frombuffer(self._map, np.uint64, MAX_READERS * _LINE // 8).reshape(MAX_READERS, -1)
        """[readers, 8]: bytes read, messages taken, messages done."""

    def put(self, position: int, data: memoryview) -> None:
        start = position % self.size
        first = min(len(data), self.size - start)
        base = MAX_READERS * _LINE
        self._map[base + start : base + start + first] = data[:first]
        self._map[base : base + len(data) - first] = data[first:]

    def get(self, position: int, count: int) -> bytes:
        start = position % self.size
        first = min(count, self.size - start)
        base = MAX_READERS * _LINE
        return self._map[base + start : base + start + first] + self._map[base : base + count - first]


class RingWriter:
    """Owns the memory and the writing ends of the pipes.

    Args:
        pipes: one a reader.
    """

    def __init__(self, descriptor: int, pipes: list[int], size: int = RING_BYTES) -> None:
        self._memory = _Memory(descriptor, size)
        self._pipes = pipes
        self._written = 0
        self.sent = 0
        """Messages."""

    def send(self, data: bytes, check: Callable[[], None] = lambda: None) -> None:
        """Hand a message to every reader.

        Args:
            check: called while there is no room; what it raises ends the wait.

        Raises:
            BrokenPipeError: a reader is gone.
        """
        view, piece = memoryview(data), self._memory.size // 2
        for start in range(0, max(1, len(view)), piece):
            part = view[start : start + piece]
            while self._written + len(part) - int(self._memory.counters[: len(self._pipes), 0].min()) > self._memory.size:
                check()
                time.sleep(_PAUSE)
            self._memory.put(self._written, part)
            self._written += len(part)
            header = _HEADER.pack(len(part), start + piece >= len(view))
            for pipe in self._pipes:
                os.write(pipe, header)
        self.sent += 1

    def taken(self, reader: int) -> int:
        """Messages that a reader has taken."""
        return int(self._memory.counters[reader, 1])

    def done(self, reader: int) -> int:
        """Messages that a reader has dealt with."""
        return int(self._memory.counters[reader, 2])

    def close(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = []


class RingReader:
    """The reading end of one reader.

    Args:
        pipe: file descriptor of its pipe's reading end.
    """

    def __init__(self, descriptor: int, index: int, pipe: int, size: int = RING_BYTES) -> None:
        self._memory = _Memory(descriptor, size)
        self._mine = self._memory.counters[index]
        self._pipe = pipe
        self._read = 0

    def receive(self) -> bytes | None:
        """The next message; waits for it. None: the writer is gone."""
        pieces = []
        while True:
            header = self._exactly(_HEADER.size)
            if header is None:
                return None
            count, last = _HEADER.unpack(header)
            pieces.append(self._memory.get(self._read, count))
            self._read += count
            self._mine[0] = self._read
            if last:
                self._mine[1] += 1
                return b"".join(pieces)

    def finished(self) -> None:
        """The message taken last has been dealt with."""
        self._mine[2] += 1

    def _exactly(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            more = os.read(self._pipe, count - len(data))
            if not more:
                return None
            data += more
        return data
