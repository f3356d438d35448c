"""How a step is cut up for `invariant_attention`: decodes and prompt chunks are the same thing here. Pure numpy, once a step.

A *tile* is some consecutive query tokens of a row; an *item* is a tile against a run of whole segments of its keys. Segments
begin at multiples of SEGMENT positions, whatever else is in the step. What the kernel computes for a query depends on the
segments alone, not on how tiles and items were cut: so the planner is free to cut as the load wants it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

SEGMENT = 512
"""Keys whose scores share one softmax before they are folded into the rest. Part of what a token's bits are."""

ITEM_FIELDS = 12
ROW, TOKEN, POSITION, COUNT, LO, HI, PART, FIRST_PART, NUM_ITEMS, COUNTER = range(10)
"""Columns of an item: the `count` queries from batch token `token` on, the first at `position` of `row`, attend to keys
[lo, hi). `part` is where in the workspace the item's first segment goes (-1: the tile is one item and needs no workspace),
`first_part` that of the tile's first segment; `num_items` items of the tile count themselves in at `counter`. hi = 0 marks an
empty item. The last columns pad it to a multiple of 16 bytes."""

WORKSPACE_ROWS = 8192
"""Queries x heads of a KV head x segments that cut tiles of a step may leave; tiles beyond that stay whole."""
_ITEMS_PER_SM = 2


@dataclass(frozen=True)
class InvariantPlan:
    items: Int32
    """[items, ITEM_FIELDS], most keys first."""
    part_rows: int
    """Rows of the workspace in use."""


def spare_items(num_kv_heads: int, sm_count: int) -> int:
    """A plan has at most this many items more than tiles."""
    return max(1, _ITEMS_PER_SM * sm_count // num_kv_heads)


def plan_invariant(
    start: Int32,
    count: Int32,
    tokens_per_tile: int,
    group: int,
    num_kv_heads: int,
    sm_count: int,
    *,
    sliding_window: int | None = None,
) -> InvariantPlan:
    """Cut a step into items.

    Args:
        start, count: [rows] first position computed, and how many tokens; rows follow each other in the batch. A row with count
            0 gets no work.
        tokens_per_tile: most queries of a tile.
        group: query heads of a KV head.
        sliding_window: queries attend to their last `sliding_window` positions only.
    """
    starts, counts = start.astype(np.int64), count.astype(np.int64)
    tiles = -(-counts // tokens_per_tile)
    row = np.repeat(np.arange(len(counts)), tiles)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens_per_tile
    position = starts[row] + offset
    size = np.minimum(tokens_per_tile, counts[row] - offset)
    token = (np.cumsum(counts) - counts)[row] + offset
    hi = position + size
    lo = np.zeros_like(hi)
    if sliding_window is not None:
        lo = np.maximum(position - sliding_window + 1, 0) // SEGMENT * SEGMENT
    # Whole segments, at least as many as make a fair share: then there are at most `spare_items` items more than tiles.
    share = -(-int((hi - lo).sum()) // (spare_items(num_kv_heads, sm_count) * SEGMENT)) * SEGMENT
    segments = -(-(hi - lo) // SEGMENT)
    cut = np.flatnonzero(hi - lo > share)
    if len(cut):
        cut = cut[np.argsort(lo[cut] - hi[cut], kind="stable")]
        cut = cut[np.cumsum(segments[cut] * size[cut] * group) <= WORKSPACE_ROWS]
    pieces = np.ones(len(row), dtype=np.int64)
    pieces[cut] = -(-(hi - lo)[cut] // max(share, 1))
    counter = np.full(len(row), -1)
    counter[cut] = np.arange(len(cut))
    taken = np.zeros(len(row), dtype=np.int64)
    taken[cut] = segments[cut] * size[cut] * group
    first_part = np.where(counter >= 0, np.cumsum(taken) - taken, -1)

    tile = np.repeat(np.arange(len(row)), pieces)
    index = np.arange(len(tile)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    item_lo = lo[tile] + index * share
    item_hi = np.where(counter[tile] >= 0, np.minimum(item_lo + share, hi[tile]), hi[tile])
    part = np.where(counter[tile] >= 0, first_part[tile] + index * (share // SEGMENT) * size[tile] * group, -1)
    items = np.zeros((len(tile), ITEM_FIELDS), dtype=np.int32)
    columns = (row, token, position, size)
    for column, values in enumerate((*(c[tile] for c in columns), item_lo, item_hi, part, first_part[tile], pieces[tile], counter[tile])):
        items[:, column] = values
    return InvariantPlan(items[np.argsort(item_lo - item_hi, kind="stable")], int(taken.sum()))
