import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.kv.prefix_tree import IN_USE, TAIL_CANDIDATES, Node, PrefixTree, common_tokens

SIZE = 4


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def grow(tree: PrefixTree, tokens: list[int], first_block: int, extra_key: str = "") -> list[Node]:
    """Insert `tokens` as full blocks and perhaps a tail, in blocks first_block, first_block+1, ..."""
    nodes: list[Node] = []
    parent = tree.root(extra_key)
    for i in range(0, len(tokens), SIZE):
        part = key(*tokens[i : i + SIZE])
        if len(part) == SIZE * 4:
            parent, _ = tree.insert(parent, part, first_block + i // SIZE)
            nodes.append(parent)
        else:
            tree.insert_tail(parent, part, first_block + i // SIZE)
    return nodes


def test_lookup_is_exact_by_tokens_and_ancestors() -> None:
    tree = PrefixTree(SIZE)
    grow(tree, [1, 2, 3, 4, 5, 6, 7, 8], 10)
    found = tree.match(key(1, 2, 3, 4, 5, 6, 7, 8, 9), "", 8)
    assert [n.block for n in found.nodes] == [10, 11]
    # The same second block under another first block is another node.
    assert tree.match(key(9, 2, 3, 4, 5, 6, 7, 8), "", 8).nodes == []


def test_extra_keys_do_not_share() -> None:
    tree = PrefixTree(SIZE)
    grow(tree, [1, 2, 3, 4], 10, "alice")
    assert tree.match(key(1, 2, 3, 4), "", 4).nodes == []
    assert tree.match(key(1, 2, 3, 4), "bob", 4).nodes == []
    assert len(tree.match(key(1, 2, 3, 4), "alice", 4).nodes) == 1


def test_a_match_ends_inside_a_block() -> None:
    tree = PrefixTree(SIZE)
    grow(tree, [1, 2, 3, 4, 5, 6, 7, 8], 10)
    found = tree.match(key(1, 2, 3, 4, 5, 6, 99), "", 7)
    assert [n.block for n in found.nodes] == [10]
    assert found.tail is not None
    assert (found.tail.block, found.tail_tokens) == (11, 2)


def test_a_limit_cuts_a_full_block_to_a_tail() -> None:
    tree = PrefixTree(SIZE)
    grow(tree, [1, 2, 3, 4, 5, 6, 7, 8], 10)
    found = tree.match(key(1, 2, 3, 4, 5, 6, 7, 8), "", 7)
    assert [n.block for n in found.nodes] == [10]
    assert (found.tail and found.tail.block, found.tail_tokens) == (11, 3)


def test_partial_tails_are_found_and_the_longest_common_one_wins() -> None:
    tree = PrefixTree(SIZE)
    grow(tree, [1, 2, 3, 4, 5, 6], 10)
    grow(tree, [1, 2, 3, 4, 5, 9, 9], 20)
    found = tree.match(key(1, 2, 3, 4, 5, 6, 7, 8), "", 8)
    assert (found.tail and found.tail.block, found.tail_tokens) == (11, 2)
    found = tree.match(key(1, 2, 3, 4, 5, 9, 9, 9), "", 8)
    assert (found.tail and found.tail.block, found.tail_tokens) == (21, 3)
    assert tree.match(key(1, 2, 3, 4, 6), "", 8).tail is None


def test_a_longer_tail_replaces_a_shorter_one_and_a_covered_one_is_not_kept() -> None:
    tree = PrefixTree(SIZE)
    root = tree.root("")
    assert tree.insert_tail(root, key(1, 2), 5) == (True, [])
    tree.retire(5)
    assert tree.insert_tail(root, key(1), 6) == (False, [])
    assert tree.insert_tail(root, key(1, 2, 3), 7) == (True, [5])
    tree.retire(7)
    node, absorbed = tree.insert(root, key(1, 2, 3, 4), 8)
    assert (node.block, absorbed) == (8, [7])
    assert tree.insert_tail(root, key(1, 2, 3), 9) == (False, [])
    assert len(tree) == 1
    assert tree.num_evictable == 0


def test_a_referenced_tail_is_not_replaced() -> None:
    tree = PrefixTree(SIZE)
    root = tree.root("")
    tree.insert_tail(root, key(1, 2), 5)
    assert tree.insert_tail(root, key(1, 2, 3), 7) == (True, [])
    assert 5 in tree


def test_the_first_of_two_equal_blocks_stays() -> None:
    tree = PrefixTree(SIZE)
    first, _ = tree.insert(tree.root(""), key(1, 2, 3, 4), 5)
    second, _ = tree.insert(tree.root(""), key(1, 2, 3, 4), 6)
    assert second is first
    assert 6 not in tree


def test_a_block_cannot_be_in_two_places() -> None:
    tree = PrefixTree(SIZE)
    tree.insert(tree.root(""), key(1, 2, 3, 4), 5)
    with pytest.raises(ValueError, match="already"):
        tree.insert(tree.root(""), key(4, 3, 2, 1), 5)


def test_eviction_takes_leaves_in_the_order_of_their_release() -> None:
    tree = PrefixTree(SIZE)
    grow(tree, [1, 2, 3, 4, 5, 6, 7, 8], 10)
    grow(tree, [1, 2, 3, 4, 9, 9, 9, 9], 20)
    for block in (10, 21, 11):
        tree.retire(block)
    # 10 was released first, but both others are its children.
    assert [tree.evict() for _ in range(4)] == [21, 11, 10, None]
    assert len(tree) == 0
    assert not tree._roots


def test_a_block_that_is_used_again_is_not_evicted() -> None:
    tree = PrefixTree(SIZE)
    grow(tree, [1, 2, 3, 4], 10)
    grow(tree, [5, 6, 7, 8], 20)
    tree.retire(10)
    tree.retire(20)
    tree.revive(10)
    tree.retire(10)
    assert [tree.evict(), tree.evict()] == [20, 10]
    assert tree.evictions == 2


def test_clear_frees_what_nobody_references() -> None:
    tree = PrefixTree(SIZE)
    grow(tree, [1, 2, 3, 4], 10)
    grow(tree, [5, 6, 7, 8], 20)
    tree.retire(20)
    assert tree.clear() == [20]
    assert (len(tree), tree.num_evictable, tree.evict()) == (0, 0, None)
    assert tree.match(key(1, 2, 3, 4), "", 4).nodes == []


def test_another_block_can_stand_in_for_a_node() -> None:
    tree = PrefixTree(SIZE)
    (node,) = grow(tree, [1, 2, 3, 4], 10)
    tree.retire(10)
    assert tree.replace(node, 30) == 10
    assert tree.match(key(1, 2, 3, 4), "", 4).nodes == [node]
    assert node.block == 30
    assert (10 in tree, 30 in tree, tree.num_evictable) == (False, True, 0)
    assert tree.evict() is None


def test_the_search_for_a_tail_is_bounded_and_prefers_the_recent() -> None:
    tree = PrefixTree(64)
    for i in range(10 * TAIL_CANDIDATES):
        tree.insert_tail(tree.root(""), key(1, 100 + i, 7), 10 + i)
    newest = 10 * TAIL_CANDIDATES - 1
    assert tree.match(key(1, 100 + newest, 7), "", 9).tail_tokens == 3
    assert tree.match(key(1, 100, 7), "", 9).tail_tokens == 1


def test_a_tail_that_is_there_is_found_behind_any_number_of_siblings() -> None:
    tree = PrefixTree(64)
    count = 2 * TAIL_CANDIDATES
    for i in range(count):
        tree.insert_tail(tree.root(""), key(1, 100 + i), 10 + i)
    assert tree.insert_tail(tree.root(""), key(1, 100), 500) == (False, [])
    for i in range(count):
        tree.retire(10 + i)
    assert [tree.evict() for _ in range(count + 1)] == [*range(10, 10 + count), None]


def test_salts_leave_nothing_behind() -> None:
    tree = PrefixTree(SIZE)
    for i in range(100):
        grow(tree, [1, 2, 3, 4], 10 + i, f"salt {i} \ud800")
        tree.retire(10 + i)
    while tree.evict() is not None:
        pass
    assert not tree._roots


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_common_tokens(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_tokens(key(*a), key(*b)) == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(5, 60))
def test_eviction_order_equals_a_naive_exact_lru(seed: int, actions: int) -> None:
    rng = random.Random(seed)
    tree = PrefixTree(SIZE)
    block = 1
    refs: dict[int, int] = {}
    released: dict[int, int] = {}
    clock = 0
    chains: list[list[Node]] = []

    def naive_victim() -> int | None:
        leaves = [n for n in tree if not refs[n.block] and not n.children]
        return min(leaves, key=lambda n: released[n.block]).block if leaves else None

    for _ in range(actions):
        action = rng.choice(["insert", "insert", "release", "evict"])
        if action == "insert":
            chain: list[Node] = []
            parent = tree.root("")
            for _ in range(rng.randint(1, 4)):
                node, _ = tree.insert(parent, key(rng.randrange(2), 0, 0, 0), block)
                if node.block == block:
                    refs[block] = 0
                    block += 1
                else:
                    tree.revive(node.block)
                refs[node.block] += 1
                chain.append(node)
                parent = node
            chains.append(chain)
        elif action == "release" and chains:
            for node in reversed(chains.pop(rng.randrange(len(chains)))):
                refs[node.block] -= 1
                if not refs[node.block]:
                    clock += 1
                    released[node.block] = clock
                    tree.retire(node.block)
        elif action == "evict":
            victim = naive_victim()
            assert tree.evict() == victim
            if victim is not None:
                del refs[victim]
        assert tree.num_evictable == sum(not r for r in refs.values())
        assert all((n.released == IN_USE) == (refs[n.block] > 0) for n in tree)
        assert len(tree._heap) <= 2 * len(tree) + 65
