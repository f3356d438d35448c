"""Who begins with the same blocks, followed through comings and goings, against comparing everybody with everybody."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.leading_blocks import MIN_SHARED_TOKENS, LeadingBlocks
from tests.support.step_plans import Plans, slot_init

BLOCK = 64
SLOTS = 8


def common_tokens(a: list[int], b: list[int]) -> int:
    agree = [x == y for x, y in zip(a, b, strict=False)]
    return (agree.index(False) if False in agree else len(agree)) * BLOCK


@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(0, SLOTS - 1), max_size=3),
            st.dictionaries(st.integers(0, SLOTS - 1), st.lists(st.integers(1, 2), max_size=8), max_size=4),
            st.permutations(range(SLOTS)),
        ),
        max_size=12,
    )
)
def test_neighbours_and_what_they_share(steps: list[tuple[list[int], dict[int, list[int]], list[int]]]) -> None:
    leading, plans, tables = LeadingBlocks(SLOTS, BLOCK), Plans(), dict[int, list[int]]()
    for free, entering, asked in steps:
        for slot in free:
            tables.pop(slot, None)
        tables.update(entering)
        leading.update(plans([], free=free, init=[slot_init(slot, [1], blocks) for slot, blocks in entering.items()]))
        slots = [slot for slot in asked if slot in tables][:5]
        shared = leading.shared(np.array(slots, dtype=np.int32))
        most = max((common_tokens(tables[a], tables[b]) for a in slots for b in slots if a != b), default=0)
        if most < MIN_SHARED_TOKENS:
            assert shared is None
            continue
        assert shared is not None
        order = [tables[slots[row]] for row in shared.order]
        assert sorted(shared.order.tolist()) == list(range(len(slots)))
        assert shared.common.tolist() == [0, *(common_tokens(a, b) for a, b in itertools.pairwise(order))]
        assert shared.common.max() == most, "those with the most in common are neighbours"


def test_the_same_rows_get_the_same_answer_object() -> None:
    leading, plans = LeadingBlocks(SLOTS, BLOCK), Plans()
    leading.update(plans([], init=[slot_init(slot, [1], [7, 8, 9, 10 + slot]) for slot in (3, 1, 2)]))
    first = leading.shared(np.array([3, 1], dtype=np.int32))
    assert first is not None
    assert first.common.tolist() == [0, 3 * BLOCK]
    leading.update(plans([]))
    assert leading.shared(np.array([3, 1], dtype=np.int32)) is first
    assert leading.shared(np.array([3, 1, 2], dtype=np.int32)) is not first
    leading.update(plans([], free=[2, 1]))
    assert leading.shared(np.array([3], dtype=np.int32)) is None


def test_nothing_in_common_is_nothing_to_tell() -> None:
    leading = LeadingBlocks(SLOTS, BLOCK)
    leading.update(Plans()([], init=[slot_init(slot, [1], [10 * slot, 1, 2, 3]) for slot in range(4)]))
    assert leading.shared(np.arange(4, dtype=np.int32)) is None
