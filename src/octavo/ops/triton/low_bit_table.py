"""Which tuning multiplies rows with a low-bit weight as it is stored, or that it is better unpacked (or rounded inputs multiplied).

These kernels serve where those of `ops.cuda` do not run; on an H200 they take the same time from 17 rows on, twice as long below.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.ops.triton.low_bit_matmul import FOUR_BITS, KindName, LowBitTuning

ROW_CLASSES = (16, 32, 64, 128)
"""A class covers the numbers of rows from the one before it up to its own."""
MOST_ROWS: Mapping[KindName, int] = {"int4": 128, "table": 128, "int8": 128, "float8": 128}
"""Most rows that are multiplied with the weight as it is stored."""


def choice(kind: KindName, columns: int, inner: int, group: int, rows: int, sm_count: int) -> LowBitTuning | None:
    """For a weight of `columns` output and `inner` input features, in groups of `group` inputs (0: one), and so many rows; None: unpack."""
    if rows > MOST_ROWS[kind]:
        return None
    widest = 128 if rows <= 64 else 64
    step = min(widest, max(group, 64)) if kind in FOUR_BITS and group else min(widest, group) if group else widest
    tile = min(128, max(16, 1 << (rows - 1).bit_length()))
    strip = 64 if rows <= 64 or columns < 128 * sm_count // 4 else 128
    strips = -(-columns // strip) * -(-rows // tile)
    split = 1
    while split < 8 and strips * split * 2 <= 2 * sm_count and inner >= 4 * split * step:
        split *= 2
    return LowBitTuning(columns=strip, inner=step, split=split, warps=4 if strip == 64 else 8, stages=4 if rows <= 64 else 3, rows=tile)
