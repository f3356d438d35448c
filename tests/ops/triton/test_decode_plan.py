"""A decode plan covers every token once, evenly over the SMs, within the capacity a graph was captured with."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.ops.triton.decode_plan import (
    HI,
    LO,
    MEMBER_FIRST_PART,
    MEMBER_NUM_PARTS,
    MEMBER_PART,
    MEMBER_ROW,
    MEMBERS,
    PART,
    ROW,
    Bundles,
    DecodePlan,
    bundle_limit,
    bundle_rows,
    decode_capacity,
    plan_decode,
)


@dataclass(frozen=True)
class Piece:
    """Positions [lo, hi) of a row, as one item reads them."""

    lo: int
    hi: int
    context: int
    part: int
    first_part: int
    num_parts: int


def pieces_of(plan: DecodePlan) -> dict[int, list[Piece]]:
    """By row, in order of positions; items of several rows count for each."""
    assert (plan.items[: plan.num_items, HI] > 0).all()
    assert not plan.items[plan.num_items :].any()
    assert not plan.members[plan.num_members :].any()
    by_row: dict[int, list[Piece]] = {}
    listed = 0
    for item in plan.items[: plan.num_items].tolist():
        if not item[MEMBERS]:
            by_row.setdefault(item[ROW], []).append(Piece(*item[LO:MEMBERS]))
            continue
        members = plan.members[item[PART] : item[PART] + item[MEMBERS]].tolist()
        assert len(members) == item[MEMBERS]
        assert item[ROW] in [member[MEMBER_ROW] for member in members]
        listed += len(members)
        for member in members:
            piece = Piece(item[LO], item[HI], -1, member[MEMBER_PART], member[MEMBER_FIRST_PART], member[MEMBER_NUM_PARTS])
            by_row.setdefault(member[MEMBER_ROW], []).append(piece)
    assert listed == plan.num_members
    return {row: sorted(pieces, key=lambda piece: piece.lo) for row, pieces in by_row.items()}


def check_cover(plan: DecodePlan, lens: list[int], window: int | None, alignment: int) -> None:
    by_row = pieces_of(plan)
    assert sorted(by_row) == [row for row, n in enumerate(lens) if n > 0]
    places: list[int] = []
    for row, pieces in by_row.items():
        first = pieces[0]
        first_needed = 0 if window is None else max(0, lens[row] - window)
        assert first.lo <= first_needed < first.lo + alignment
        assert pieces[-1].hi == lens[row]
        assert pieces[-1].context == lens[row], "the last token is the row's own"
        for left, right in itertools.pairwise(pieces):
            assert left.hi == right.lo
        assert all(piece.lo % 16 == 0 and piece.hi > piece.lo and piece.num_parts == len(pieces) for piece in pieces)
        if len(pieces) == 1:
            assert first.part == -1
        else:
            assert [piece.part for piece in pieces] == [first.first_part + i for i in range(len(pieces))]
            assert all(piece.first_part == first.first_part for piece in pieces)
            places += [piece.part for piece in pieces]
    assert sorted(places) == list(range(plan.num_parts))


@given(
    lens=st.lists(st.integers(0, 5000), min_size=0, max_size=40),
    kv_heads=st.sampled_from([1, 2, 8]),
    window=st.sampled_from([None, 1, 100, 1024]),
)
def test_every_token_is_covered_once(lens: list[int], kv_heads: int, window: int | None) -> None:
    contexts = np.array(lens, dtype=np.int32)
    capacity = decode_capacity(len(lens), kv_heads, 132)
    plan = plan_decode(contexts, kv_heads, 132, capacity, sliding_window=window)
    assert plan.items.shape[0] == capacity.items
    check_cover(plan, lens, window, 16)


@given(lens=st.lists(st.integers(1, 20000), min_size=1, max_size=300))
def test_no_item_is_much_longer_than_its_share(lens: list[int]) -> None:
    capacity = decode_capacity(len(lens), 8, 132)
    plan = plan_decode(np.array(lens, dtype=np.int32), 8, 132, capacity)
    sizes = plan.items[: plan.num_items, HI] - plan.items[: plan.num_items, LO]
    assert sizes.max() <= max(128, -(-sum(lens) // capacity.cuts)) * 4 // 3 + 15


def test_longest_first_and_every_other_round_backwards() -> None:
    lens = np.random.default_rng(0).permutation(np.arange(64) * 16 + 600).astype(np.int32)
    plan = plan_decode(lens, 8, 128, decode_capacity(64, 8, 128))
    assert plan.num_items == 64
    rounds = (plan.items[:64, HI] - plan.items[:64, LO]).reshape(4, 16)
    assert (rounds[:-1].min(axis=1) > rounds[1:].max(axis=1)).all()
    assert (np.diff(rounds, axis=1) * np.array([[1], [-1], [1], [-1]]) < 0).all()
    assert len(set(rounds.sum(axis=0).tolist())) == 1, "every SM gets as much"


def test_one_long_row_reaches_every_sm() -> None:
    plan = plan_decode(np.array([8192], dtype=np.int32), 8, 132, decode_capacity(1, 8, 132))
    assert plan.num_items * 8 >= 132


def test_one_long_row_among_short_ones_is_cut() -> None:
    lens = np.array([500] * 31 + [30000], dtype=np.int32)
    plan = plan_decode(lens, 8, 132, decode_capacity(32, 8, 132))
    assert (plan.items[:, ROW] == 31).sum() >= 8
    assert plan.num_items - (plan.items[: plan.num_items, ROW] == 31).sum() == 31, "the short ones stay whole"


def test_padding_rows_get_no_work() -> None:
    capacity = decode_capacity(4, 8, 132)
    plan = plan_decode(np.array([0, 100, 0], dtype=np.int32), 8, 132, capacity)
    assert plan.items[: plan.num_items, ROW].tolist() == [1]
    assert plan_decode(np.zeros(4, dtype=np.int32), 8, 132, capacity).num_items == 0


def test_a_plan_that_does_not_fit_says_so() -> None:
    with pytest.raises(ValueError, match="does not fit a capacity"):
        plan_decode(np.array([50] * 200, dtype=np.int32), 8, 132, decode_capacity(2, 8, 132))


# Common beginnings


@given(
    families=st.lists(st.tuples(st.integers(0, 3000), st.lists(st.integers(1, 2000), min_size=1, max_size=12)), max_size=8),
    padding=st.integers(0, 3),
    group=st.sampled_from([1, 2, 4, 7, 16]),
)
def test_bundled_rows_are_covered_once_too(families: list[tuple[int, list[int]]], padding: int, group: int) -> None:
    """Families of rows that agree in a first part, each with something of its own behind it."""
    lens = [shared + own for shared, owns in families for own in owns]
    common = [0 if i == 0 else shared for shared, owns in families for i in range(len(owns))]
    most = bundle_limit(group)
    rows = len(lens) + padding
    bundles = bundle_rows(np.arange(len(lens), dtype=np.int32), np.array(common, dtype=np.int32), most)
    capacity = decode_capacity(rows, 8, 132, bundle=most)
    contexts = np.array(lens + [0] * padding, dtype=np.int32)
    plan = plan_decode(contexts, 8, 132, capacity, bundles=bundles)
    check_cover(plan, contexts.tolist(), None, 16)
    assert plan.numbers.shape == (capacity.size,)
    assert plan.items[:, MEMBERS].max(initial=0) <= most
    read = int((plan.items[:, HI] - plan.items[:, LO]).sum())
    saved = 0 if bundles is None else int((bundles.shared * (bundles.sizes - 1)).sum())
    assert sum(lens) - read in (0, saved), "what is common is read once a bundle, or nothing is bundled"


def test_rows_are_bundled_by_what_they_have_in_common() -> None:
    order = np.array([3, 1, 4, 0, 2, 6, 5], dtype=np.int32)
    common = np.array([0, 1000, 1000, 300, 2000, 40, 5000], dtype=np.int32)
    bundles = bundle_rows(order, common, 4)
    assert bundles is not None
    assert bundles.rows.tolist() == [3, 1, 4, 0, 2, 6, 5]
    assert bundles.sizes.tolist() == [3, 2, 2]
    assert bundles.shared.tolist() == [992, 2000, 4992], "whole blocks' worth"
    assert bundle_rows(order, common, 1) is None
    assert bundle_rows(order, np.full(7, 100, dtype=np.int32), 4) is None


def test_many_rows_are_bundled_as_far_as_there_is_room() -> None:
    rows = 900
    common = np.full(rows, 1024, dtype=np.int32)
    common[::2] = 512
    bundles = bundle_rows(np.arange(rows, dtype=np.int32), common, 4)
    capacity = decode_capacity(rows, 8, 132, bundle=4)
    plan = plan_decode(np.full(rows, 1040, dtype=np.int32), 8, 132, capacity, bundles=bundles)
    check_cover(plan, [1040] * rows, None, 16)
    assert 200 <= int((plan.items[:, MEMBERS] * (plan.items[:, LO] == 0)).sum()) <= 256


@pytest.mark.parametrize("case", ["nothing to gain", "sliding window", "no room for members"])
def test_rows_stay_apart_where_bundles_do_not_pay_or_must_not_be(case: str) -> None:
    bundles = Bundles(np.array([0, 1]), np.array([2]), np.array([512]))
    lens = np.array([600, 600, *[2000 * (case == "nothing to gain")] * 20], dtype=np.int32)
    capacity = decode_capacity(22, 8, 132, bundle=4)
    if case == "no room for members":
        capacity = decode_capacity(22, 8, 132)
    plan = plan_decode(lens, 8, 132, capacity, sliding_window=1000 if case == "sliding window" else None, bundles=bundles)
    assert plan.num_members == 0
    check_cover(plan, lens.tolist(), 1000 if case == "sliding window" else None, 16)


def test_bundles_end_before_their_shortest_row_does() -> None:
    bundles = Bundles(np.array([0, 1, 2]), np.array([3]), np.array([1024]))
    plan = plan_decode(np.array([1024, 1500, 3000], dtype=np.int32), 8, 132, decode_capacity(3, 8, 132, bundle=4), bundles=bundles)
    assert plan.num_members
    check_cover(plan, [1024, 1500, 3000], None, 16)
