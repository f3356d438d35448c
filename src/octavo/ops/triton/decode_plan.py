"""How a decode step is cut into pieces of work for the SMs. Pure numpy, once a step, no device access.

A piece of work is an *item*: one row's query against positions [lo, hi) of its context; a thread block takes one item of one
KV head. Rows too long for their share of the GPU are cut into equal *parts* (split-KV decoding, Dao et al. 2023), which the
last part to finish combines in part order. Items go longest first, round by round in turning direction, so that the hardware's
own scheduling gives every SM as much and keeps it busy to the end (longest processing time first, Graham 1969). Measured against
cutting all rows into exactly equal shares for a fixed assignment: that loses, because SMs do not all read equally fast.

Rows that begin with the same blocks are *bundled*: an item then reads a piece of the common prefix once for all rows of its
bundle, and is one part of each; what they do not share follows in items of their own.

The arrays have a fixed capacity, so that a captured CUDA graph can replay with a new plan copied over the old one. Items
beyond the plan's are empty.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

ITEM_FIELDS = 8
ROW, LO, HI, CONTEXT, PART, FIRST_PART, NUM_PARTS, MEMBERS = range(ITEM_FIELDS)
"""Columns of an item: attend `row`'s queries to positions [lo, hi) of a context of `context` tokens. `part` is its place in
the workspace (-1: the row is not split), `first_part` and `num_parts` the places of all parts of its row. hi = 0 marks an
empty item. Where `members` is not 0, the queries of that many rows attend; `row` is one of them, and `part` is the place of
the first in the list of members."""

MEMBER_FIELDS = 4
MEMBER_ROW, MEMBER_PART, MEMBER_FIRST_PART, MEMBER_NUM_PARTS = range(MEMBER_FIELDS)
"""Columns of a member: a row, and the item's part of it, as above."""

_ALIGNMENT = 16
_BLOCKS_PER_SM = 3
"""Thread blocks that fit an SM at a time."""
MOST_BUNDLED = 256
"""Rows in bundles at most: each takes places for its parts."""
_LEAST_SAVED = 0.1
"""Share of all tokens that bundles must save from being read again to be worth the additional parts."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Sizes of the arrays that a plan, and the graph that replays it, must fit; of this kernel and of `ops.cuda.paged_decode`."""

    items: int
    parts: int
    """Places for partial results."""
    members: int = 0
    """Places in the list of members. 0: rows are never bundled."""

    item_fields: ClassVar[int]

    @property
    def size(self) -> int:
        """Numbers in a plan."""
        return self.items * self.item_fields + self.members * MEMBER_FIELDS


@dataclass(frozen=True, kw_only=True)
class DecodeCapacity(Capacity):
    cuts: int
    """Shares that all rows' work is divided into; a row longer than its share is cut."""
    at_once: int
    """Items that start together; the others follow where one ends."""

    item_fields = ITEM_FIELDS


@dataclass(frozen=True)
class Bundles:
    """Rows to read their common beginnings together. Rows in no bundle are not listed."""

    rows: Int64
    """[bundled rows], bundle by bundle."""
    sizes: Int64
    """[bundles] rows of each."""
    shared: Int64
    """[bundles] tokens that all rows of a bundle have in common."""


C = TypeVar("C", bound=Capacity)


@dataclass(frozen=True)
class DecodePlan(Generic[C]):
    numbers: Int32
    """[capacity.size]: the items, then the members."""
    capacity: C
    num_items: int
    num_parts: int
    num_members: int

    @classmethod
    def of(cls, capacity: C, items: Int32 | Int64, places: Int64, members: Int64, num_parts: int) -> DecodePlan[C]:
        """
        Args:
            items: [item_fields, items], of which each has its place.
            members: [MEMBER_FIELDS, members]

        Raises:
            ValueError: they do not fit `capacity`.
        """
        num_items, num_members = items.shape[1], members.shape[1]
        if int(places.max(initial=-1)) >= capacity.items or num_parts > capacity.parts or num_members > capacity.members:
            raise ValueError(
                f"A decode plan of {num_items} items, {num_parts} parts and {num_members} members does not fit a capacity of "
                f"{capacity.items}, {capacity.parts} and {capacity.members}: capture with a larger one."
            )
        plan = cls(np.zeros(capacity.size, dtype=np.int32), capacity, num_items, num_parts, num_members)
        plan.items[places] = items.T
        plan.members[:num_members] = members.T
        return plan

    @property
    def items(self) -> Int32:
        """[capacity.items, item_fields]"""
        fields = self.capacity.item_fields
        return self.numbers[: self.capacity.items * fields].reshape(-1, fields)

    @property
    def members(self) -> Int32:
        """[capacity.members, MEMBER_FIELDS]"""
        return self.numbers[self.capacity.items * self.capacity.item_fields :].reshape(-1, MEMBER_FIELDS)


def bundle_limit(group: int) -> int:
    """Rows whose heads fit a tensor-core tile together. group: query heads a KV head."""
    padded = 1
    while padded < group:
        padded *= 2
    return max(1, 16 // padded)


def decode_capacity(max_rows: int, num_kv_heads: int, sm_count: int, *, bundle: int = 1) -> DecodeCapacity:
    """Enough for any plan (not batch-invariant) of up to `max_rows` rows, whatever their lengths.

    Args:
        bundle: rows in a bundle at most; 1 is a capacity without bundles.
    """
    cuts = max(1, 2 * sm_count // num_kv_heads)
    at_once = max(max_rows, -(-_BLOCKS_PER_SM * sm_count // num_kv_heads))
    if bundle == 1 or max_rows == 1:
        return DecodeCapacity(items=max_rows + cuts, parts=min(max_rows, cuts) + cuts, cuts=cuts, at_once=at_once)
    bundled = min(max_rows, MOST_BUNDLED)
    members = bundled + bundle * cuts
    return DecodeCapacity(
        items=max_rows + bundled // 2 + cuts,
        parts=min(max_rows, bundled + cuts) + cuts + members,
        cuts=cuts,
        at_once=at_once,
        members=members,
    )


def bundle_rows(order: Int32, common: Int32, most: int, min_shared: int = 256) -> Bundles | None:
    """Put rows with long common beginnings into bundles.

    Args:
        order: [rows] the rows, sorted so that those with the most in common are neighbours.
        common: [rows] tokens that each row of `order` has in common with the one before it.
        most: rows in a bundle at most.
        min_shared: tokens in common below which a bundle is not worth it.

    Returns:
        None if there is nothing to bundle.
    """
    sizes: list[int] = []
    shared: list[int] = []
    rows: list[int] = []
    places = order.tolist()
    agreed = (common // _ALIGNMENT * _ALIGNMENT).tolist()
    first, total = 0, len(places)
    while first < total:
        size, tokens = 1, 0
        while size < most and first + size < total:
            both = min(tokens or agreed[first + size], agreed[first + size])
            # One more row saves its reading of what all have in common, but shortens that if it agrees less.
            if both < min_shared or size * both < (size - 1) * tokens:
                break
            size, tokens = size + 1, both
        if size > 1:
            sizes.append(size)
            shared.append(tokens)
            rows += places[first : first + size]
        first += size
    if not sizes:
        return None
    return Bundles(np.array(rows, dtype=np.int64), np.array(sizes, dtype=np.int64), np.array(shared, dtype=np.int64))


def plan_decode(
    context_lens: Int32,
    num_kv_heads: int,
    sm_count: int,
    capacity: DecodeCapacity,
    *,
    sliding_window: int | None = None,
    bundles: Bundles | None = None,
    min_part: int = 128,
) -> DecodePlan[DecodeCapacity]:
    """Cut the rows' contexts into items.

    Args:
        context_lens: [rows] tokens each row attends to, its own included; 0 is a padding row that gets no work.
        capacity: sizes the plan must have, from `decode_capacity`.
        sliding_window: rows attend to their last `sliding_window` tokens only. Such rows are not bundled.
        bundles: rows that may be read together, of no more rows each than the capacity was made for. They are where the
            capacity has members and it pays.
        min_part: tokens under which cutting a context further costs more than it gains.

    Raises:
        ValueError: the plan does not fit `capacity`.
    """
    lens = context_lens.astype(np.int64)
    if bundles is not None and capacity.members and sliding_window is None:
        bundles = worth_it(bundles, lens)
        if bundles is not None:
            return _finish(_cut_bundled(lens, bundles, capacity, min_part), capacity, num_kv_heads, sm_count)
    return _finish(_cut(lens, capacity, sliding_window, min_part), capacity, num_kv_heads, sm_count)


@dataclass(frozen=True)
class _Items:
    """What a plan holds, its items in any order."""

    columns: Int64
    """[ITEM_FIELDS, items]"""
    num_parts: int
    members: Int64
    """[MEMBER_FIELDS, members]"""


_NO_MEMBERS = np.empty((MEMBER_FIELDS, 0), dtype=np.int64)


def _share(total: int, capacity: DecodeCapacity, min_part: int) -> int:
    return max(min_part, -(-total // capacity.cuts))


def _pieces(need: Int64, share: int) -> tuple[Int64, Int64]:
    """How many pieces each of `need` tokens is cut into, and their size. Aligned: no block is in two pieces."""
    # A row a little longer than its share stays whole: the parts of a row cost more than an uneven end.
    parts = np.where(need > share + share // 8, -(-need // share), np.minimum(need, 1))
    size = np.maximum(-(-need // (np.maximum(parts, 1) * _ALIGNMENT)) * _ALIGNMENT, 1)
    return -(-need // size), size


def repeated(counts: Int64) -> tuple[Int64, Int64]:
    """(owner, place within its owner) of sum(counts) things of which owner i has counts[i]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _cut(lens: Int64, capacity: DecodeCapacity, sliding_window: int | None, min_part: int) -> _Items:
    begins = np.zeros_like(lens)
    if sliding_window is not None:
        begins = np.maximum(lens - sliding_window, 0) // _ALIGNMENT * _ALIGNMENT
    need = lens - begins
    parts, size = _pieces(need, _share(int(need.sum()), capacity, min_part))
    if not len(need) or int(parts.max()) <= 1:
        row = np.flatnonzero(need)
        columns = np.zeros((ITEM_FIELDS, len(row)), dtype=np.int64)
        columns[ROW], columns[LO], columns[HI], columns[CONTEXT] = row, begins[row], lens[row], lens[row]
        columns[PART : FIRST_PART + 1], columns[NUM_PARTS] = -1, 1
        return _Items(columns, 0, _NO_MEMBERS)
    row, index = repeated(parts)
    num_parts = parts[row]
    lo = begins[row] + index * size[row]
    split = num_parts > 1
    part = np.where(split, np.cumsum(split) - 1, -1)
    columns = np.zeros((ITEM_FIELDS, len(row)), dtype=np.int64)
    columns[:MEMBERS] = row, lo, np.minimum(lo + size[row], lens[row]), lens[row], part, np.where(split, part - index, -1), num_parts
    return _Items(columns, int(np.count_nonzero(split)), _NO_MEMBERS)


def worth_it(bundles: Bundles, lens: Int64) -> Bundles | None:
    """The bundles that save most, as far as there is room, if they save enough together."""
    if int(bundles.sizes.sum()) > MOST_BUNDLED:
        keep = np.argsort(-bundles.shared * (bundles.sizes - 1), kind="stable")
        keep = keep[np.cumsum(bundles.sizes[keep]) <= MOST_BUNDLED]
        begins = np.cumsum(bundles.sizes) - bundles.sizes
        owner, index = repeated(bundles.sizes[keep])
        bundles = Bundles(bundles.rows[begins[keep][owner] + index], bundles.sizes[keep], bundles.shared[keep])
    saved = int((bundles.shared * (bundles.sizes - 1)).sum())
    return bundles if saved >= _LEAST_SAVED * int(lens.sum()) else None


def _cut_bundled(lens: Int64, bundles: Bundles, capacity: DecodeCapacity, min_part: int) -> _Items:
    """Pieces of the bundles' common beginnings, which are parts of all their rows, and of what each row has for itself."""
    sizes = bundles.sizes
    firsts = np.cumsum(sizes) - sizes
    bundle_of, _ = repeated(sizes)
    # A row keeps at least its last token for itself.
    shared = np.minimum(bundles.shared, (np.minimum.reduceat(lens[bundles.rows], firsts) - 1) // _ALIGNMENT * _ALIGNMENT)
    begins = np.zeros_like(lens)
    begins[bundles.rows] = shared[bundle_of]
    own = lens - begins
    share = _share(int(own.sum() + shared.sum()), capacity, min_part)
    common_parts, common_size = _pieces(shared, share)
    own_parts, own_size = _pieces(own, share)

    before = np.zeros_like(lens)
    """[rows] parts of the row that lie in its bundle's common beginning."""
    before[bundles.rows] = common_parts[bundle_of]
    parts = before + own_parts
    places = np.where(parts > 1, parts, 0)
    first_part = np.cumsum(places) - places

    row, index = repeated(own_parts)
    bundle, piece = repeated(common_parts)
    columns = np.zeros((ITEM_FIELDS, len(row) + len(bundle)), dtype=np.int64)
    mine, theirs = columns[:, : len(row)], columns[:, len(row) :]
    split = parts[row] > 1
    lo = begins[row] + index * own_size[row]
    hi = np.minimum(lo + own_size[row], lens[row])
    part = np.where(split, first_part[row] + before[row] + index, -1)
    mine[:MEMBERS] = row, lo, hi, lens[row], part, np.where(split, first_part[row], -1), parts[row]

    item, place = repeated(sizes[bundle])
    member = bundles.rows[firsts[bundle][item] + place]
    leader = bundles.rows[firsts[bundle]]
    lo = piece * common_size[bundle]
    hi = np.minimum(lo + common_size[bundle], shared[bundle])
    theirs[: PART + 1] = leader, lo, hi, lens[leader], np.cumsum(sizes[bundle]) - sizes[bundle]
    theirs[MEMBERS] = sizes[bundle]
    members = np.stack((member, first_part[member] + piece[item], first_part[member], parts[member]))
    return _Items(columns, int(places.sum()), members)


def _finish(found: _Items, capacity: DecodeCapacity, num_kv_heads: int, sm_count: int) -> DecodePlan[DecodeCapacity]:
    """Put the items in the order in which they are to start."""
    num_items = found.columns.shape[1]
    # 16-bit keys sort by radix; lengths that differ by less than the alignment may go in any order.
    length = np.minimum((found.columns[HI] - found.columns[LO]) // _ALIGNMENT, 0xFFFF)
    order = np.argsort((0xFFFF - length).astype(np.uint16), kind="stable")
    order = order[_snake(num_items, num_kv_heads, sm_count)]
    return DecodePlan.of(capacity, found.columns[:, order], np.arange(num_items), found.members, found.num_parts)


@functools.lru_cache(maxsize=1024)
def _snake(num_items: int, num_kv_heads: int, sm_count: int) -> Int64:
    """Every other round of one thread block an SM backwards: the SM with the longest item of one gets the shortest of the next."""
    index = np.arange(num_items)
    rounds = index * num_kv_heads // sm_count
    bounds = np.minimum(-(-np.arange(num_items + 1) * sm_count // num_kv_heads), num_items) if num_items else index
    mirrored = bounds[rounds] + bounds[rounds + 1] - 1 - index if num_items else index
    return np.where(rounds % 2 == 1, mirrored, index)
