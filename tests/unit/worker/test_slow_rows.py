"""Numbers of rows that larger steps are quicker for."""

from __future__ import annotations

from octavo.worker.graph_layout import capture_plan, decode_rows
from octavo.worker.slow_rows import FEWEST_ROWS, MARGIN, slow_rows


def test_what_a_larger_number_beats_is_slow() -> None:
    assert slow_rows({}) == slow_rows({160: 1.0}) == frozenset()
    rising = {rows: float(rows) for rows in range(144, 1025, 16)}
    assert slow_rows(rising) == frozenset()
    cliffs = {**rising, 448: 900.0, 480: 505.0, 176: 195.0}
    assert slow_rows(cliffs) == {448}, "480 is a little slower than 496, 176 than 192: within what measurements differ by"
    assert 1.0 < MARGIN < 1.1
    assert slow_rows({**rising, 448: 900.0, 480: 800.0, 512: 700.0}) == {448, 480, 512}
    assert slow_rows(dict.fromkeys(rising, 3.0)) == frozenset()


def test_slow_rows_are_not_captured_and_their_steps_take_the_next() -> None:
    usual, without = capture_plan(1024, 8192), capture_plan(1024, 8192, {448, 480})
    decodes = {shape.rows for shape in without.shapes if not shape.chunks}
    assert decodes == set(decode_rows(1024)) - {448, 480}
    assert min(rows for rows in decodes if rows >= 440) == 512
    assert [s for s in without.shapes if s.chunks] and {s for s in without.shapes if s.chunks} == {s for s in usual.shapes if s.chunks}
    assert without.largest == usual.largest


def test_only_rows_beyond_our_own_kernels_are_measured() -> None:
    from octavo.ops.cuda.dense import MOST_ROWS

    assert FEWEST_ROWS == MOST_ROWS + 1
