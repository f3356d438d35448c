"""Over how many thread blocks the draw of a row's token is spread, which is compiled into the kernel. No torch: warm-up asks too."""

from __future__ import annotations

_ROWS_AT_ONCE = 4096
"""Rows, times their splits, that fill a GPU."""
_FEWEST, _MOST = 4, 64


def draw_splits(rows: int) -> int:
    """For a step that samples so many rows: a power of two."""
    return min(_MOST, max(_FEWEST, 1 << (_ROWS_AT_ONCE // rows - 1).bit_length()))


def rows_of_other_splits() -> list[int]:
    """The fewest rows for each number of splits that a single row does not have."""
    found, splits = [], _MOST
    while splits > _FEWEST:
        splits //= 2
        found.append(_ROWS_AT_ONCE // (splits + 1) + 1)
    return found
