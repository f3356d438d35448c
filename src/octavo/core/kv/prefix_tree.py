"""Which blocks hold which tokens: the tree behind automatic prefix caching.

A node is one physical block. Its key is (parent node, exact token bytes), and each extra key (cache salt, adapter) has a root of
its own, so two requests share a block only when every token before it is the same: no hash is trusted. A *full* node has
block_size tokens and may have children; a *partial* node has fewer, is the tail of a sequence that ended, and stays a leaf.

Reference counts live in the block pool. The owner of this tree keeps one invariant: every ancestor of a referenced node is
referenced. So the unreferenced nodes are exactly what can be evicted, and a parent always outlives its children. Eviction takes
the unreferenced leaf that was released longest ago (exact LRU, a heap with lazy deletion of bounded size).

A *sliding* tree belongs to layers with a window, whose sequences let go of old blocks while newer ones stay in use. There any
unreferenced block can be evicted. A node with children then stays without a block (`NO_BLOCK`) as long as it has any: what comes
after it is found through it, and a sequence with the same tokens may give it a block again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

TOKEN_BYTES = 4
TAIL_CANDIDATES = 16
"""Children compared, most recent first, when looking for the longest common part of a block."""
IN_USE = -1
"""`Node.released` of a node that is referenced, or no longer in the tree."""

NO_BLOCK = -2
"""`Node.block` of a node whose block was evicted before its children."""


class Node:
    """A block in the tree (or, with block -1 and the extra key for a key, a root)."""

    __slots__ = ("block", "children", "key", "parent", "released")

    def __init__(self, block: int, parent: Node | None, key: bytes) -> None:
        self.block = block
        self.parent = parent
        self.key = key
        self.children: dict[bytes, dict[bytes, Node]] | None = None
        """First token -> token bytes -> child, least recently inserted or copied first."""
        self.released = IN_USE
        """When the last reference went, on the tree's own clock."""

    @property
    def num_tokens(self) -> int:
        return len(self.key) // TOKEN_BYTES


@dataclass(frozen=True)
class TreeMatch:
    """Cached tokens of a prompt: whole blocks to share, then `tail_tokens` tokens of one more block, to be copied."""

    nodes: list[Node] = field(default_factory=list)
    tail: Node | None = None
    tail_tokens: int = 0


class PrefixTree:
    """Exact-match index of full and partial blocks."""

    def __init__(self, block_size: int, *, sliding: bool = False) -> None:
        self.block_size = block_size
        self.sliding = sliding
        self.evictions = 0
        self._width = block_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []
        self._clock = 0
        self._pushes = 0
        self._num_evictable = 0

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def __iter__(self) -> Iterator[Node]:
        return iter(self._by_block.values())

    @property
    def num_evictable(self) -> int:
        """Nodes that nobody references."""
        return self._num_evictable

    def root(self, extra_key: str) -> Node:
        key = extra_key.encode("utf-8", "surrogatepass")
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(-1, None, key)
        return root

    # Lookup

    def match(self, data: bytes, extra_key: str, max_tokens: int) -> TreeMatch:
        """The longest cached prefix of `data` (int32 token ids as bytes), at most `max_tokens` long."""
        node = self._roots.get(extra_key.encode("utf-8", "surrogatepass"))
        if node is None:
            return TreeMatch()
        width, end, offset = self._width, min(len(data), max_tokens * TOKEN_BYTES), 0
        nodes: list[Node] = []
        while offset + width <= end and node.children:
            key = data[offset : offset + width]
            child = node.children.get(key[:TOKEN_BYTES], {}).get(key)
            if child is None:
                break
            nodes.append(child)
            node = child
            offset += width
        tail, tail_tokens = self._longest_common(node, data[offset : min(offset + width, end)])
        return TreeMatch(nodes, tail, tail_tokens)

    def _longest_common(self, parent: Node, want: bytes) -> tuple[Node | None, int]:
        bucket = parent.children.get(want[:TOKEN_BYTES]) if parent.children and want else None
        if not bucket:
            return None, 0
        best, best_tokens = None, 0
        for node in islice(reversed(bucket.values()), TAIL_CANDIDATES):
            common = common_tokens(node.key, want)
            if common > best_tokens and node.block != NO_BLOCK:
                best, best_tokens = node, common
        if best is not None and len(bucket) > 1:
            bucket[best.key] = bucket.pop(best.key)
        return best, best_tokens

    # Growth

    def insert(self, parent: Node, key: bytes, block: int) -> tuple[Node, list[int]]:
        """Add a full block under `parent`, which the caller references (or a root).

        Returns:
            The node for `key`: the one that was there first, or a new one for `block`. And the blocks of partial nodes that it
            makes superfluous, no longer in the tree and unreferenced: the caller frees them.

        Raises:
            ValueError: `block` is in the tree already, elsewhere. An engine bug; the caller stops sharing this sequence.
        """
        siblings = parent.children.get(key[:TOKEN_BYTES]) if parent.children else None
        if not siblings:
            return self._link(parent, key, block), []
        node = siblings.get(key)
        if node is not None:
            if node.block == NO_BLOCK:
                self._place(node, block)
            return node, []
        return self._link(parent, key, block), self._absorb(siblings, key)

    def insert_tail(self, parent: Node, key: bytes, block: int) -> tuple[bool, list[int]]:
        """Add the partly filled last block of a sequence, unless some child already covers its tokens.

        Returns:
            Whether it was added, and the blocks of shorter partial nodes it replaces, as for `insert`.
        """
        siblings = (parent.children or {}).get(key[:TOKEN_BYTES]) or {}
        if key in siblings:
            return False, []
        for node in islice(reversed(siblings.values()), TAIL_CANDIDATES):
            if node.key.startswith(key) and node.block != NO_BLOCK:
                return False, []
        self._link(parent, key, block)
        return True, self._absorb(siblings, key)

    def _link(self, parent: Node, key: bytes, block: int) -> Node:
        node = Node(NO_BLOCK, parent, key)
        self._place(node, block)
        if parent.children is None:
            parent.children = {}
        first = key[:TOKEN_BYTES]
        siblings = parent.children.get(first)
        if siblings is None:
            parent.children[first] = {key: node}
        else:
            siblings[key] = node
        return node

    def _place(self, node: Node, block: int) -> None:
        if block in self._by_block:
            raise ValueError(f"block {block} is in the prefix tree already")
        node.block = block
        self._by_block[block] = node

    def _absorb(self, siblings: dict[bytes, Node], key: bytes) -> list[int]:
        """Remove the unreferenced partial siblings whose tokens are a proper prefix of `key`."""
        covered = [
            node
            for node in islice(reversed(siblings.values()), TAIL_CANDIDATES)
            if node.released != IN_USE and len(node.key) < len(key) and key.startswith(node.key)
        ]
        blocks = [node.block for node in covered]
        for node in covered:
            self._remove(node)
        return blocks

    # References

    def revive(self, block: int) -> None:
        """`block` got its first reference."""
        node = self._by_block[block]
        if node.released != IN_USE:
            node.released = IN_USE
            self._num_evictable -= 1

    def retire(self, block: int) -> None:
        """`block` lost its last reference: it may be evicted from now on, after all that were retired before."""
        node = self._by_block[block]
        if node.released != IN_USE:
            return
        self._clock += 1
        node.released = self._clock
        self._num_evictable += 1
        if self.sliding or not node.children:
            self._push(node)

    def replace(self, node: Node, block: int) -> int:
        """Let `block`, referenced and holding the same tokens, stand for `node`. Returns the block it had, no longer in the tree."""
        old = node.block
        self._place(node, block)
        if node.released != IN_USE:
            node.released = IN_USE
            self._num_evictable -= 1
        del self._by_block[old]
        return old

    # Eviction

    def evict(self) -> int | None:
        """Let go of the block that was released longest ago (of a leaf, unless the tree slides), and return it; None when every node is
        referenced."""
        while self._heap:
            released, _, node = heapq.heappop(self._heap)
            if released != node.released or (node.children and not self.sliding):
                continue
            block = node.block
            if node.children:
                self._vacate(node)
            else:
                self._remove(node)
            self.evictions += 1
            return block
        return None

    def clear(self) -> list[int]:
        """Forget every node. Returns the blocks that nobody references; the others are freed when their holders let go."""
        free = [node.block for node in self._by_block.values() if node.released != IN_USE]
        for node in self._by_block.values():
            node.released = IN_USE
        self._by_block.clear()
        self._roots.clear()
        self._heap.clear()
        self._num_evictable = 0
        return free

    def _vacate(self, node: Node) -> None:
        """Take the block from an unreferenced node."""
        node.released = IN_USE
        self._num_evictable -= 1
        del self._by_block[node.block]
        node.block = NO_BLOCK

    def _remove(self, node: Node) -> None:
        """Take an unreferenced leaf out of the tree, and with it the nodes without a block that led to nothing else."""
        self._vacate(node)
        while (parent := node.parent) is not None and parent.children is not None:
            first = node.key[:TOKEN_BYTES]
            bucket = parent.children[first]
            del bucket[node.key]
            if not bucket:
                del parent.children[first]
            if parent.children:
                return
            parent.children = None
            if parent.parent is None:
                self._roots.pop(parent.key, None)
                return
            if parent.block != NO_BLOCK:
                if parent.released != IN_USE and not self.sliding:
                    self._push(parent)
                return
            node = parent

    def _push(self, node: Node) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (node.released, self._pushes, node))
        if len(self._heap) > 2 * len(self._by_block) + 64:
            leaves = [n for n in self._by_block.values() if n.released != IN_USE and (self.sliding or not n.children)]
            self._heap = [(n.released, i, n) for i, n in enumerate(leaves)]
            heapq.heapify(self._heap)


def common_tokens(a: bytes, b: bytes) -> int:
    """Length in tokens of the longest common prefix of two runs of int32 token ids."""
    end = min(len(a), len(b))
    if a[:end] == b[:end]:
        return end // TOKEN_BYTES
    low, high = 0, end // TOKEN_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low
