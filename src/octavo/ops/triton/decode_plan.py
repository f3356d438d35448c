"""How a decode step is cut into equal pieces of work for the SMs. Pure numpy, once a step, no device access.

All rows' contexts, laid end to end, are cut into *shares* of nearly equal length; a thread block takes one share of one KV
head (the stream-K idea, Osama et al. 2023, applied to split-KV decoding, Dao et al. 2023). A share crosses row boundaries, so
it is a chain of *items*: (row, from, to). A row cut by a share boundary has several items, its *parts*, whose partial results
the last part to finish combines in part order.

The arrays have a fixed capacity, so that a captured CUDA graph can replay with a new plan copied over the old one. Items
beyond the plan's are empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

ITEM_FIELDS = 8
ROW, LO, HI, CONTEXT, PART, FIRST_PART, NUM_PARTS, NEXT = range(ITEM_FIELDS)
"""Columns of an item: attend `row`'s queries to positions [lo, hi) of a context of `context` tokens. `part` is its place in
the workspace (-1: the row is not split), `first_part` and `num_parts` the places of all parts of its row, `next` the item that
follows in the same share (-1: none). hi = 0 marks an empty item."""

INVARIANT_SPLIT = 512
"""Batch-invariant plans cut every context at multiples of this many tokens, whatever else is in the batch."""

_CUT_ALIGNMENT = 16
_SNAP_FRACTION = 16
"""A cut closer to a row's end than share / 16 moves there: a slightly longer share costs less than one more part."""


@dataclass(frozen=True)
class DecodeCapacity:
    """Sizes of the arrays that a plan, and the graph that replays it, must fit."""

    shares: int
    """Thread blocks a KV head; the items [0, shares) start the chains."""
    items: int
    parts: int
    """Places for partial results."""


@dataclass(frozen=True)
class DecodePlan:
    items: Int32
    """[capacity.items, ITEM_FIELDS]"""
    capacity: DecodeCapacity
    num_shares: int
    num_parts: int


def decode_capacity(max_rows: int, num_kv_heads: int, sm_count: int, *, shares_per_sm: int = 4) -> DecodeCapacity:
    """Enough for any plan (not batch-invariant) of up to `max_rows` rows, whatever their lengths."""
    shares = max(1, sm_count * shares_per_sm // num_kv_heads)
    return DecodeCapacity(shares=shares, items=shares + max_rows, parts=2 * shares)


def invariant_capacity(max_rows: int, max_total_tokens: int) -> DecodeCapacity:
    """Enough for any batch-invariant plan of up to `max_rows` rows that hold `max_total_tokens` tokens together."""
    items = max_rows + max_total_tokens // INVARIANT_SPLIT
    return DecodeCapacity(shares=items, items=items, parts=items)


def plan_decode(
    context_lens: Int32,
    num_kv_heads: int,
    sm_count: int,
    *,
    sliding_window: int | None = None,
    batch_invariant: bool = False,
    shares_per_sm: int = 4,
    min_share: int = 64,
    capacity: DecodeCapacity | None = None,
) -> DecodePlan:
    """Cut the rows' contexts into work of equal size.

    Args:
        context_lens: [rows] tokens each row attends to, its own included; 0 is a padding row that gets no work.
        sliding_window: rows attend to their last `sliding_window` tokens only.
        batch_invariant: cut each row by its own length alone, so that a row's bits never depend on its batch mates. Costs
            balance: the longest shares go first instead of all being equal.
        shares_per_sm: thread blocks an SM works on in its turn.
        min_share: tokens under which cutting a context further costs more than it gains.
        capacity: sizes the plan must have, for a captured graph. Default: what this batch needs.

    Raises:
        ValueError: the plan does not fit `capacity`.
    """
    lens = context_lens.astype(np.int64)
    begins = np.zeros_like(lens)
    if sliding_window is not None:
        begins = np.maximum(lens - sliding_window, 0) // _CUT_ALIGNMENT * _CUT_ALIGNMENT
    ends = np.cumsum(lens - begins)
    starts = ends - (lens - begins)
    if batch_invariant:
        share_starts, seg_starts = _invariant_cuts(lens, begins, starts)
    else:
        share_starts, seg_starts = _equal_cuts(ends, starts, num_kv_heads, sm_count, shares_per_sm, min_share)
    num_segments = len(seg_starts)
    seg_ends = np.append(seg_starts[1:], ends[-1] if len(ends) else 0)
    row = np.searchsorted(ends, seg_starts, side="right")
    parts_of_row = np.bincount(row, minlength=len(lens))
    num_parts_of_seg = parts_of_row[row]
    split = num_parts_of_seg > 1
    part = np.where(split, np.cumsum(split) - 1, -1)
    seg_of_row = np.cumsum(parts_of_row) - parts_of_row
    is_first = np.zeros(num_segments, dtype=bool)
    is_first[np.searchsorted(seg_starts, share_starts)] = True
    num_shares, num_parts = len(share_starts), int(np.count_nonzero(split))

    if capacity is None:
        capacity = DecodeCapacity(shares=max(1, num_shares), items=max(1, num_segments), parts=max(1, num_parts))
    chained = num_segments - num_shares
    if num_shares > capacity.shares or capacity.shares + chained > capacity.items or num_parts > capacity.parts:
        raise ValueError(
            f"A decode plan of {num_shares} shares, {chained} chained items and {num_parts} parts does not fit a capacity of "
            f"{capacity.shares}, {capacity.items - capacity.shares} and {capacity.parts}: capture with a larger one."
        )
    place = np.empty(num_segments, dtype=np.int64)
    order = np.arange(num_shares)
    if batch_invariant:
        order[np.argsort(seg_starts - seg_ends, kind="stable")] = np.arange(num_shares)
    place[is_first] = order
    place[~is_first] = capacity.shares + np.arange(chained)
    follows = np.full(num_segments, -1, dtype=np.int64)
    follows[:-1] = np.where(is_first[1:], -1, place[1:])

    items = np.zeros((capacity.items, ITEM_FIELDS), dtype=np.int32)
    items[:, NEXT] = -1
    shift = begins[row] - starts[row]
    items[place] = np.stack(
        (row, seg_starts + shift, seg_ends + shift, lens[row], part, part[seg_of_row[row]], num_parts_of_seg, follows), axis=1
    )
    return DecodePlan(items=items, capacity=capacity, num_shares=num_shares, num_parts=num_parts)


_Int64 = npt.NDArray[np.int64]


def _equal_cuts(
    ends: _Int64, starts: _Int64, num_kv_heads: int, sm_count: int, shares_per_sm: int, min_share: int
) -> tuple[_Int64, _Int64]:
    """Where shares and segments start on the line of all contexts laid end to end; both ascending."""
    total = int(ends[-1]) if len(ends) else 0
    if total == 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    max_shares = max(1, sm_count * shares_per_sm // num_kv_heads)
    share = max(min_share, -(-total // max_shares))
    cuts = np.arange(share, total, share, dtype=np.int64)
    row = np.searchsorted(ends, cuts, side="right")
    offset = (cuts - starts[row]) // _CUT_ALIGNMENT * _CUT_ALIGNMENT
    snap = share // _SNAP_FRACTION
    offset[offset < snap] = 0
    length = ends[row] - starts[row]
    offset = np.where(length - offset < snap, length, offset)
    cuts = starts[row] + offset
    share_starts = np.unique(np.concatenate((np.zeros(1, dtype=np.int64), cuts[cuts < total])))
    seg_starts = np.unique(np.concatenate((share_starts, starts[ends > starts])))
    return share_starts, seg_starts


def _invariant_cuts(lens: _Int64, begins: _Int64, starts: _Int64) -> tuple[_Int64, _Int64]:
    """Every segment is its own share; cuts fall on multiples of INVARIANT_SPLIT of the sequence itself."""
    first = begins // INVARIANT_SPLIT
    pieces = np.where(lens > 0, -(-lens // INVARIANT_SPLIT) - first, 0)
    row = np.repeat(np.arange(len(lens)), pieces)
    index = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    position = np.maximum((first[row] + index) * INVARIANT_SPLIT, begins[row])
    seg_starts = starts[row] + position - begins[row]
    return seg_starts, seg_starts
