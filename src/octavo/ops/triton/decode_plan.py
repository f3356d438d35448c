"""How a decode step is cut into pieces of work for the SMs. Pure numpy, once a step, no device access.

A piece of work is an *item*: one row's query against positions [lo, hi) of its context; a thread block takes one item of one
KV head. Rows too long for their share of the GPU are cut into equal *parts* (split-KV decoding, Dao et al. 2023), which the
last part to finish combines in part order. Items go longest first, round by round in turning direction, so that the hardware's
own scheduling gives every SM as much and keeps it busy to the end (longest processing time first, Graham 1969). Measured against cutting all rows into exactly equal shares for a
fixed assignment: that loses, because SMs do not all read equally fast.

The arrays have a fixed capacity, so that a captured CUDA graph can replay with a new plan copied over the old one. Items
beyond the plan's are empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

ITEM_FIELDS = 8
ROW, LO, HI, CONTEXT, PART, FIRST_PART, NUM_PARTS = range(7)
"""Columns of an item: attend `row`'s queries to positions [lo, hi) of a context of `context` tokens. `part` is its place in
the workspace (-1: the row is not split), `first_part` and `num_parts` the places of all parts of its row. hi = 0 marks an
empty item. The last column pads an item to one memory sector."""

INVARIANT_SPLIT = 512
"""Batch-invariant plans cut every context at multiples of this many tokens, whatever else is in the batch."""

_ALIGNMENT = 16


@dataclass(frozen=True)
class DecodeCapacity:
    """Sizes of the arrays that a plan, and the graph that replays it, must fit."""

    items: int
    parts: int
    """Places for partial results."""


@dataclass(frozen=True)
class DecodePlan:
    items: Int32
    """[capacity.items, ITEM_FIELDS]"""
    capacity: DecodeCapacity
    num_items: int
    num_parts: int


def decode_capacity(max_rows: int, num_kv_heads: int, sm_count: int, *, items_per_sm: int = 2) -> DecodeCapacity:
    """Enough for any plan (not batch-invariant) of up to `max_rows` rows, whatever their lengths."""
    cuts = max(1, sm_count * items_per_sm // num_kv_heads)
    return DecodeCapacity(items=max_rows + cuts, parts=min(max_rows, cuts) + cuts)


def invariant_capacity(max_rows: int, max_total_tokens: int) -> DecodeCapacity:
    """Enough for any batch-invariant plan of up to `max_rows` rows that hold `max_total_tokens` tokens together."""
    items = max_rows + max_total_tokens // INVARIANT_SPLIT
    return DecodeCapacity(items=items, parts=items)


def plan_decode(
    context_lens: Int32,
    num_kv_heads: int,
    sm_count: int,
    *,
    sliding_window: int | None = None,
    batch_invariant: bool = False,
    items_per_sm: int = 2,
    min_part: int = 256,
    capacity: DecodeCapacity | None = None,
) -> DecodePlan:
    """Cut the rows' contexts into items.

    Args:
        context_lens: [rows] tokens each row attends to, its own included; 0 is a padding row that gets no work.
        sliding_window: rows attend to their last `sliding_window` tokens only.
        batch_invariant: cut each row by its own length alone, so that a row's bits never depend on its batch mates.
        items_per_sm: rows longer than 1 / (sm_count * items_per_sm) of all work are cut.
        min_part: tokens under which cutting a context further costs more than it gains.
        capacity: sizes the plan must have, for a captured graph. Default: what this batch needs.

    Raises:
        ValueError: the plan does not fit `capacity`.
    """
    lens = context_lens.astype(np.int64)
    alignment = INVARIANT_SPLIT if batch_invariant else _ALIGNMENT
    begins = np.zeros_like(lens)
    if sliding_window is not None:
        begins = np.maximum(lens - sliding_window, 0) // alignment * alignment
    need = lens - begins
    cuts = max(1, sm_count * items_per_sm // num_kv_heads)
    share = INVARIANT_SPLIT if batch_invariant else max(min_part, -(-int(need.sum()) // cuts))
    # A row a little longer than its share stays whole: the parts of a row cost more than an uneven end.
    slack = 0 if batch_invariant else share // 3
    if len(need) and int(need.max()) > share + slack:
        parts = np.where(need > share + slack, -(-need // share), np.minimum(need, 1))
        size = np.full_like(need, share) if batch_invariant else -(-need // (np.maximum(parts, 1) * _ALIGNMENT)) * _ALIGNMENT
        parts = -(-need // np.maximum(size, 1))
        row = np.repeat(np.arange(len(lens)), parts)
        index = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
        num_parts_of = parts[row]
        lo = begins[row] + index * size[row]
        hi = np.minimum(lo + size[row], lens[row])
        split = num_parts_of > 1
        part = np.where(split, np.cumsum(split) - 1, -1)
        first_part = np.where(split, part - index, -1)
        num_parts = int(np.count_nonzero(split))
    else:
        row = np.flatnonzero(need)
        lo, hi = begins[row], lens[row]
        part = first_part = np.full(len(row), -1)
        num_parts_of, num_parts = np.ones(len(row), dtype=np.int64), 0

    num_items = len(row)
    if capacity is None:
        capacity = DecodeCapacity(items=max(1, num_items), parts=max(1, num_parts))
    if num_items > capacity.items or num_parts > capacity.parts:
        raise ValueError(
            f"A decode plan of {num_items} items and {num_parts} parts does not fit a capacity of {capacity.items} and "
            f"{capacity.parts}: capture with a larger one."
        )
    # 16-bit keys sort by radix; lengths that differ by less than the alignment may go in any order.
    length = np.minimum((hi - lo) // _ALIGNMENT, 0xFFFF)
    order = np.argsort((0xFFFF - length).astype(np.uint16), kind="stable")
    order = order[_snake(num_items, num_kv_heads, sm_count)]
    items = np.zeros((capacity.items, ITEM_FIELDS), dtype=np.int32)
    for column, values in enumerate((row, lo, hi, lens[row], part, first_part, num_parts_of)):
        items[:num_items, column] = values[order]
    return DecodePlan(items=items, capacity=capacity, num_items=num_items, num_parts=num_parts)


def _snake(num_items: int, num_kv_heads: int, sm_count: int) -> npt.NDArray[np.int64]:
    """Every other round of one thread block an SM backwards: the SM with the longest item of one gets the shortest of the next."""
    index = np.arange(num_items)
    rounds = index * num_kv_heads // sm_count
    bounds = np.minimum(-(-np.arange(num_items + 1) * sm_count // num_kv_heads), num_items) if num_items else index
    mirrored = bounds[rounds] + bounds[rounds + 1] - 1 - index if num_items else index
    return np.where(rounds % 2 == 1, mirrored, index)
