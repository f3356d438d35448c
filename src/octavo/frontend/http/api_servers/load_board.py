"""A few counts that API servers share through a piece of memory: each writes its own, everybody reads the sums.

What is waiting in all of them together bounds the queue at the door, where a message would come too late.
"""

from __future__ import annotations

import mmap
import os
import tempfile

COUNTS = 2
"""Requests being served over HTTP; sequences in the engine."""
_ITEM = 8


class LoadBoard:
    """`slots` rows in a file that has no name, known by its descriptor. A store of eight bytes is never seen half done."""

    def __init__(self, fd: int, slots: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, slots * COUNTS * _ITEM)
        self._counts = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, slots: int) -> LoadBoard:
        with tempfile.TemporaryFile() as file:
            file.truncate(slots * COUNTS * _ITEM)
            return cls(os.dup(file.fileno()), slots)

    def set(self, slot: int, count: int, value: int) -> None:
        self._counts[slot * COUNTS + count] = value

    def clear(self, slot: int) -> None:
        """The API server there has ended."""
        for count in range(COUNTS):
            self.set(slot, count, 0)

    def total(self, count: int) -> int:
        return sum(self._counts[count::COUNTS].tolist())

    def close(self) -> None:
        self._counts.release()
        self._map.close()
        os.close(self.fd)
