"""A decode plan covers every token once, evenly over the SMs, within the capacity a graph was captured with."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.ops.triton.decode_plan import (
    CONTEXT,
    FIRST_PART,
    HI,
    INVARIANT_SPLIT,
    LO,
    NUM_PARTS,
    PART,
    ROW,
    DecodePlan,
    decode_capacity,
    invariant_capacity,
    plan_decode,
)


def check_cover(plan: DecodePlan, lens: list[int], window: int | None, alignment: int) -> None:
    assert (plan.items[: plan.num_items, HI] > 0).all()
    assert not plan.items[plan.num_items :].any()
    by_row: dict[int, list[np.ndarray]] = {}
    for item in plan.items[: plan.num_items]:
        by_row.setdefault(int(item[ROW]), []).append(item)
    assert sorted(by_row) == [row for row, n in enumerate(lens) if n > 0]
    places: list[int] = []
    for row, pieces in by_row.items():
        pieces.sort(key=lambda item: item[LO])
        first = pieces[0]
        first_needed = 0 if window is None else max(0, lens[row] - window)
        assert first[LO] <= first_needed < first[LO] + alignment
        assert pieces[-1][HI] == lens[row]
        for left, right in itertools.pairwise(pieces):
            assert left[HI] == right[LO]
        assert all(piece[HI] > piece[LO] and piece[CONTEXT] == lens[row] and piece[NUM_PARTS] == len(pieces) for piece in pieces)
        if len(pieces) == 1:
            assert first[PART] == -1
        else:
            assert [int(piece[PART]) for piece in pieces] == [int(first[FIRST_PART]) + i for i in range(len(pieces))]
            assert all(piece[FIRST_PART] == first[FIRST_PART] for piece in pieces)
            places += [int(piece[PART]) for piece in pieces]
    assert sorted(places) == list(range(plan.num_parts))


@given(
    lens=st.lists(st.integers(0, 5000), min_size=0, max_size=40),
    kv_heads=st.sampled_from([1, 2, 8]),
    window=st.sampled_from([None, 1, 100, 1024]),
    invariant=st.booleans(),
)
def test_every_token_is_covered_once(lens: list[int], kv_heads: int, window: int | None, invariant: bool) -> None:
    contexts = np.array(lens, dtype=np.int32)
    alignment = INVARIANT_SPLIT if invariant else 16
    plan = plan_decode(contexts, kv_heads, 132, sliding_window=window, batch_invariant=invariant)
    check_cover(plan, lens, window, alignment)
    capacity = invariant_capacity(len(lens), sum(lens)) if invariant else decode_capacity(len(lens), kv_heads, 132)
    fixed = plan_decode(contexts, kv_heads, 132, sliding_window=window, batch_invariant=invariant, capacity=capacity)
    assert fixed.items.shape[0] == capacity.items
    check_cover(fixed, lens, window, alignment)


@given(lens=st.lists(st.integers(1, 20000), min_size=1, max_size=300))
def test_no_item_is_much_longer_than_its_share(lens: list[int]) -> None:
    plan = plan_decode(np.array(lens, dtype=np.int32), 8, 132, items_per_sm=4)
    sizes = plan.items[: plan.num_items, HI] - plan.items[: plan.num_items, LO]
    assert sizes.max() <= max(256, -(-sum(lens) // (132 * 4 // 8))) * 4 // 3 + 15


def test_longest_first_and_every_other_round_backwards() -> None:
    lens = np.random.default_rng(0).permutation(np.arange(64) * 16 + 600).astype(np.int32)
    plan = plan_decode(lens, 8, 128)
    assert plan.num_items == 64
    rounds = (plan.items[:, HI] - plan.items[:, LO]).reshape(4, 16)
    assert (rounds[:-1].min(axis=1) > rounds[1:].max(axis=1)).all()
    assert (np.diff(rounds, axis=1) * np.array([[1], [-1], [1], [-1]]) < 0).all()
    assert len(set(rounds.sum(axis=0).tolist())) == 1, "every SM gets as much"


def test_one_long_row_reaches_every_sm() -> None:
    plan = plan_decode(np.array([8192], dtype=np.int32), 8, 132)
    assert plan.num_items * 8 >= 132


def test_invariant_cuts_depend_on_the_row_alone() -> None:
    alone = plan_decode(np.array([3000], dtype=np.int32), 8, 132, batch_invariant=True)
    mixed = plan_decode(np.array([70, 3000, 9000, 12], dtype=np.int32), 8, 132, batch_invariant=True)
    cuts = sorted((item[LO], item[HI]) for item in alone.items if item[HI] > 0)
    assert sorted((item[LO], item[HI]) for item in mixed.items if item[HI] > 0 and item[ROW] == 1) == cuts
    assert all(lo % INVARIANT_SPLIT == 0 for lo, _ in cuts)


def test_padding_rows_get_no_work() -> None:
    plan = plan_decode(np.array([0, 100, 0], dtype=np.int32), 8, 132)
    assert plan.items[:, ROW].tolist() == [1]
    assert plan_decode(np.zeros(4, dtype=np.int32), 8, 132).num_items == 0


def test_a_plan_that_does_not_fit_says_so() -> None:
    with pytest.raises(ValueError, match="does not fit a capacity"):
        plan_decode(np.array([50] * 200, dtype=np.int32), 8, 132, capacity=decode_capacity(2, 8, 132))
