"""A prefill plan gives every query every key it may see, once."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.ops.triton.prefill_plan import (
    COUNT,
    FIRST_PART,
    HI,
    LO,
    NUM_PARTS,
    PART,
    POSITION,
    ROW,
    TOKEN,
    max_prefill_parts,
    plan_prefill,
)


@given(
    rows=st.lists(st.tuples(st.integers(0, 30000), st.integers(1, 700)), min_size=0, max_size=12),
    tokens_per_tile=st.sampled_from([5, 16, 32, 128]),
    window=st.sampled_from([None, 1, 1000]),
)
def test_every_query_meets_its_keys_once(rows: list[tuple[int, int]], tokens_per_tile: int, window: int | None) -> None:
    start = np.array([s for s, _ in rows], dtype=np.int32)
    count = np.array([c for _, c in rows], dtype=np.int32)
    plan = plan_prefill(start, count, 7, tokens_per_tile, 8, 132, sliding_window=window)
    assert plan.num_parts <= max_prefill_parts(8, 132)
    token_of_row = 7 + np.cumsum(count) - count
    tiles: dict[tuple[int, int], list[np.ndarray]] = {}
    for item in plan.items:
        tiles.setdefault((int(item[ROW]), int(item[POSITION])), []).append(item)
    covered: dict[int, int] = {}
    places: list[int] = []
    for (row, position), pieces in tiles.items():
        pieces.sort(key=lambda item: item[LO])
        first = pieces[0]
        assert first[TOKEN] == token_of_row[row] + position - start[row]
        assert first[COUNT] <= tokens_per_tile
        assert pieces[-1][HI] == position + first[COUNT]
        assert first[LO] <= (0 if window is None else max(0, position - window + 1))
        for left, right in itertools.pairwise(pieces):
            assert left[HI] == right[LO]
        assert all(piece[HI] > piece[LO] and piece[NUM_PARTS] == len(pieces) for piece in pieces)
        if len(pieces) > 1:
            assert [int(piece[PART]) for piece in pieces] == [int(first[FIRST_PART]) + i for i in range(len(pieces))]
            places += [int(piece[PART]) for piece in pieces]
        else:
            assert first[PART] == -1
        covered[row] = covered.get(row, 0) + int(first[COUNT])
    assert covered == {row: int(c) for row, c in enumerate(count)}
    assert sorted(places) == list(range(plan.num_parts))


def test_a_short_chunk_behind_a_long_prefix_fills_the_gpu() -> None:
    plan = plan_prefill(np.array([30000], dtype=np.int32), np.array([20], dtype=np.int32), 0, 32, 8, 132)
    assert len(plan.items) * 8 >= 132


def test_a_long_chunk_is_not_cut_along_its_keys() -> None:
    plan = plan_prefill(np.array([0], dtype=np.int32), np.array([8192], dtype=np.int32), 0, 32, 8, 132)
    assert plan.num_parts == 0
    lengths = plan.items[:, HI] - plan.items[:, LO]
    assert (np.diff(lengths) <= 0).all(), "longest first"
