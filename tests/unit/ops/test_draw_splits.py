"""Warm-up knows each number of splits that a step can have."""

from __future__ import annotations

from octavo.ops.draw_splits import draw_splits, rows_of_other_splits


def test_the_fewest_rows_of_each_number_of_splits() -> None:
    assert {draw_splits(rows) for rows in range(1, 5000)} == {draw_splits(1), *map(draw_splits, rows_of_other_splits())}
    for rows in rows_of_other_splits():
        assert draw_splits(rows) < draw_splits(rows - 1)
