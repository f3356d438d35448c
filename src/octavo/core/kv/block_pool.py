"""The physical blocks of the KV cache: who is free, and how many hold each one that is not.

Owns the free list and the reference counts, nothing else: what a block contains is the prefix tree's and the manager's business.
Block 0 is the reserved null block. It pads block tables and is never handed out.

Invariant: a block is on the free list exactly when its count is 0 and nobody else (the prefix tree) keeps it. A call that would
break this (dropping a reference nobody holds, freeing twice) is a bug in the engine, not a reason to die: it is logged, counted in
`repairs` and ignored.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

NULL_BLOCK = 0


class OutOfBlocks(Exception):
    """No block is free. Callers make room first, so this reaches one request at most."""


class BlockPool:
    """Reference-counted blocks 1 .. num_blocks-1. Every operation is O(1)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"A pool needs the null block and at least one more, got {num_blocks} blocks.")
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.repairs = 0
        self._free = list(range(num_blocks - 1, 0, -1))
        self._is_free = bytearray(b"\x01" * num_blocks)
        self._is_free[NULL_BLOCK] = 0

    @property
    def capacity(self) -> int:
        """Blocks that can hold tokens."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, block: int) -> bool:
        return bool(self._is_free[block])

    def take(self) -> int:
        """A free block, with one reference.

        Raises:
            OutOfBlocks: none is free.
        """
        if not self._free:
            raise OutOfBlocks("The KV cache has no free block.")
        block = self._free.pop()
        self._is_free[block] = 0
        self.refs[block] = 1
        return block

    def retain(self, block: int) -> bool:
        """One more holder. True when it is the first."""
        if block == NULL_BLOCK or self._is_free[block]:
            self._repair(f"block {block} was shared while free")
            return False
        self.refs[block] += 1
        return self.refs[block] == 1

    def drop(self, block: int) -> bool:
        """One holder less. True when it was the last: the caller then caches the block or gives it back."""
        if self.refs[block] <= 0:
            self._repair(f"block {block} was released more often than it was held")
            return False
        self.refs[block] -= 1
        return self.refs[block] == 0

    def give_back(self, block: int) -> None:
        """Put an unreferenced block on the free list."""
        if block == NULL_BLOCK or self._is_free[block] or self.refs[block]:
            self._repair(f"block {block} was freed while free or in use")
            return
        self._is_free[block] = 1
        self._free.append(block)

    def _repair(self, what: str) -> None:
        self.repairs += 1
        logger.error("KV cache accounting: %s; ignored (please report this).", what)
