"""Block tables of one kind of cache: which physical blocks hold each running sequence, and how sequences share them.

Owns the block table of every slot, the prefix tree and the pool, and decides when a block is free. Everything that holds a block
holds a reference: a block table, a `Holding` (a sequence that ended but may be forked), a pin (the source of a copy the device has
not made yet). A request whose own block duplicates a cached one also references the cached one, which keeps the tree's invariant
(every ancestor of a referenced node is referenced) and therefore makes *evictable = unreferenced*.

Writes are exclusive by construction: a sequence starts behind its shared full blocks, or inside a private copy of a partly matching
one (copy-on-write), and only ever appends. So the steady state needs no check before a write.

Where every layer has a sliding window, a sequence lets go of the blocks that its window has left behind (`slide`): their entries
become the null block. What is settled decides that, so no step in flight reads them. The last published block is kept in any case:
it is where the sequence's place in the tree is known from. Then the tree's invariant is the weaker one of a sliding tree.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo.core.kv.block_pool import NULL_BLOCK, BlockPool, OutOfBlocks
from octavo.core.kv.prefix_tree import Node, PrefixTree
from octavo.protocol.step import Int32

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Match:
    """KV that exists already for the first `num_tokens` tokens of a request."""

    blocks: list[int] = field(default_factory=list)
    """Full blocks to share; the null block for leading ones that no window reaches."""
    chain: list[Node] = field(default_factory=list)
    """Tree nodes of the first `len(chain)` of them."""
    tail_block: int = NULL_BLOCK
    """Block to copy, when the match ends inside a block."""
    num_tokens: int = 0
    closed: bool = False
    """The blocks predate a cache reset: what is built on them must not enter the tree."""
    others: tuple[Match, ...] = ()
    """The same tokens in the further kinds of cache."""

    @property
    def num_live(self) -> int:
        """Full blocks that are there."""
        return len(self.blocks) - _leading_nulls(self.blocks)


@dataclass
class BlockRun:
    """The blocks of one sequence outside of any slot: `length` tokens of KV, of which `tokens` are the ids."""

    tokens: array[int]
    length: int
    blocks: list[int]
    chain: list[Node]
    closed: bool
    others: tuple[BlockRun, ...] = ()
    """The same sequence in the further kinds of cache."""


@dataclass(frozen=True)
class CachedPath:
    """What a tree knows of the beginning of a request."""

    nodes: list[Node]
    """Of its full blocks; in a sliding tree some may have lost theirs."""
    tail: Node | None
    tail_tokens: int
    live_from: list[int]
    """[len(nodes) + 1] the first of the unbroken run of blocks that ends before each place."""


class BlockTables:
    """Block tables of `max_seqs` slots over one pool.

    Args:
        window: how many tokens a token sees, itself included, in the layers of this kind; None: all.
    """

    def __init__(
        self, num_blocks: int, block_size: int, max_seqs: int, max_model_len: int, prefix_caching: bool, window: int | None = None
    ) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.window = window
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(block_size, sliding=window is not None)
        self.table: Int32 = np.zeros((max_seqs, -(-max_model_len // block_size)), np.int32)
        """[slots, blocks of the longest sequence], padded with the null block."""
        self.lengths: Int32 = np.zeros(max_seqs, np.int32)
        """[slots] entries of each row of the table, blocks let go of included."""
        self.first: Int32 = np.zeros(max_seqs, np.int32)
        """[slots] leading entries of each row whose blocks the window has left behind."""
        self.published: Int32 = np.zeros(max_seqs, np.int32)
        """[slots] leading full blocks that have a node in the tree."""
        self.copies = 0
        self._chains: list[list[Node]] = [[] for _ in range(max_seqs)]
        self._closed = [False] * max_seqs
        self._pins: list[tuple[int, int]] = []

    # Figures

    @property
    def capacity(self) -> int:
        """Blocks that can hold tokens."""
        return self.pool.capacity

    @property
    def available(self) -> int:
        """Blocks that can be taken right now: free ones and cached ones nobody references."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_used(self) -> int:
        """Blocks held by somebody."""
        return self.pool.capacity - self.available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # Matching

    def find(self, tokens: array[int], extra_key: str, max_tokens: int) -> CachedPath:
        """What is cached of the beginning of `tokens`, up to `max_tokens`."""
        if not self.prefix_caching or max_tokens <= 0:
            return CachedPath([], None, 0, [0])
        found = self.tree.match(tokens.tobytes(), extra_key, max_tokens)
        live_from, begin = [0], 0
        for i, node in enumerate(found.nodes):
            if node.block < 0:
                begin = i + 1
            live_from.append(begin)
        return CachedPath(found.nodes, found.tail, found.tail_tokens, live_from)

    def reachable(self, path: CachedPath, full: int) -> bool:
        """Whether all blocks are there that a sequence needs which goes on behind `full` blocks of `path`."""
        return path.live_from[full] <= self._first_needed(full * self.block_size, full)

    def tail_of(self, path: CachedPath, full: int) -> tuple[int, int]:
        """Block behind the first `full` ones of `path` to copy from, and how many of its tokens are common; (null, 0): none."""
        node, tokens = (path.nodes[full], self.block_size) if full < len(path.nodes) else (path.tail, path.tail_tokens)
        return (NULL_BLOCK, 0) if node is None or node.block < 0 else (node.block, tokens)

    def match_path(self, path: CachedPath, full: int, tail_block: int, tail_tokens: int) -> Match:
        """The first `full` blocks of `path` and `tail_tokens` tokens of one more, for which `reachable` holds."""
        size = full * self.block_size
        first = self._first_needed(size, full)
        blocks = [NULL_BLOCK] * first + [node.block for node in path.nodes[first:full]]
        return Match(blocks, path.nodes[:full], tail_block if tail_tokens else NULL_BLOCK, size + tail_tokens)

    def match_run(self, run: BlockRun, num_tokens: int) -> Match | None:
        """The KV of the first `num_tokens` tokens of another sequence; None: its window has left some of it behind."""
        full, tail = divmod(num_tokens, self.block_size)
        chain = run.chain[:full]
        kept = self.prefix_caching and not run.closed
        # Without its tail the match must be good as well: there may be no block for the copy.
        first = self._first_needed(num_tokens - tail, len(chain) if kept else full)
        left_behind = _leading_nulls(run.blocks)
        if first < min(full, left_behind) or (tail and full < left_behind):
            return None
        blocks = [NULL_BLOCK] * first + run.blocks[first:full]
        return Match(blocks, chain, run.blocks[full] if tail else NULL_BLOCK, num_tokens, run.closed)

    def _first_needed(self, num_tokens: int, published: int) -> int:
        """The first block that a sequence of `num_tokens` tokens still reads, or holds as the last of the `published` ones."""
        if self.window is None:
            return 0
        return min(max(0, num_tokens - self.window + 1) // self.block_size, max(0, published - 1))

    def num_idle(self, match: Match) -> int:
        """How many blocks sharing `match` takes away from `available`."""
        refs = self.pool.refs
        idle = sum(1 for block in match.blocks if block != NULL_BLOCK and not refs[block])
        return idle + (match.tail_block != NULL_BLOCK and not refs[match.tail_block])

    # Growth of one slot

    def attach(self, slot: int, match: Match) -> None:
        """Begin the empty table of `slot` with the shared blocks of `match` (its tail is `copy_tail`'s)."""
        count, first = len(match.blocks), _leading_nulls(match.blocks)
        for block in match.blocks[first:]:
            self._retain(block)
        for node, block in zip(match.chain[first:], match.blocks[first:], strict=False):
            if node.block != block:
                self._retain(node.block)
        self.table[slot, :count] = match.blocks
        self.lengths[slot] = count
        self.first[slot] = first
        self.published[slot] = len(match.chain)
        self._chains[slot] = list(match.chain)
        self._closed[slot] = match.closed

    def copy_tail(self, slot: int, match: Match, fence: int) -> tuple[int, int]:
        """Append a block that will be a copy of the match's tail, and pin the source until step `fence` has settled.

        Returns:
            (source, destination) of the copy.

        Raises:
            OutOfBlocks: no block for the copy; nothing has changed.
        """
        self.pin(match.tail_block, fence)
        try:
            self.extend(slot, (int(self.lengths[slot]) + 1) * self.block_size)
        except OutOfBlocks:
            self._unpin_last()
            raise
        self.copies += 1
        return match.tail_block, int(self.table[slot, self.lengths[slot] - 1])

    def extend(self, slot: int, num_tokens: int) -> None:
        """Take blocks until the table of `slot` covers `num_tokens` tokens.

        Raises:
            OutOfBlocks: too few; nothing has changed.
        """
        have, want = int(self.lengths[slot]), self.blocks_for(num_tokens)
        if want <= have:
            return
        self.table[slot, have:want] = self._take(want - have)
        self.lengths[slot] = want

    def extend_each(self, slots: npt.NDArray[np.intp]) -> None:
        """Take one block for each of `slots`.

        Raises:
            OutOfBlocks: too few; nothing has changed.
        """
        self.table[slots, self.lengths[slots]] = self._take(len(slots))
        self.lengths[slots] += 1

    def slide(self, slot: int, tokens: array[int], settled: int, extra_key: str) -> None:
        """Let go of the blocks that the window of `slot`, of which `settled` tokens are settled, has left behind."""
        if self.window is None or (settled - self.window + 1) // self.block_size <= self.first[slot]:
            return
        self.publish(slot, tokens, settled, extra_key)
        chain, first = self._chains[slot], int(self.first[slot])
        published = len(chain) if self.prefix_caching and not self._closed[slot] else settled // self.block_size
        stop = self._first_needed(settled, published)
        for i, block in enumerate(self.table[slot, first:stop].tolist(), first):
            if i < len(chain) and chain[i].block != block:
                self._drop(chain[i].block)
            self._drop(block)
        self.table[slot, first:stop] = NULL_BLOCK
        self.first[slot] = max(first, stop)

    # Sharing what a slot has computed

    def publish(self, slot: int, tokens: array[int], settled: int, extra_key: str) -> None:
        """Put the full blocks among the first `settled` tokens of `slot` in the tree."""
        if not self.prefix_caching or self._closed[slot]:
            return
        chain, size = self._chains[slot], self.block_size
        done, full = len(chain), settled // size
        if done >= full:
            return
        parent = chain[-1] if chain else self.tree.root(extra_key)
        for i, block in enumerate(self.table[slot, done:full].tolist(), done):
            try:
                node, absorbed = self.tree.insert(parent, tokens[i * size : (i + 1) * size].tobytes(), block)
            except ValueError as error:
                logger.error("Prefix cache: %s; this sequence is not shared any further (please report this).", error)
                self._closed[slot] = True
                break
            if node.block != block and not self._stand_in(node, block, 0):
                self._retain(node.block)
            if absorbed:
                self._give_back(absorbed)
            chain.append(node)
            parent = node
        self.published[slot] = len(chain)

    def _publish_tail(self, slot: int, tokens: array[int], settled: int, extra_key: str) -> None:
        full, chain = settled // self.block_size, self._chains[slot]
        if not self.prefix_caching or self._closed[slot] or len(chain) != full or settled % self.block_size == 0:
            return
        block = int(self.table[slot, full])
        if block in self.tree:
            return
        parent = chain[-1] if chain else self.tree.root(extra_key)
        _, absorbed = self.tree.insert_tail(parent, tokens[full * self.block_size : settled].tobytes(), block)
        self._give_back(absorbed)

    def free_duplicates(self) -> None:
        """Free the cached blocks that only a sequence with the same tokens in a block of its own still references: the tree takes
        that block instead. For when memory is short."""
        for slot, chain in enumerate(self._chains):
            first = int(self.first[slot])
            for node, block in zip(chain[first:], self.table[slot, first : max(first, len(chain))].tolist(), strict=True):
                if node.block != block:
                    self._stand_in(node, block, 1)

    def _stand_in(self, node: Node, block: int, refs: int) -> bool:
        """Make `block` the block of `node` if the present one has no references but `refs` of the caller, which are dropped."""
        if self.pool.refs[node.block] != refs or node.block not in self.tree or block in self.tree:
            return False
        old = self.tree.replace(node, block)
        if not refs or self.pool.drop(old):
            self.pool.give_back(old)
        return True

    # Letting go

    def release(self, slot: int, tokens: array[int], settled: int, extra_key: str) -> None:
        """Empty the table of `slot`. Its settled tokens, tail included, stay in the tree; the rest is free."""
        self.drop(self.detach(slot, tokens, settled, extra_key))

    def detach(self, slot: int, tokens: array[int], settled: int, extra_key: str) -> BlockRun:
        """Empty the table of `slot` but keep its blocks: the caller owns the returned run and drops it in the end."""
        self.publish(slot, tokens, settled, extra_key)
        self._publish_tail(slot, tokens, settled, extra_key)
        run = self.view(slot, tokens, settled)
        self.table[slot, : len(run.blocks)] = NULL_BLOCK
        self.lengths[slot] = self.published[slot] = self.first[slot] = 0
        self._chains[slot] = []
        self._closed[slot] = False
        return run

    def view(self, slot: int, tokens: array[int], settled: int) -> BlockRun:
        """The blocks of `slot` as a run that owns nothing, for `match_run`."""
        blocks = [int(block) for block in self.table[slot, : self.lengths[slot]]]
        return BlockRun(tokens, settled, blocks, self._chains[slot], self._closed[slot])

    def drop(self, run: BlockRun) -> None:
        """Let go of the blocks of a detached run, last one first."""
        for i in range(len(run.blocks) - 1, _leading_nulls(run.blocks) - 1, -1):
            self._drop(run.blocks[i])
            if i < len(run.chain) and run.chain[i].block != run.blocks[i]:
                self._drop(run.chain[i].block)
        run.blocks, run.chain, run.length = [], [], 0

    def pin(self, block: int, fence: int) -> None:
        """Keep `block` until step `fence` has settled."""
        self._retain(block)
        self._pins.append((fence, block))

    def _unpin_last(self) -> None:
        self._drop(self._pins.pop()[1])

    def settle(self, step: int) -> None:
        """Step `step` and all before it have settled: let go of what was pinned for them."""
        if self._pins:
            done = [block for fence, block in self._pins if fence <= step]
            self._pins = [pin for pin in self._pins if pin[0] > step]
            for block in done:
                self._drop(block)

    def lower_fence(self, step: int, fence: int) -> None:
        """Step `step` will never run: what was pinned for it waits for `fence` instead."""
        self._pins = [(min(f, fence) if f == step else f, block) for f, block in self._pins]

    @property
    def pinned(self) -> list[int]:
        return [block for _, block in self._pins]

    def reset(self, runs: list[BlockRun]) -> None:
        """Forget all cached tokens. Sequences in slots and in `runs` go on with their blocks, which will not be shared."""
        self._give_back(self.tree.clear())
        self._closed = [bool(length) or closed for length, closed in zip(self.lengths, self._closed, strict=True)]
        for run in runs:
            run.closed = True

    def close(self, slot: int) -> None:
        """Keep the blocks of `slot` from here on out of the tree."""
        self._closed[slot] = True

    def is_closed(self, slot: int) -> bool:
        return self._closed[slot]

    # Blocks

    def _take(self, count: int) -> list[int]:
        while self.pool.num_free < count:
            block = self.tree.evict()
            if block is None:
                raise OutOfBlocks(f"{count} blocks wanted, {self.pool.num_free} free.")
            self.pool.give_back(block)
        return [self.pool.take() for _ in range(count)]

    def _retain(self, block: int) -> None:
        if self.pool.retain(block) and block in self.tree:
            self.tree.revive(block)

    def _drop(self, block: int) -> None:
        if self.pool.drop(block):
            if block in self.tree:
                self.tree.retire(block)
            else:
                self.pool.give_back(block)

    def _give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self.pool.give_back(block)


def _leading_nulls(blocks: list[int]) -> int:
    """How many of the first blocks have been let go of."""
    return next((i for i, block in enumerate(blocks) if block != NULL_BLOCK), len(blocks))
