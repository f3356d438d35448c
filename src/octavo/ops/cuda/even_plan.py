"""How a decode step of few rows is shared out: every SM gets as many tiles of 16 keys as every other. Pure numpy, once a step.

All KV heads of all rows stand in one line, which is cut into equal shares, a thread block's each. A cut falls into a row, or is moved to
the nearest end of one where that is near. Where there are fewer heads than blocks and lengths differ little, each is cut into equal parts
of its own instead, a block's each: going from one item to the next takes time. Between two cuts lie a block's *items*: a KV head of one row (or, of rows that are read
together, of what they have in common: `decode_plan.Bundles`) from one position to another. What a row's items have each is added up by
the last of them to finish, in the order of its parts.

As in `decode_plan`, the arrays have a fixed capacity, so that a captured CUDA graph can replay with a new plan copied over the old one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.ops.triton.decode_plan import (
    MEMBER_FIELDS,
    MOST_BUNDLED,
    Bundles,
    Capacity,
    DecodePlan,
    Int32,
    Int64,
    repeated,
    worth_it,
)

ITEM_FIELDS = 12
ROW, LO, HI, CONTEXT, PART, FIRST_PART, NUM_PARTS, MEMBERS, HEAD, NEXT = range(10)
"""Columns of an item: attend the queries of `row` that share KV head `head` to positions [lo, hi) of a context of `context` tokens.
`part` is its place in the workspace (-1: nothing else is read for this row and head), `first_part` and `num_parts` the places of all
parts. `next` is where the block's next item is (0: nowhere); its first is at the block's number, and has hi = 0 if it has none. Where
`members` is not 0, the queries of that many rows attend; `row` is one of them, and `part` the place of the first in the list of members."""

_TILE = 16
_NEAR = 16
"""Tiles that a cut is moved at most: reading so many takes about as long as adding up the parts of a row that is cut."""
_NEXT_ITEM = 10
"""Tiles that a block may have beyond an equal share, so that it has one item: to go on to a next one takes 1.6 us."""


@dataclass(frozen=True, kw_only=True)
class EvenCapacity(Capacity):
    kv_heads: int
    blocks: int
    """Shares, one a thread block."""

    item_fields = ITEM_FIELDS


EvenPlan = DecodePlan[EvenCapacity]


def even_capacity(max_rows: int, num_kv_heads: int, blocks: int, *, bundle: int = 1) -> EvenCapacity:
    """Enough for any plan of up to `max_rows` rows, whatever their lengths.

    Args:
        bundle: rows in a bundle at most; 1 is a capacity without bundles.
    """
    pairs = max_rows * num_kv_heads
    if bundle == 1 or max_rows == 1:
        # A block has at most two parts of what is cut: its first item and its last.
        return EvenCapacity(kv_heads=num_kv_heads, blocks=blocks, items=blocks + pairs, parts=2 * blocks)
    # Each row in a bundle has at least two parts, what it shares and its own; a cut adds one for each row that it cuts.
    shared = min(max_rows, MOST_BUNDLED) * num_kv_heads
    return EvenCapacity(
        kv_heads=num_kv_heads,
        blocks=blocks,
        items=blocks + pairs + shared // 2,
        parts=2 * shared + (2 + bundle) * blocks,
        members=shared + bundle * blocks,
    )


@dataclass(frozen=True)
class _Entries:
    """What is to be read, once for each KV head."""

    rows: Int64
    begins: Int64
    ends: Int64


@dataclass(frozen=True)
class _Pieces:
    """What blocks have of entries, in the order in which they stand in the line."""

    pair: Int64
    """Entry times KV heads, plus head."""
    block: Int64
    index: Int64
    """Among the pieces of its pair."""
    lo: Int64
    hi: Int64
    counts: Int64
    """[pairs] pieces of each."""


def plan_even(
    context_lens: Int32,
    capacity: EvenCapacity,
    *,
    sliding_window: int | None = None,
    bundles: Bundles | None = None,
    min_part: int = 128,
) -> EvenPlan:
    """Share out the rows' contexts.

    Args:
        context_lens: [rows] tokens each row attends to, its own included; 0 is a padding row that gets no work.
        capacity: sizes the plan must have, from `even_capacity`.
        sliding_window: rows attend to their last `sliding_window` tokens only. Such rows are not bundled.
        bundles: rows that may be read together, of no more rows each than the capacity was made for. They are where the
            capacity has members and it pays.
        min_part: tokens that a share has at least.

    Raises:
        ValueError: the plan does not fit `capacity`.
    """
    lens, heads = context_lens.astype(np.int64), capacity.kv_heads
    begins = np.zeros_like(lens)
    if sliding_window is not None:
        begins = np.maximum(lens - sliding_window, 0) // _TILE * _TILE
        bundles = None
    if bundles is not None:
        bundles = worth_it(bundles, lens) if capacity.members else None
    rows = np.flatnonzero(lens)
    if bundles is None:
        pieces = _cut(_Entries(rows, begins[rows], lens[rows]), capacity, min_part)
        counts = pieces.counts[pieces.pair]
        split = counts > 1
        part = np.where(split, np.cumsum(split) - 1, -1)
        columns = _columns(pieces, rows[pieces.pair // heads], lens, heads)
        columns[PART], columns[FIRST_PART], columns[NUM_PARTS] = part, np.where(split, part - pieces.index, -1), counts
        return _packed(columns, pieces.block, np.empty((MEMBER_FIELDS, 0), dtype=np.int64), int(split.sum()), capacity)
    return _bundled(rows, lens, bundles, capacity, min_part)


def _cut(entries: _Entries, capacity: EvenCapacity, min_part: int) -> _Pieces:
    heads = capacity.kv_heads
    tiles = np.repeat(-(-(entries.ends - entries.begins) // _TILE), heads)
    ends = np.cumsum(tiles)
    starts = ends - tiles
    total = int(ends[-1]) if len(ends) else 0
    share = max(-(-min_part // _TILE), -(-total // capacity.blocks), 1)
    if (parts := _one_each(tiles, share, capacity.blocks)) is not None:
        owner, index = repeated(parts)
        step = -(-tiles // parts)[owner]
        lo = entries.begins[owner // heads] + _TILE * index * step
        hi = np.minimum(lo + _TILE * step, entries.ends[owner // heads])
        return _Pieces(owner, np.arange(len(owner)), index, lo, hi, parts)
    bounds = np.arange(-(-total // share) + 1) * share
    bounds[-1] = total
    cuts = bounds[1:-1]
    if near := min(share // 32, _NEAR):
        pair = ends.searchsorted(cuts)
        before, behind = cuts - starts[pair], ends[pair] - cuts
        cuts += np.where(behind < before, behind * (behind <= near), -before * (before <= near))
    # Cuts are few, pairs many: what begins a pair and what cuts one are merged, not looked up in each other.
    pair = ends.searchsorted(cuts, side="right")
    inside = cuts > np.append(starts, total)[pair]
    within = pair[inside]
    counts = np.bincount(within, minlength=len(starts)) + 1
    owner = np.repeat(np.arange(len(starts)), counts)
    begin = np.insert(starts, within + 1, cuts[inside])
    place = np.arange(len(within))
    index = np.zeros_like(owner)
    index[within + place + 1] = place - within.searchsorted(within) + 1
    # The first piece behind each cut: that which it makes, or the pair that it lies before.
    firsts = pair + np.cumsum(inside)
    block = np.cumsum(np.bincount(firsts[firsts < len(owner)], minlength=len(owner)))
    entry = owner // heads
    offset = entries.begins[entry] - _TILE * starts[owner]
    lo = offset + _TILE * begin
    hi = np.minimum(offset + _TILE * np.append(begin[1:], total), entries.ends[entry])
    return _Pieces(owner, block, index, lo, hi, counts)


def _one_each(tiles: Int64, share: int, blocks: int) -> Int64 | None:
    """Into how many equal parts each pair is cut, so that no block has two items.
    None where there are too many pairs, their lengths differ too much, or one has nothing to be cut.
    """
    most = share + _NEXT_ITEM
    if not len(tiles) or not tiles.all() or len(tiles) > blocks or int(np.sum(-(-tiles // most))) > blocks:
        return None
    while int(np.sum(-(-tiles // share))) > blocks:
        share += 1
    parts = -(-tiles // share)
    return -(-tiles // -(-tiles // parts))


def _columns(pieces: _Pieces, rows: Int64, lens: Int64, heads: int) -> Int32:
    columns = np.zeros((ITEM_FIELDS, len(rows)), dtype=np.int32)
    columns[ROW], columns[LO], columns[HI], columns[CONTEXT], columns[HEAD] = rows, pieces.lo, pieces.hi, lens[rows], pieces.pair % heads
    return columns


def _bundled(rows: Int64, lens: Int64, bundles: Bundles, capacity: EvenCapacity, min_part: int) -> EvenPlan:
    heads, sizes = capacity.kv_heads, bundles.sizes
    firsts = np.cumsum(sizes) - sizes
    bundle_of, _ = repeated(sizes)
    # A row keeps at least its last token for itself.
    shared = np.minimum(bundles.shared, (np.minimum.reduceat(lens[bundles.rows], firsts) - 1) // _TILE * _TILE)
    begins = np.zeros_like(lens)
    begins[bundles.rows] = shared[bundle_of]
    own = len(rows)
    leaders = bundles.rows[firsts]
    entries = _Entries(
        np.concatenate((rows, leaders)),
        np.concatenate((begins[rows], np.zeros_like(shared))),
        np.concatenate((lens[rows], shared)),
    )
    pieces = _cut(entries, capacity, min_part)
    counts = pieces.counts.reshape(-1, heads)

    before = np.zeros((len(lens), heads), dtype=np.int64)
    """[rows, heads] parts that lie in its bundle's common beginning."""
    before[bundles.rows] = counts[own:][bundle_of]
    parts = before.copy()
    parts[rows] += counts[:own]
    places = np.where(parts > 1, parts, 0)
    first_part = (np.cumsum(places) - places.reshape(-1)).reshape(parts.shape)

    entry, head = pieces.pair // heads, pieces.pair % heads
    row = entries.rows[entry]
    columns = _columns(pieces, row, lens, heads)
    split = parts[row, head] > 1
    columns[PART] = np.where(split, first_part[row, head] + before[row, head] + pieces.index, -1)
    columns[FIRST_PART], columns[NUM_PARTS] = np.where(split, first_part[row, head], -1), parts[row, head]

    theirs = np.flatnonzero(entry >= own)
    bundle = entry[theirs] - own
    item, place = repeated(sizes[bundle])
    member, its_head = bundles.rows[firsts[bundle][item] + place], head[theirs][item]
    first = first_part[member, its_head]
    members = np.stack((member, first + pieces.index[theirs][item], first, parts[member, its_head]))
    columns[PART, theirs], columns[MEMBERS, theirs] = np.cumsum(sizes[bundle]) - sizes[bundle], sizes[bundle]
    return _packed(columns, pieces.block, members, int(places.sum()), capacity)


def _packed(columns: Int32, block: Int64, members: Int64, num_parts: int, capacity: EvenCapacity) -> EvenPlan:
    leads = np.ones(len(block), dtype=np.bool_)
    np.not_equal(block[1:], block[:-1], out=leads[1:])
    place = np.where(leads, block, capacity.blocks - 1 + np.cumsum(~leads))
    columns[NEXT, :-1] = np.where(leads[1:], 0, place[1:])
    return DecodePlan.of(capacity, columns, place, members, num_parts)
