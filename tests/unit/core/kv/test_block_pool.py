import pytest

from octavo.core.kv.block_pool import NULL_BLOCK, BlockPool, OutOfBlocks


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert pool.capacity == pool.num_free == 4
    assert sorted(pool.take() for _ in range(4)) == [1, 2, 3, 4]
    with pytest.raises(OutOfBlocks):
        pool.take()


def test_a_block_comes_back_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(3)
    block = pool.take()
    assert not pool.retain(block)
    assert not pool.drop(block)
    assert pool.drop(block)
    pool.give_back(block)
    assert pool.is_free(block)
    assert pool.num_free == 2
    assert pool.repairs == 0


@pytest.mark.parametrize("misuse", ["double free", "free in use", "drop free", "share free", "free null"])
def test_misuse_is_repaired_not_fatal(misuse: str, caplog: pytest.LogCaptureFixture) -> None:
    pool = BlockPool(3)
    block = pool.take()
    match misuse:
        case "double free":
            pool.drop(block)
            pool.give_back(block)
            pool.give_back(block)
        case "free in use":
            pool.give_back(block)
        case "drop free":
            pool.drop(block)
            pool.drop(block)
        case "share free":
            pool.drop(block)
            pool.give_back(block)
            assert not pool.retain(block)
        case "free null":
            pool.give_back(NULL_BLOCK)
    assert pool.repairs == 1
    assert "accounting" in caplog.text
    free = [pool.take() for _ in range(pool.num_free)]
    assert len(set(free)) == len(free)
    assert NULL_BLOCK not in free


def test_a_pool_needs_room_for_a_block() -> None:
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)
