"""A plan of few rows covers every token once, in shares as even as tiles allow, within the capacity a graph was captured with."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.ops.cuda.even_plan import (
    _NEXT_ITEM,
    FIRST_PART,
    HEAD,
    HI,
    LO,
    MEMBERS,
    NEXT,
    NUM_PARTS,
    PART,
    ROW,
    EvenPlan,
    even_capacity,
    plan_even,
)
from octavo.ops.triton.decode_plan import (
    MEMBER_FIRST_PART,
    MEMBER_NUM_PARTS,
    MEMBER_PART,
    MEMBER_ROW,
    Bundles,
    bundle_limit,
    bundle_rows,
)


@dataclass(frozen=True)
class Piece:
    """Positions [lo, hi) of a row, as one item reads them."""

    lo: int
    hi: int
    part: int
    first_part: int
    num_parts: int


def lists_of(plan: EvenPlan) -> list[list[list[int]]]:
    """The items of each block, in its order."""
    blocks, seen = [], set[int]()
    for block in range(plan.capacity.blocks):
        mine, place = [], block
        while plan.items[place, HI] > 0:
            mine.append(plan.items[place].tolist())
            seen.add(place)
            if not (place := int(plan.items[place, NEXT])):
                break
        blocks.append(mine)
    assert len(seen) == plan.num_items == sum(map(len, blocks))
    assert not np.delete(plan.items, sorted(seen), axis=0).any()
    return blocks


def check_cover(plan: EvenPlan, lens: list[int], window: int | None) -> None:
    pieces: dict[tuple[int, int], list[Piece]] = {}
    listed = 0
    for item in itertools.chain.from_iterable(lists_of(plan)):
        assert item[LO] % 16 == 0
        assert item[LO] < item[HI]
        if not item[MEMBERS]:
            piece = Piece(item[LO], item[HI], item[PART], item[FIRST_PART], item[NUM_PARTS])
            pieces.setdefault((item[ROW], item[HEAD]), []).append(piece)
            continue
        members = plan.members[item[PART] : item[PART] + item[MEMBERS]].tolist()
        assert item[ROW] in [member[MEMBER_ROW] for member in members]
        listed += len(members)
        for member in members:
            piece = Piece(item[LO], item[HI], member[MEMBER_PART], member[MEMBER_FIRST_PART], member[MEMBER_NUM_PARTS])
            pieces.setdefault((member[MEMBER_ROW], item[HEAD]), []).append(piece)
    assert listed == plan.num_members
    assert sorted(pieces) == [(row, head) for row, n in enumerate(lens) if n for head in range(plan.capacity.kv_heads)]
    places: list[int] = []
    for (row, _), mine in pieces.items():
        mine.sort(key=lambda piece: piece.lo)
        assert mine[0].lo == (0 if window is None else max(0, lens[row] - window) // 16 * 16)
        assert mine[-1].hi == lens[row]
        assert all(left.hi == right.lo for left, right in itertools.pairwise(mine))
        assert all(piece.num_parts == len(mine) for piece in mine)
        if len(mine) == 1:
            assert mine[0].part == -1
        else:
            assert [piece.part for piece in mine] == [mine[0].first_part + i for i in range(len(mine))]
            places += [piece.part for piece in mine]
    assert sorted(places) == list(range(plan.num_parts))


@given(
    lens=st.lists(st.integers(0, 5000), min_size=0, max_size=40),
    kv_heads=st.sampled_from([1, 2, 8]),
    blocks=st.sampled_from([1, 6, 132]),
    window=st.sampled_from([None, 1, 100, 1024]),
)
def test_every_token_is_covered_once(lens: list[int], kv_heads: int, blocks: int, window: int | None) -> None:
    plan = plan_even(np.array(lens, dtype=np.int32), even_capacity(len(lens), kv_heads, blocks), sliding_window=window)
    check_cover(plan, lens, window)


@given(lens=st.lists(st.integers(1, 20000), min_size=1, max_size=80), kv_heads=st.sampled_from([1, 3, 8]))
def test_shares_are_even(lens: list[int], kv_heads: int) -> None:
    plan = plan_even(np.array(lens, dtype=np.int32), even_capacity(len(lens), kv_heads, 132))
    shares = [sum(-(-(item[HI] - item[LO]) // 16) for item in items) for items in lists_of(plan)]
    even = max(8, -(-sum(shares) // 132))
    pairs = sum(1 for n in lens if n) * kv_heads
    # Blocks with one item each may have a little more.
    assert max(shares) <= even + max(2 * (even // 32), _NEXT_ITEM if pairs <= 132 else 0)


def test_one_long_row_is_cut_at_its_heads() -> None:
    plan = plan_even(np.array([8192], dtype=np.int32), even_capacity(1, 8, 132))
    assert [len(items) for items in lists_of(plan)] == [1] * 128 + [0] * 4
    assert (plan.items[:128, NUM_PARTS] == 16).all()


def test_padding_rows_get_no_work() -> None:
    capacity = even_capacity(4, 8, 132)
    plan = plan_even(np.array([0, 100, 0], dtype=np.int32), capacity)
    assert set(plan.items[plan.items[:, HI] > 0, ROW].tolist()) == {1}
    assert plan_even(np.zeros(4, dtype=np.int32), capacity).num_items == 0


def test_a_plan_that_does_not_fit_says_so() -> None:
    with pytest.raises(ValueError, match="does not fit a capacity"):
        plan_even(np.array([50] * 200, dtype=np.int32), even_capacity(2, 8, 132))


@given(
    families=st.lists(st.tuples(st.integers(0, 3000), st.lists(st.integers(1, 2000), min_size=1, max_size=12)), max_size=8),
    padding=st.integers(0, 3),
    group=st.sampled_from([1, 2, 4, 7, 16]),
    kv_heads=st.sampled_from([1, 3, 8]),
)
def test_bundled_rows_are_covered_once_too(families: list[tuple[int, list[int]]], padding: int, group: int, kv_heads: int) -> None:
    """Families of rows that agree in a first part, each with something of its own behind it."""
    lens = [shared + own for shared, owns in families for own in owns]
    common = [0 if i == 0 else shared for shared, owns in families for i in range(len(owns))]
    most = bundle_limit(group)
    bundles = bundle_rows(np.arange(len(lens), dtype=np.int32), np.array(common, dtype=np.int32), most)
    capacity = even_capacity(len(lens) + padding, kv_heads, 132, bundle=most)
    contexts = np.array(lens + [0] * padding, dtype=np.int32)
    plan = plan_even(contexts, capacity, bundles=bundles)
    check_cover(plan, contexts.tolist(), None)
    assert plan.numbers.shape == (capacity.size,)
    read = sum(item[HI] - item[LO] for item in itertools.chain.from_iterable(lists_of(plan))) // kv_heads
    saved = 0 if bundles is None else int((bundles.shared * (bundles.sizes - 1)).sum())
    assert sum(lens) - read in (0, saved), "what is common is read once a bundle, or nothing is bundled"


@pytest.mark.parametrize("case", ["nothing to gain", "sliding window", "no room for members"])
def test_rows_stay_apart_where_bundles_do_not_pay_or_must_not_be(case: str) -> None:
    bundles = Bundles(np.array([0, 1]), np.array([2]), np.array([512]))
    lens = np.array([600, 600, *[2000 * (case == "nothing to gain")] * 20], dtype=np.int32)
    window = 1000 if case == "sliding window" else None
    plan = plan_even(
        lens, even_capacity(22, 8, 132, bundle=1 if case == "no room for members" else 4), sliding_window=window, bundles=bundles
    )
    assert plan.num_members == 0
    check_cover(plan, lens.tolist(), window)


def test_few_heads_are_cut_so_that_no_block_has_two_items() -> None:
    for lens in ([200], [345], [8192], [300] * 16, [333, 280, 350, 301]):
        plan = plan_even(np.array(lens, dtype=np.int32), even_capacity(len(lens), 8, 132))
        assert max(map(len, lists_of(plan))) == 1
    uneven = plan_even(np.array([8000, *[100] * 15], dtype=np.int32), even_capacity(16, 8, 132))
    assert max(map(len, lists_of(uneven))) > 1, "one long row is worth more than that"
