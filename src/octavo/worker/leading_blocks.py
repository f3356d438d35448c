"""Which running requests begin with the same blocks, for attention that reads a common prefix once.

Blocks are shared at admission only (tables are append-only, and what a running request adds is its own), so a request's first
blocks, as its `SlotInit` lists them, tell all. They are kept sorted: those with the most in common are neighbours, and a request
that comes or goes changes two places. Steady decoding changes nothing, and gets the same answer object again.
"""

from __future__ import annotations

import bisect

import numpy as np

from octavo.attention.base import SharedPrefixes
from octavo.protocol.step import Int32, SlotInit, StepPlan

MIN_SHARED_TOKENS = 128
"""Common beginnings shorter than this are not reported."""


class LeadingBlocks:
    """Owns the first blocks of the requests in `num_slots` slots."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self._keys: list[bytes] = []
        """Sorted: blocks as big-endian numbers, so that bytes compare as lists of blocks do."""
        self._slots: list[int] = []
        """Of each key."""
        self._common: list[int] = []
        """Blocks that each key has in common with the one before it."""
        self._key_of: list[bytes | None] = [None] * num_slots
        self._rank: Int32 | None = None
        """[slots] place of each slot among the keys, while it is up to date; empty where nobody has enough in common."""
        self._last: tuple[bytes, SharedPrefixes | None] | None = None

    def update(self, plan: StepPlan) -> None:
        """Follow the requests that leave and enter with `plan`."""
        for slot in plan.free_slots.tolist():
            self._leave(slot)
        for init in plan.init:
            self._leave(init.slot)
            self._enter(init)

    def shared(self, slots: Int32) -> SharedPrefixes | None:
        """Who of the rows in `slots` begins with the same blocks; None if nobody does."""
        rank = self._ranked()
        if len(slots) < 2 or not len(rank):
            return None
        asked = slots.tobytes()
        if self._last is None or self._last[0] != asked:
            self._last = asked, self._compare(rank[slots])
        return self._last[1]

    def _ranked(self) -> Int32:
        if self._rank is None:
            enough = bool(self._common) and max(self._common) * self._block_size >= MIN_SHARED_TOKENS
            self._rank = np.zeros(len(self._key_of) if enough else 0, np.int32)
            if enough:
                self._rank[self._slots] = np.arange(len(self._slots), dtype=np.int32)
        return self._rank

    def _compare(self, rank: Int32) -> SharedPrefixes | None:
        order = np.argsort(rank, kind="stable").astype(np.int32)
        rank = rank[order]
        # Two rows have in common what all the keys between them have in common with their neighbours.
        blocks = np.zeros(len(rank), np.int32)
        blocks[1:] = np.minimum.reduceat(np.array(self._common[: int(rank[-1]) + 1], np.int32), rank[:-1] + 1)
        tokens = blocks * np.int32(self._block_size)
        return SharedPrefixes(order, tokens) if int(tokens.max()) >= MIN_SHARED_TOKENS else None

    def _enter(self, init: SlotInit) -> None:
        key = init.block_ids.astype(">i4").tobytes()
        place = bisect.bisect_left(self._keys, key)
        if place < len(self._keys):
            self._common[place] = _common_blocks(key, self._keys[place])
        self._common.insert(place, _common_blocks(self._keys[place - 1], key) if place else 0)
        self._keys.insert(place, key)
        self._slots.insert(place, init.slot)
        self._key_of[init.slot] = key
        self._changed()

    def _leave(self, slot: int) -> None:
        key = self._key_of[slot]
        if key is None:
            return
        place = bisect.bisect_left(self._keys, key)
        while self._slots[place] != slot:
            place += 1
        if place + 1 < len(self._keys):
            self._common[place + 1] = min(self._common[place], self._common[place + 1]) if place else 0
        del self._keys[place], self._slots[place], self._common[place]
        self._key_of[slot] = None
        self._changed()

    def _changed(self) -> None:
        self._rank = self._last = None


def _common_blocks(a: bytes, b: bytes) -> int:
    """Leading blocks that two keys have in common."""
    size = min(len(a), len(b))
    differ = np.frombuffer(a, np.int32, size // 4) != np.frombuffer(b, np.int32, size // 4)
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size // 4
