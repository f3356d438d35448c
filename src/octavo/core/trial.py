"""Tokens drawn before it is known what they may be.

A mask takes some 50 us, on a CPU while nothing else is done; a look at one token takes a tenth of that, and a model that follows its grammar
seldom draws one that may not come. So where the workers can wait for a judgement, they draw from all of the vocabulary first. A mask is made only
for rows whose token is refused, and for those where another token might be drawn if some were forbidden: the workers know which.
The tokens are those that masks would have led to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from octavo.core.constraint import Constraints
from octavo.protocol.step import Int32, TokenMasks

if TYPE_CHECKING:
    from octavo.core.request import Request


class MaskTrial:
    """Implements `protocol.step.Trial` for one step.

    Args:
        slots: [rows]; `requests` sit there.
    """

    def __init__(self, constraints: Constraints, slots: Int32, requests: Sequence[Request]) -> None:
        self.slots = slots
        self._constraints = constraints
        self.requests = list(requests)
        self._by_slot = dict(zip(slots.tolist(), requests, strict=True))
        self.problems: list[tuple[Request, str]] = []
        """Requests whose constraint has failed, and why."""

    def refused(self, slots: Int32, tokens: Int32) -> TokenMasks | None:
        """See `Trial`."""
        asked = [self._by_slot[slot] for slot in slots.tolist()]
        known = np.where(tokens < self._constraints.num_tokens, tokens, -1).tolist()
        passed = [_passes(request, token) for request, token in zip(asked, known, strict=True)]
        rows = np.flatnonzero(np.logical_not(passed)).tolist()
        if not rows:
            return None
        masks, problems = self._constraints.masks(slots[rows], [asked[row] for row in rows])
        self.problems += [(asked[rows[i]], problem) for i, problem in problems.items()]
        return masks


def _passes(request: Request, token: int) -> bool:
    assert request.constraint is not None
    return request.constraint.passes(token)
