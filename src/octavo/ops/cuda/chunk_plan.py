"""How prompt chunks are cut into items for `kernels/paged_prefill.cu`. Pure numpy, once a step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

ITEM_FIELDS = 8
_ROW, _TOKEN, POSITION, COUNT, _CONTEXT = range(5)
"""Columns of an item, of which three are padding: the `count` queries from batch token `token` on, the first at `position` of `row`,
whose keys are known up to `context`, attend to all keys up to themselves."""


def plan_chunks(start: Int32, count: Int32, first_token: int, tokens: int) -> Int32:
    """[items, ITEM_FIELDS], most keys first.

    Args:
        start, count: [rows] first position computed, and how many. Rows follow each other in the batch.
        first_token: batch index of the first row's first token.
        tokens: of an item, at most.
    """
    starts, counts = start.astype(np.int64), count.astype(np.int64)
    items = -(-counts // tokens)
    row = np.repeat(np.arange(len(counts)), items)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(items) - items, items)) * tokens
    position = starts[row] + offset
    size = np.minimum(tokens, counts[row] - offset)
    token = first_token + (np.cumsum(counts) - counts)[row] + offset
    nothing = np.zeros_like(row)
    plan = np.stack((row, token, position, size, (starts + counts)[row], nothing, nothing, nothing), axis=1).astype(np.int32)
    return plan[np.argsort(-(position + size), kind="stable")]
