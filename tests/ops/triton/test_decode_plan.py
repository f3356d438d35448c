"""A decode plan covers every token once, in balanced shares, within the capacity a graph was captured with."""

from __future__ import annotations

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
    NEXT,
    NUM_PARTS,
    PART,
    ROW,
    DecodePlan,
    decode_capacity,
    invariant_capacity,
    plan_decode,
)


def chains(plan: DecodePlan) -> list[list[np.ndarray]]:
    found = []
    for share in range(plan.capacity.shares):
        item = share if plan.items[share, HI] > 0 else -1
        chain = []
        while item >= 0:
            chain.append(plan.items[item])
            item = plan.items[item, NEXT]
        if chain:
            found.append(chain)
    return found


def check_cover(plan: DecodePlan, lens: list[int], window: int | None) -> None:
    items = [item for chain in chains(plan) for item in chain]
    assert len(items) == int((plan.items[:, HI] > 0).sum()), "every item hangs on exactly one chain"
    by_row: dict[int, list[np.ndarray]] = {}
    for item in items:
        by_row.setdefault(int(item[ROW]), []).append(item)
    assert sorted(by_row) == [row for row, n in enumerate(lens) if n > 0]
    places: list[int] = []
    for row, pieces in by_row.items():
        pieces.sort(key=lambda item: item[LO])
        first_needed = 0 if window is None else max(0, lens[row] - window)
        assert pieces[0][LO] <= first_needed < pieces[0][LO] + 16
        assert pieces[-1][HI] == lens[row]
        for left, right in zip(pieces, pieces[1:], strict=False):
            assert left[HI] == right[LO]
        assert all(piece[HI] > piece[LO] and piece[CONTEXT] == lens[row] and piece[NUM_PARTS] == len(pieces) for piece in pieces)
        if len(pieces) == 1:
            assert pieces[0][PART] == -1
        else:
            assert [int(piece[PART]) for piece in pieces] == list(range(pieces[0][FIRST_PART], pieces[0][FIRST_PART] + len(pieces)))
            assert all(piece[FIRST_PART] == pieces[0][FIRST_PART] for piece in pieces)
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
    plan = plan_decode(contexts, kv_heads, 132, sliding_window=window, batch_invariant=invariant)
    check_cover(plan, lens, window)
    capacity = invariant_capacity(len(lens), sum(lens)) if invariant else decode_capacity(len(lens), kv_heads, 132)
    fixed = plan_decode(contexts, kv_heads, 132, sliding_window=window, batch_invariant=invariant, capacity=capacity)
    assert fixed.items.shape[0] == capacity.items
    check_cover(fixed, lens, window)


@given(lens=st.lists(st.integers(1, 20000), min_size=1, max_size=300))
def test_no_share_is_much_longer_than_the_mean(lens: list[int]) -> None:
    plan = plan_decode(np.array(lens, dtype=np.int32), 8, 132)
    sizes = [sum(int(item[HI] - item[LO]) for item in chain) for chain in chains(plan)]
    fair = max(64, -(-sum(lens) // (132 * 4 // 8)))
    assert max(sizes) <= fair * 1.125 + 32


def test_one_long_row_reaches_every_sm() -> None:
    plan = plan_decode(np.array([8192], dtype=np.int32), 8, 132)
    assert plan.num_shares * 8 >= 132 * 3


def test_invariant_cuts_depend_on_the_row_alone() -> None:
    alone = plan_decode(np.array([3000], dtype=np.int32), 8, 132, batch_invariant=True)
    mixed = plan_decode(np.array([70, 3000, 9000, 12], dtype=np.int32), 8, 132, batch_invariant=True)
    cuts = sorted((item[LO], item[HI]) for item in alone.items if item[HI] > 0)
    assert sorted((item[LO], item[HI]) for item in mixed.items if item[HI] > 0 and item[ROW] == 1) == cuts
    assert all(lo % INVARIANT_SPLIT == 0 for lo, _ in cuts)


def test_invariant_shares_go_longest_first() -> None:
    plan = plan_decode(np.array([40, 700, 2000], dtype=np.int32), 8, 132, batch_invariant=True)
    sizes = (plan.items[: plan.num_shares, HI] - plan.items[: plan.num_shares, LO]).tolist()
    assert sizes == sorted(sizes, reverse=True)


def test_padding_rows_get_no_work() -> None:
    plan = plan_decode(np.array([0, 100, 0], dtype=np.int32), 8, 132)
    assert {int(item[ROW]) for item in plan.items if item[HI] > 0} == {1}
    assert plan_decode(np.zeros(4, dtype=np.int32), 8, 132).num_shares == 0


def test_a_plan_that_does_not_fit_says_so() -> None:
    with pytest.raises(ValueError, match="does not fit a capacity"):
        plan_decode(np.array([5000] * 9, dtype=np.int32), 8, 132, capacity=decode_capacity(2, 8, 132))
