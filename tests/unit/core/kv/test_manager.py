from array import array
from collections import Counter

import pytest

from octavo.core.kv.block_pool import OutOfBlocks
from octavo.core.kv.manager import KVManager
from octavo.core.kv.tables import BlockRun, Match
from octavo.protocol.step import CacheShape
from tests.support.core_engine import check_blocks

SIZE = 4


def make(num_blocks: int = 20, *, prefix_caching: bool = True) -> KVManager:
    return KVManager(CacheShape(num_blocks, SIZE, 1), max_seqs=4, max_model_len=40, prefix_caching=prefix_caching)


def serve(kv: KVManager, slot: int, tokens: list[int], extra_key: str = "") -> Match:
    """Seat `tokens` in `slot`: match, copy, grow."""
    ids = array("i", tokens)
    match = kv.match_cached(ids, extra_key, len(tokens) - 1)
    kv.attach(slot, match)
    if match.tail_block:
        kv.copy_tail(slot, match, fence=0)
    kv.extend(slot, len(tokens))
    return match


def finish(kv: KVManager, slot: int, tokens: list[int], extra_key: str = "") -> None:
    kv.release(slot, array("i", tokens), len(tokens), extra_key)


def row(kv: KVManager, slot: int) -> list[int]:
    return [int(b) for b in kv.table[slot, : kv.lengths[slot]]]


def test_blocks_are_taken_on_demand() -> None:
    kv = make()
    kv.attach(0, Match())
    kv.extend(0, 1)
    assert kv.lengths[0] == 1
    kv.extend(0, 4)
    assert kv.lengths[0] == 1
    kv.extend(0, 5)
    assert kv.lengths[0] == 2
    assert kv.num_used == 2
    finish(kv, 0, [])
    assert kv.num_used == 0


def test_out_of_blocks_changes_nothing() -> None:
    kv = make(4)
    kv.extend(0, 8)
    with pytest.raises(OutOfBlocks):
        kv.extend(0, 20)
    assert row(kv, 0) == [1, 2]
    assert kv.available == 1


def test_released_tokens_are_found_again_to_the_token() -> None:
    kv = make()
    serve(kv, 0, list(range(10)))
    finish(kv, 0, list(range(10)))
    assert kv.available == 19
    match = kv.match_cached(array("i", [*range(9), 77, 78]), "", 10)
    assert match.num_tokens == 9
    assert match.blocks == [1, 2]
    assert match.tail_block == 3


def test_the_last_prompt_token_is_always_computed() -> None:
    kv = make()
    serve(kv, 0, list(range(8)))
    finish(kv, 0, list(range(8)))
    match = serve(kv, 0, list(range(8)))
    assert match.num_tokens == 7
    assert match.blocks == [1]
    assert row(kv, 0)[0] == 1
    assert row(kv, 0)[1] != 2, "the second block must be a copy"
    assert kv.copies == 1


def test_a_copy_source_is_pinned_until_its_fence() -> None:
    kv = make(4)
    serve(kv, 0, [1, 2, 3])
    finish(kv, 0, [1, 2, 3])
    match = kv.match_cached(array("i", [1, 2, 9]), "", 2)
    assert kv.num_idle(match) == 1
    kv.attach(0, match)
    ((source, destination),) = kv.copy_tail(0, match, fence=5)
    assert (source, kv.pinned) == (1, [1])
    assert destination != source
    assert kv.available == 1
    kv.settle(4)
    assert kv.pinned == [1]
    kv.lower_fence(5, 4)
    kv.settle(4)
    assert kv.pinned == []
    assert kv.available == 2


def test_a_copy_without_a_block_to_copy_to_leaves_no_pin() -> None:
    kv = make(2)
    serve(kv, 0, [1, 2, 3])
    finish(kv, 0, [1, 2, 3])
    match = kv.match_cached(array("i", [1, 2, 9]), "", 2)
    kv.attach(0, match)
    with pytest.raises(OutOfBlocks):
        kv.copy_tail(0, match, fence=5)
    assert kv.pinned == []
    assert kv.copies == 0
    assert kv.available == 1


def test_two_sequences_share_full_blocks_and_the_cache_outlives_one() -> None:
    kv = make()
    tokens = list(range(12))
    serve(kv, 0, tokens)
    kv.publish(0, array("i", tokens), 12, "")
    serve(kv, 1, tokens)
    assert row(kv, 1)[:2] == row(kv, 0)[:2]
    kv.settle(0)
    used = kv.num_used
    finish(kv, 0, tokens)
    assert kv.num_used == used - 1, "the third block was copied, the other two are still shared"
    finish(kv, 1, tokens)
    kv.settle(0)
    assert kv.num_used == 0


def test_a_duplicate_keeps_its_canonical_block_alive() -> None:
    kv = make()
    tokens = list(range(8))
    for slot in (0, 1):
        kv.attach(slot, Match())
        kv.extend(slot, 8)
    kv.publish(0, array("i", tokens), 8, "")
    kv.publish(1, array("i", tokens), 8, "")
    check_blocks(kv, Counter({1: 2, 2: 2, 3: 1, 4: 1}))
    finish(kv, 0, tokens)
    # Blocks 1 and 2 are nobody's but the tree needs them as ancestors of what slot 1 will add.
    check_blocks(kv, Counter([1, 2, 3, 4]))
    kv.free_duplicates()
    check_blocks(kv, Counter([3, 4]))
    assert kv.match_cached(array("i", [*tokens, 9]), "", 8).blocks == [3, 4]
    finish(kv, 1, tokens)
    check_blocks(kv, Counter())


def test_a_duplicate_of_an_unused_block_takes_its_place() -> None:
    kv = make()
    tokens = list(range(8))
    serve(kv, 0, tokens)
    finish(kv, 0, tokens)
    kv.attach(1, Match())
    kv.extend(1, 8)
    assert row(kv, 1) == [3, 4]
    kv.publish(1, array("i", tokens), 8, "")
    check_blocks(kv, Counter([3, 4]))
    assert kv.pool.is_free(1)
    assert kv.pool.is_free(2)


def test_forks_share_and_copy_whatever_the_tree_says() -> None:
    kv = make(prefix_caching=False)
    tokens = array("i", range(10))
    kv.extend(0, 10)
    run = kv.view(0, tokens, 10)
    match = kv.match_run(run, array("i", [*range(9), 50]), 9)
    assert match == Match([1, 2], [], 3, 9)
    kv.attach(1, match)
    kv.copy_tail(1, match, fence=0)
    assert row(kv, 1)[:2] == [1, 2]
    assert row(kv, 1)[2] not in (1, 2, 3)
    detached = kv.detach(0, tokens, 10, "")
    assert detached.blocks == [1, 2, 3]
    assert kv.num_used == 4
    kv.drop(detached)
    kv.settle(0)
    assert kv.num_used == 3
    kv.drop(detached)
    assert kv.pool.repairs == 0, "dropping a run twice is harmless"


def test_nothing_is_cached_without_prefix_caching() -> None:
    kv = make(prefix_caching=False)
    kv.extend(0, 8)
    finish(kv, 0, list(range(8)))
    assert len(kv.tree) == 0
    assert kv.match_cached(array("i", range(9)), "", 8) == Match()


def test_extra_keys_separate() -> None:
    kv = make()
    serve(kv, 0, list(range(8)), "alice")
    finish(kv, 0, list(range(8)), "alice")
    assert kv.match_cached(array("i", range(9)), "bob", 8).num_tokens == 0
    assert kv.match_cached(array("i", range(9)), "alice", 8).num_tokens == 8


def test_only_settled_tokens_are_shared() -> None:
    kv = make()
    tokens = array("i", range(12))
    kv.extend(0, 12)
    kv.publish(0, tokens, 7, "")
    assert kv.match_cached(tokens, "", 12).num_tokens == 4
    kv.release(0, tokens, 9, "")
    assert kv.match_cached(tokens, "", 12).num_tokens == 9


def test_old_blocks_make_room_least_recently_used_first() -> None:
    kv = make(5)
    serve(kv, 0, [1, 1, 1, 1, 1])
    finish(kv, 0, [1, 1, 1, 1, 1])
    serve(kv, 0, [2, 2, 2, 2, 2])
    finish(kv, 0, [2, 2, 2, 2, 2])
    kv.extend(0, 8)
    assert kv.match_cached(array("i", [2] * 6), "", 5).num_tokens == 5
    assert kv.match_cached(array("i", [1] * 6), "", 5).num_tokens == 0


def test_after_a_reset_old_blocks_are_not_shared_by_anybody() -> None:
    kv = make()
    tokens = array("i", range(10))
    kv.extend(0, 10)
    kv.publish(0, tokens, 8, "")
    kv.extend(1, 3)
    held = BlockRun(tokens, 3, row(kv, 1), [], False)
    kv.reset([held])
    assert held.closed
    assert kv.match_cached(tokens, "", 9).num_tokens == 0
    match = kv.match_run(held, tokens, 3)
    kv.attach(2, match)
    kv.copy_tail(2, match, 0)
    for slot in (0, 1, 2):
        kv.release(slot, tokens, 3, "")
    kv.settle(0)
    assert len(kv.tree) == 0
    assert kv.pool.num_free == kv.capacity


def test_a_sequence_the_tree_cannot_take_is_served_unshared(caplog: pytest.LogCaptureFixture) -> None:
    kv = make()
    kv.extend(0, 4)
    kv.publish(0, array("i", [1, 2, 3, 4]), 4, "")
    kv.table[1, 0], kv.lengths[1] = kv.table[0, 0], 1
    kv.pool.retain(int(kv.table[0, 0]))
    kv.publish(1, array("i", [9, 9, 9, 9]), 4, "")
    assert "not shared" in caplog.text
    assert kv.match_cached(array("i", [9, 9, 9, 9, 9]), "", 4).num_tokens == 0
