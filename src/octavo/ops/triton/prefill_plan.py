"""How prompt chunks are cut into query tiles, and long prefixes of few queries into parts. Pure numpy, once a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

ITEM_FIELDS = 9
ROW, TOKEN, POSITION, COUNT, LO, HI, PART, FIRST_PART, NUM_PARTS = range(ITEM_FIELDS)
"""Columns of an item: the `count` queries from batch token `token` on, the first at `position` of `row`, attend to keys
[lo, hi). `part`, `first_part`, `num_parts`: as in `decode_plan`. count = 0 marks an empty item."""

_MIN_PART = 512
PART_ALIGNMENT = 128
_BLOCKS_PER_SM = 2


@dataclass(frozen=True)
class PrefillPlan:
    items: Int32
    """[items, ITEM_FIELDS], most keys first."""
    num_parts: int


def max_prefill_parts(num_kv_heads: int, sm_count: int) -> int:
    """No plan has more parts."""
    return 2 * (_BLOCKS_PER_SM * sm_count // num_kv_heads + 1)


def plan_prefill(
    start: Int32,
    count: Int32,
    first_token: int,
    tokens_per_tile: int,
    num_kv_heads: int,
    sm_count: int,
    *,
    sliding_window: int | None = None,
) -> PrefillPlan:
    """Cut rows into tiles of queries; where there are fewer tiles than the SMs can hold, cut their keys into parts too.

    Args:
        start, count: [rows] first position computed, and how many. Rows follow each other in the batch.
        first_token: batch index of the first row's first token.
    """
    starts, counts = start.astype(np.int64), count.astype(np.int64)
    tiles = -(-counts // tokens_per_tile)
    row = np.repeat(np.arange(len(counts)), tiles)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens_per_tile
    position = starts[row] + offset
    size = np.minimum(tokens_per_tile, counts[row] - offset)
    token = first_token + (np.cumsum(counts) - counts)[row] + offset
    hi = position + size
    lo = np.zeros_like(hi)
    if sliding_window is not None:
        lo = np.maximum(position - sliding_window + 1, 0) // PART_ALIGNMENT * PART_ALIGNMENT
    parts = np.ones(len(row), dtype=np.int64)
    if len(row):
        fair = -(-int((hi - lo).sum()) * num_kv_heads // (_BLOCKS_PER_SM * sm_count))
        share = -(-max(_MIN_PART, fair) // PART_ALIGNMENT) * PART_ALIGNMENT
        parts = -(-(hi - lo) // share)
        step = -(-(hi - lo) // (parts * PART_ALIGNMENT)) * PART_ALIGNMENT
        parts = -(-(hi - lo) // step)
    if parts.any() and parts.max() > 1:
        tile = np.repeat(np.arange(len(row)), parts)
        index = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
        row, token, position, size = row[tile], token[tile], position[tile], size[tile]
        part_lo = lo[tile] + index * step[tile]
        hi = np.minimum(part_lo + step[tile], hi[tile])
        lo = part_lo
        split = parts[tile] > 1
        part = np.where(split, np.cumsum(split) - 1, -1)
        first_part = np.where(split, part - index, -1)
        num_parts_of = parts[tile]
        num_parts = int(np.count_nonzero(split))
    else:
        part = first_part = np.full(len(row), -1)
        num_parts_of, num_parts = parts, 0
    items = np.stack((row, token, position, size, lo, hi, part, first_part, num_parts_of), axis=1).astype(np.int32)
    return PrefillPlan(items=items[np.argsort(lo - hi, kind="stable")], num_parts=num_parts)
