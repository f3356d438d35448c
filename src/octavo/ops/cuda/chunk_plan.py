"""How prompt chunks are cut into items for `kernels/paged_prefill.cu`. Pure numpy, once a step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

ITEM_FIELDS = 12
ROW, TOKEN, POSITION, COUNT, CONTEXT, BEGIN, END, PART, FIRST_PART, NUM_PARTS = range(10)
"""Columns of an item, of which two are padding: the `count` queries from batch token `token` on, the first at `position` of `row`,
whose keys are known up to `context`, attend to those in tiles `begin` to `end`, up to themselves. `part` is the item's place among the
parts of items (-1: these are all keys that its queries see), `first_part` and `num_parts` say where the others are. Items without
queries are empty, and the last ones."""

KEYS = 128
"""Of a tile."""
_LEAST_PART = 4
"""Tiles."""
_ENOUGH = 4
"""Items an SM: they spread evenly by themselves."""
_ITEM_COST, _PART_COST = 1.0, 2.5
"""In tiles: to begin an item, and to leave a part in memory and read it again."""
_SHARES = (0.5, 0.75, 1.0, 1.25, 1.6, 2.0)
"""Of all tiles, in what an SM would have of them: what is longer than a share is cut. The best of these is."""


def most_parts(kv_heads: int, sms: int) -> int:
    """No plan has more."""
    return int(2 / _SHARES[0] * sms) // kv_heads + 2


def most_items(tokens: int, rows: int, per_item: int, kv_heads: int, sms: int) -> int:
    """No plan of so many rows with so many queries has more. per_item: queries of an item."""
    return tokens // per_item + rows + most_parts(kv_heads, sms)


def plan_chunks(start: Int32, count: Int32, first_token: int, tokens: int, kv_heads: int, sms: int) -> Int32:
    """[items, ITEM_FIELDS], most keys first. Where there are too few items for the SMs, their keys are cut into parts.

    Args:
        start, count: [rows] first position computed, and how many. Rows follow each other in the batch.
        first_token: batch index of the first row's first token.
        tokens: of an item, at most.
    """
    starts, counts = start.astype(np.int64), count.astype(np.int64)
    row, index = _repeated(-(-counts // tokens))
    position = starts[row] + index * tokens
    size = np.minimum(tokens, counts[row] - index * tokens)
    token = first_token + (np.cumsum(counts) - counts)[row] + index * tokens
    end = -(-(position + size) // KEYS)
    # Where every query of an item sees a key a part may begin.
    cuttable = position // KEYS + 1
    parts = _parts(cuttable, kv_heads, sms)
    item, index = _repeated(parts)
    step = -(-cuttable // parts)[item]
    begin, split = index * step, parts[item] > 1
    part = np.where(split, np.cumsum(split) - 1, -1)
    plan = np.zeros((len(item), ITEM_FIELDS), dtype=np.int32)
    columns = row[item], token[item], position[item], size[item], (starts + counts)[row[item]], begin
    plan[:, : len(columns)] = np.stack(columns, axis=1)
    plan[:, END] = np.where(index + 1 < parts[item], begin + step, end[item])
    plan[:, PART], plan[:, FIRST_PART], plan[:, NUM_PARTS] = part, np.where(split, part - index, -1), parts[item]
    return plan[np.argsort(plan[:, BEGIN] - plan[:, END], kind="stable")]


def _repeated(counts: Int64) -> tuple[Int64, Int64]:
    """(owner, place within its owner) of sum(counts) things of which owner i has counts[i]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _parts(tiles: Int64, kv_heads: int, sms: int) -> Int64:
    """Into how many parts each item is best cut, of those that the longest SM is done soonest with."""
    whole = np.ones_like(tiles)
    if len(tiles) * kv_heads >= _ENOUGH * sms or int(tiles.max(initial=0)) <= _LEAST_PART:
        return whole
    total, best, least = int(tiles.sum()) * kv_heads, whole, _longest(tiles, whole, kv_heads, sms)
    for share in sorted({max(_LEAST_PART, int(-(-part * total // sms))) for part in _SHARES}):
        # An item a little longer than a share stays whole.
        wanted = np.where(tiles > share + share // 8, -(-tiles // share), 1)
        parts = -(-tiles // -(-tiles // wanted))
        if int(parts[parts > 1].sum()) > most_parts(kv_heads, sms):
            continue
        if (longest := _longest(tiles, parts, kv_heads, sms)) < least:
            best, least = parts, longest
    return best


def _longest(tiles: Int64, parts: Int64, kv_heads: int, sms: int) -> float:
    """What the SM with most to do takes, in tiles: items go to SMs in turns, every second one backwards."""
    cost = -(-tiles // parts) + _ITEM_COST + np.where(parts > 1, _PART_COST, 0.0)
    costs = np.repeat(np.repeat(cost, parts), kv_heads)
    turns = np.zeros((-(-len(costs) // sms), sms))
    turns.reshape(-1)[: len(costs)] = np.sort(costs)[::-1]
    turns[1::2] = turns[1::2, ::-1]
    return float(turns.sum(0).max())
