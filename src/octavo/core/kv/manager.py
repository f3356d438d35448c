"""The KV cache as the core sees it: sequences in slots, over one or two kinds of cache.

A kind is a set of layers that need the same tokens, with a pool, a tree and tables of its own (`tables.py`). Most models have one.
Where some layers have a sliding window and others see everything, the former are a second kind, whose blocks are let go of behind the
window. All kinds agree on which tokens a sequence has: tables grow together, and a match is what every kind can give.

The first kind decides about admission. The second is made large enough for what can run at once; should it run out all the same, the
scheduler makes room as it does for the first.

Workers know one table a slot: the part of the second kind begins at column `CacheKind.first_column`, and names its own blocks. In copies,
where nothing else tells the kinds apart, the blocks of the second one begin at `CacheKind.first_block`.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from octavo.core.kv.block_pool import BlockPool, OutOfBlocks
from octavo.core.kv.prefix_tree import PrefixTree, common_tokens
from octavo.core.kv.tables import BlockRun, BlockTables, Match
from octavo.protocol.step import CacheShape, Int32, window_blocks


class KVManager:
    """Block tables of `max_seqs` slots."""

    def __init__(self, shape: CacheShape, max_seqs: int, max_model_len: int, prefix_caching: bool) -> None:
        self.block_size = shape.block_size
        self.prefix_caching = prefix_caching
        sizes = [(shape.num_blocks, shape.window)]
        self._offsets = [(0, 0)]
        """Of each kind: what is added to its columns, and to its blocks in copies, for the workers."""
        if (kind := shape.sliding) is not None:
            sizes.append((kind.num_blocks, kind.window))
            self._offsets.append((kind.first_column, kind.first_block))
        self.kinds = tuple(
            BlockTables(blocks, shape.block_size, max_seqs, max_model_len, prefix_caching, window) for blocks, window in sizes
        )
        self._main = self.kinds[0]
        self._others = self.kinds[1:]
        self._sliding = tuple(kind for kind in self.kinds if kind.window is not None)

    # Figures of the first kind

    @property
    def pool(self) -> BlockPool:
        return self._main.pool

    @property
    def tree(self) -> PrefixTree:
        return self._main.tree

    @property
    def table(self) -> Int32:
        """[slots, blocks of the longest sequence], padded with the null block."""
        return self._main.table

    @property
    def lengths(self) -> Int32:
        """[slots] blocks of each sequence, those included that its window has left behind."""
        return self._main.lengths

    @property
    def published(self) -> Int32:
        """[slots] leading full blocks that have a node in the tree."""
        return self._main.published

    @property
    def copies(self) -> int:
        return self._main.copies

    @property
    def capacity(self) -> int:
        """Blocks that can hold tokens."""
        return self._main.capacity

    @property
    def num_used(self) -> int:
        """Blocks held by somebody."""
        return self._main.num_used

    @property
    def available(self) -> int:
        """Blocks that a sequence can grow by right now, in every kind."""
        return min(kind.available for kind in self.kinds) if self._others else self._main.available

    @property
    def room(self) -> int:
        """Blocks that admission divides among requests: of the first kind."""
        return self._main.available

    @property
    def slides(self) -> bool:
        """Whether blocks are let go of while their sequence goes on."""
        return bool(self._sliding)

    @property
    def window_blocks(self) -> int:
        """Blocks that the window of the kind that slides spans; 0: none does."""
        return -(-(self._sliding[0].window or 0) // self.block_size) if self._sliding else 0

    @property
    def longest(self) -> int | None:
        """Most tokens of one sequence that has the cache for itself; None: any number."""
        window = self._main.window
        if window is not None and self.capacity >= window_blocks(window, self.block_size):
            return None
        return self.capacity * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def live_blocks(self, slot: int) -> int:
        """Blocks in the table of `slot`."""
        return int(self._main.lengths[slot] - self._main.first[slot])

    def needed(self, blocks: int, match: Match) -> int:
        """Blocks that a sequence of `blocks` blocks will take in the end, beyond those of `match`."""
        if self._main.window is None:
            return blocks - len(match.blocks)
        return min(blocks, window_blocks(self._main.window, self.block_size)) - match.num_live

    def growth(self) -> Int32 | None:
        """[slots] most blocks by which each can still grow, on balance; None: no window says."""
        if self._main.window is None:
            return None
        growth: Int32 = np.maximum(window_blocks(self._main.window, self.block_size) - (self._main.lengths - self._main.first), 1)
        return growth

    # Matching

    def match_cached(self, tokens: array[int], extra_key: str, max_tokens: int) -> Match:
        """The longest cached prefix of `tokens`, up to `max_tokens`."""
        paths = [kind.find(tokens, extra_key, max_tokens) for kind in self.kinds]
        full = min(len(path.nodes) for path in paths)
        tails = [kind.tail_of(path, full) for kind, path in zip(self.kinds, paths, strict=True)]
        tail_tokens = min(*(common for _, common in tails), max_tokens - full * self.block_size)
        pairs = list(zip(self.kinds, paths, strict=True))
        while full and not all(kind.reachable(path, full) for kind, path in pairs):
            full, tail_tokens = full - 1, 0
        matches = [kind.match_path(path, full, block, tail_tokens) for (kind, path), (block, _) in zip(pairs, tails, strict=True)]
        return replace(matches[0], others=tuple(matches[1:]))

    def match_run(self, run: BlockRun, tokens: array[int], max_tokens: int) -> Match:
        """The KV that `tokens` has in common with another sequence, up to `max_tokens`."""
        agreed = max(0, min(common_tokens(run.tokens[: run.length].tobytes(), tokens.tobytes()), max_tokens))
        matches = [kind.match_run(part, agreed) for kind, part in zip(self.kinds, (run, *run.others), strict=True)]
        found = [match for match in matches if match is not None]
        return replace(found[0], others=tuple(found[1:])) if len(found) == len(matches) else Match()

    def num_idle(self, match: Match) -> int:
        """How many blocks sharing `match` takes away from `available`, at most."""
        return max(kind.num_idle(part) for kind, part in self._parts(match))

    def idle_room(self, match: Match) -> int:
        """How many blocks sharing `match` takes away from `room`."""
        return self._main.num_idle(match)

    def _parts(self, match: Match) -> list[tuple[BlockTables, Match]]:
        others = match.others or tuple(Match() for _ in self._others)
        return [(self._main, match), *zip(self._others, others, strict=True)]

    # Growth of one slot

    def attach(self, slot: int, match: Match) -> None:
        """Begin the empty table of `slot` with the shared blocks of `match` (its tail is `copy_tail`'s)."""
        for kind, part in self._parts(match):
            kind.attach(slot, part)

    def copy_tail(self, slot: int, match: Match, fence: int) -> list[tuple[int, int]]:
        """Append a block that will be a copy of the match's tail, and pin the source until step `fence` has settled.

        Returns:
            (source, destination) of the copies, in the numbers for the workers.

        Raises:
            OutOfBlocks: no block for the copy; nothing has changed.
        """
        if self._others and any(kind.available - kind.num_idle(part) < 1 for kind, part in self._parts(match)):
            raise OutOfBlocks("No block for the copy of a partly matching one.")
        copies = []
        for (kind, part), (_, base) in zip(self._parts(match), self._offsets, strict=True):
            source, destination = kind.copy_tail(slot, part, fence)
            copies.append((source + base, destination + base))
        return copies

    def extend(self, slot: int, num_tokens: int) -> None:
        """Take blocks until the table of `slot` covers `num_tokens` tokens.

        Raises:
            OutOfBlocks: too few; nothing has changed.
        """
        self._check_room(self.blocks_for(num_tokens) - int(self.lengths[slot]))
        for kind in self.kinds:
            kind.extend(slot, num_tokens)

    def extend_each(self, slots: npt.NDArray[np.intp]) -> None:
        """Take one block for each of `slots`.

        Raises:
            OutOfBlocks: too few; nothing has changed.
        """
        self._check_room(len(slots))
        for kind in self.kinds:
            kind.extend_each(slots)

    def _check_room(self, blocks: int) -> None:
        if self._others and blocks > self.available:
            raise OutOfBlocks(f"{blocks} blocks wanted, {self.available} available.")

    # What workers are told

    def last_entries(self, slots: npt.NDArray[np.intp]) -> Int32:
        """[3, n]: slot, column, block of the last table entry of each of `slots`, in every kind."""
        parts = []
        for kind, (column, _) in zip(self.kinds, self._offsets, strict=True):
            index = kind.lengths[slots] - 1
            parts.append(np.stack([slots, index + column, kind.table[slots, index]]).astype(np.int32))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def entries(self, slot: int, begin: int) -> list[tuple[int, int, int]]:
        """(slot, column, block) of the table entries of `slot` from `begin` on, in every kind."""
        return [entry for number in range(len(self.kinds)) for entry in self._entries(number, slot, begin)]

    def first_blocks(self, slot: int) -> tuple[Int32, list[tuple[int, int, int]]]:
        """The table of a slot that has just been seated: of the first kind as it is, of the others as entries."""
        blocks = np.array([block for _, _, block in self._entries(0, slot, 0)], np.int32)
        return blocks, [entry for number in range(1, len(self.kinds)) for entry in self._entries(number, slot, 0)]

    def _entries(self, number: int, slot: int, begin: int) -> list[tuple[int, int, int]]:
        kind, (column, _) = self.kinds[number], self._offsets[number]
        first = int(kind.first[slot])
        blocks = kind.table[slot, : kind.lengths[slot]].tolist()
        if first and first < len(blocks):
            # Kernels that read a little before the window ignore what they find, but it must be numbers.
            blocks[:first] = [blocks[first]] * first
        return [(slot, column + i, block) for i, block in enumerate(blocks[begin:], begin)]

    # Sharing what a slot has computed

    def publish(self, slot: int, tokens: array[int], settled: int, extra_key: str) -> None:
        """Put the full blocks among the first `settled` tokens of `slot` in the tree."""
        for kind in self.kinds:
            kind.publish(slot, tokens, settled, extra_key)

    def behind_window(self, slots: npt.NDArray[np.intp], settled: Int32) -> npt.NDArray[np.intp]:
        """Those of `slots`, of which `settled` [slots] tokens are settled, that have blocks to let go of."""
        if not self._sliding:
            return slots[:0]
        kind = self._sliding[0]
        assert kind.window is not None
        return slots[(settled - (kind.window - 1)) // self.block_size > kind.first[slots]]

    def slide(self, slot: int, tokens: array[int], settled: int, extra_key: str) -> None:
        """Let go of the blocks that the window of `slot` has left behind."""
        for kind in self._sliding:
            kind.slide(slot, tokens, settled, extra_key)

    def free_duplicates(self) -> None:
        """Free the cached blocks that only a sequence with the same tokens in a block of its own still references: the tree takes
        that block instead. For when memory is short."""
        for kind in self.kinds:
            kind.free_duplicates()

    # Letting go

    def release(self, slot: int, tokens: array[int], settled: int, extra_key: str) -> None:
        """Empty the table of `slot`. Its settled tokens, tail included, stay in the tree; the rest is free."""
        self.drop(self.detach(slot, tokens, settled, extra_key))

    def detach(self, slot: int, tokens: array[int], settled: int, extra_key: str) -> BlockRun:
        """Empty the table of `slot` but keep its blocks: the caller owns the returned run and drops it in the end."""
        return _joined([kind.detach(slot, tokens, settled, extra_key) for kind in self.kinds])

    def view(self, slot: int, tokens: array[int], settled: int) -> BlockRun:
        """The blocks of `slot` as a run that owns nothing, for `match_run`."""
        return _joined([kind.view(slot, tokens, settled) for kind in self.kinds])

    def drop(self, run: BlockRun) -> None:
        """Let go of the blocks of a detached run, last one first."""
        for kind, part in zip(self.kinds, (run, *run.others), strict=True):
            kind.drop(part)

    def settle(self, step: int) -> None:
        """Step `step` and all before it have settled: let go of what was pinned for them."""
        for kind in self.kinds:
            kind.settle(step)

    def lower_fence(self, step: int, fence: int) -> None:
        """Step `step` will never run: what was pinned for it waits for `fence` instead."""
        for kind in self.kinds:
            kind.lower_fence(step, fence)

    @property
    def pinned(self) -> list[int]:
        """Blocks that are sources of copies not made yet; of all kinds."""
        return [block for kind in self.kinds for block in kind.pinned]

    def reset(self, runs: list[BlockRun]) -> None:
        """Forget all cached tokens. Sequences in slots and in `runs` go on with their blocks, which will not be shared."""
        for number, kind in enumerate(self.kinds):
            kind.reset([(run, *run.others)[number] for run in runs])

    def close(self, slot: int) -> None:
        """Keep the blocks of `slot` from here on out of the tree."""
        for kind in self.kinds:
            kind.close(slot)

    def is_closed(self, slot: int) -> bool:
        return self._main.is_closed(slot)


def _joined(runs: list[BlockRun]) -> BlockRun:
    runs[0].others = tuple(runs[1:])
    return runs[0]
