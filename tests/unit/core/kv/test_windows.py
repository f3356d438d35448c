"""Caches of layers with sliding windows: what is let go of, what is found again, and what two kinds agree on."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest

from octavo.core.kv.block_pool import OutOfBlocks
from octavo.core.kv.manager import KVManager
from octavo.core.kv.prefix_tree import NO_BLOCK, PrefixTree
from octavo.protocol.step import CacheKind, CacheShape, window_blocks
from tests.support.core_engine import check_blocks

SIZE = 4
FIRST_BLOCK, FIRST_COLUMN = 100, 50


def sliding(window: int = 6, num_blocks: int = 20, **options: bool) -> KVManager:
    return KVManager(CacheShape(num_blocks, SIZE, 1, window), 4, 80, **({"prefix_caching": True} | options))


def two_kinds(window: int = 6, num_blocks: int = 30, second: int = 12) -> KVManager:
    kind = CacheKind(second, 1, window, FIRST_BLOCK, FIRST_COLUMN)
    return KVManager(CacheShape(num_blocks, SIZE, 1, None, kind), 4, 80, prefix_caching=True)


def ids(count: int) -> array[int]:
    return array("i", range(1, count + 1))


def run_to(kv: KVManager, slot: int, tokens: array[int], step: int = 4) -> None:
    """Compute `tokens` in `slot` (whose match is attached), some at a time, as the engine does."""
    begin = int(kv.lengths[slot]) * SIZE
    for settled in range(min(begin + step, len(tokens)), len(tokens) + step, step):
        kv.extend(slot, min(settled, len(tokens)))
        kv.publish(slot, tokens, min(settled, len(tokens)), "")
        kv.slide(slot, tokens, min(settled, len(tokens)), "")


def test_blocks_behind_the_window_are_let_go_of() -> None:
    kv = sliding()
    run_to(kv, 0, ids(40))
    assert kv.lengths[0] == 10
    # The next token is at position 40 and sees from 35 on, in block 8; the ninth block is the last.
    assert kv.kinds[0].first[0] == 8
    assert kv.table[0, :10].tolist()[:8] == [0] * 8
    assert kv.num_used == 2
    kv.release(0, ids(40), 40, "")
    assert kv.num_used == 0
    check_blocks(kv, Counter())


@pytest.mark.parametrize("caching", [True, False])
def test_a_sequence_of_any_length_fits_into_a_cache_of_a_window(caching: bool) -> None:
    kv = sliding(num_blocks=1 + window_blocks(6, SIZE), prefix_caching=caching)
    assert kv.longest is None
    run_to(kv, 0, ids(80))
    assert kv.lengths[0] == 20
    kv.release(0, ids(80), 80, "")
    assert kv.num_used == 0
    assert sliding(num_blocks=window_blocks(6, SIZE)).longest == SIZE * (window_blocks(6, SIZE) - 1)


def test_a_prefix_is_found_as_long_as_its_window_is_there() -> None:
    kv = sliding()
    tokens = ids(40)
    run_to(kv, 0, tokens)
    kv.release(0, tokens, 40, "")
    match = kv.match_cached(tokens, "", 40)
    assert match.num_tokens == 40
    assert match.blocks[:8] == [0] * 8
    kv.attach(1, match)
    assert kv.num_used == 2, "only what the window reaches is taken"
    kv.release(1, tokens, 40, "")
    # Others take the blocks that were left behind first: they are the oldest.
    kv.extend(2, 17 * SIZE)
    assert kv.match_cached(tokens, "", 40).num_tokens == 40
    assert kv.match_cached(tokens, "", 20).num_tokens == 0
    kv.extend(2, 18 * SIZE)
    assert kv.match_cached(tokens, "", 40).num_tokens == 0
    kv.release(2, array("i"), 0, "")
    check_blocks(kv, Counter())


def test_lost_blocks_are_replaced_by_whoever_computes_them_again() -> None:
    kv = sliding(num_blocks=12)
    tokens = ids(40)
    run_to(kv, 0, tokens)
    kv.release(0, tokens, 40, "")
    kv.extend(1, 9 * SIZE)
    kv.release(1, array("i"), 0, "")
    assert kv.match_cached(tokens, "", 20).num_tokens == 0
    kv.attach(2, kv.match_cached(tokens, "", 20))
    run_to(kv, 2, tokens[:20])
    kv.release(2, tokens[:20], 20, "")
    assert kv.match_cached(tokens, "", 20).num_tokens == 20
    check_blocks(kv, Counter())


def test_a_fork_takes_what_is_there_and_nothing_less_than_its_window() -> None:
    kv = sliding(prefix_caching=False)
    tokens = ids(40)
    kv.extend(0, 41)
    kv.slide(0, tokens, 40, "")
    run = kv.view(0, tokens, 40)
    assert kv.match_run(run, tokens, 40).num_tokens == 40
    for fewer in (39, 20, 3):  # 3: a part of the first block alone
        assert kv.match_run(run, tokens, fewer).num_tokens == 0, "blocks of its window are gone"
    match = kv.match_run(run, tokens, 40)
    kv.attach(1, match)
    assert kv.num_used == 3
    kv.release(0, tokens, 40, "")
    kv.release(1, tokens, 40, "")
    assert kv.num_used == 0


def test_a_sliding_tree_keeps_the_way_to_what_is_still_there() -> None:
    tree = PrefixTree(SIZE, sliding=True)
    data = ids(12).tobytes()
    parent = tree.root("")
    for block in (1, 2, 3):
        parent, _ = tree.insert(parent, data[16 * (block - 1) : 16 * block], block)
    for block in (1, 3, 2):
        tree.retire(block)
    assert (tree.evict(), tree.num_evictable) == (1, 2)
    found = tree.match(data, "", 12).nodes
    assert [node.block for node in found] == [NO_BLOCK, 2, 3]
    assert tree.evict() == 3
    assert tree.evict() == 2
    assert tree.evict() is None
    assert tree.match(data, "", 12).nodes == []
    assert not tree._roots, "nodes without a block that lead nowhere are gone"


def test_two_kinds_grow_together_and_slide_apart() -> None:
    kv = two_kinds()
    tokens = ids(40)
    run_to(kv, 0, tokens)
    full, window = kv.kinds
    assert (full.num_used, window.num_used) == (10, 2)
    assert kv.available == min(29 - 10, 11 - 2)
    entries = kv.entries(0, 9)
    assert [(slot, column) for slot, column, _ in entries] == [(0, 9), (0, FIRST_COLUMN + 9)]
    assert [block for _, _, block in entries] == [int(full.table[0, 9]), int(window.table[0, 9])]
    blocks, more = kv.first_blocks(0)
    assert blocks.tolist() == full.table[0, :10].tolist()
    # A kernel may load a little before the window: what it finds is a block of this sequence.
    assert [block for _, _, block in more] == [int(window.table[0, 8])] * 8 + window.table[0, 8:10].tolist()
    kv.release(0, tokens, 40, "")
    assert (full.num_used, window.num_used) == (0, 0)


def test_a_match_is_what_both_kinds_can_give() -> None:
    kv = two_kinds()
    tokens = ids(43)
    run_to(kv, 0, tokens)
    kv.release(0, tokens, 43, "")
    match = kv.match_cached(tokens, "", 42)
    assert (match.num_tokens, len(match.blocks), len(match.others)) == (42, 10, 1)
    kv.attach(1, match)
    copies = kv.copy_tail(1, match, fence=0)
    assert [source >= FIRST_BLOCK for source, _ in copies] == [False, True]
    assert [destination >= FIRST_BLOCK for _, destination in copies] == [False, True]
    kv.settle(0)
    kv.release(1, tokens, 42, "")
    # The second kind is small: its blocks of the middle are soon gone, those of the first are not.
    run_to(kv, 2, array("i", range(200, 230)))
    assert len(kv.kinds[0].find(tokens, "", 42).nodes) == 10
    assert kv.match_cached(tokens, "", 24).num_tokens == 0
    kv.release(2, array("i", range(200, 230)), 30, "")
    for kind in kv.kinds:
        check_blocks(kind, Counter())


def test_a_kind_that_is_full_stops_both() -> None:
    kv = two_kinds(second=4)
    with pytest.raises(OutOfBlocks):
        kv.extend(0, 4 * SIZE)
    assert kv.lengths[0] == 0
    kv.extend(0, 3 * SIZE)
    with pytest.raises(OutOfBlocks):
        kv.extend(1, 1)
    assert kv.kinds[0].num_used == 3
