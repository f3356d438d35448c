"""Log-probabilities from logits in the host's memory, a row at a time: what `logprobs` does for many rows on any device. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.protocol.engine import LogprobRow

Float32 = npt.NDArray[np.float32]

GROUP = 128
"""Entries in a group of a two-level search."""


def score_row(logits: Float32, token: int, top: int, extra: Sequence[int] = ()) -> LogprobRow:
    """Score a token under log_softmax(logits). Computed in float64, told in float32.

    Args:
        logits: [vocab].
        top: how many of the likeliest to return; -1 is all.
        extra: further token ids to score; those among the likeliest are not repeated.
    """
    with np.errstate(invalid="ignore"):  # of rows that are not numbers, whose request fails
        most = logits.max()
        total = float(most) + np.log(np.exp(logits - most).sum(dtype=np.float64))
        own = logits[token]
        ids = largest(logits, len(logits) if top == -1 else min(top, len(logits)))
        ids = np.concatenate([ids, [i for i in extra if i not in set(ids.tolist())]]).astype(np.int64) if extra else ids
        values = np.concatenate([[own], logits[ids]]) - total
    own_logprob, *logprobs = values.astype(np.float32).tolist()
    return LogprobRow(token, own_logprob, 1 + int(np.count_nonzero(logits > own)), ids.tolist(), logprobs)


def largest(x: Float32, n: int) -> npt.NDArray[np.int64]:
    """[n] indices of the largest entries, largest first, of equal ones the first. Fewer where some are NaN."""
    if not n:
        return np.zeros(0, np.int64)
    if n * GROUP * 4 > len(x):
        return np.argsort(-x, kind="stable")[:n]
    # At least n groups have a maximum that reaches the n-th largest maximum, so that at least n entries do.
    maxima = x[: len(x) // GROUP * GROUP].reshape(-1, GROUP).max(1)
    near = np.flatnonzero(x >= np.partition(maxima, len(maxima) - n)[len(maxima) - n])
    return near[np.argsort(-x[near], kind="stable")[:n]]
