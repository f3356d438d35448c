"""The running batch as numpy columns, one row a slot.

Owns who sits in which slot, and every number that planning and settling touch for each request in each step. So a step of steady
decoding is a few array operations, whatever the number of requests.

A sequence of `known` tokens has KV for `scheduled` of them once the steps in flight are done, and for `settled` of them for sure.
While a request decodes, `known - scheduled == 1`; while its prompt is computed, more.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.core.request import Request
from octavo.protocol.step import Bool, Int32

Slots = npt.NDArray[np.intp]
"""Slot numbers as numpy indexes fastest."""

STOP_COLUMNS = 8
NO_STEP = -1


class Batch:
    """Columns of `max_seqs` slots. All counts are in tokens unless they say blocks."""

    def __init__(self, max_seqs: int) -> None:
        self.max_seqs = max_seqs
        self.requests: list[Request | None] = [None] * max_seqs
        self.running: Bool = np.zeros(max_seqs, np.bool_)
        """May be scheduled."""
        self.live: Bool = np.zeros(max_seqs, np.bool_)
        """Tokens that arrive still count (also true for a preempted request with steps in flight)."""
        self.known: Int32 = np.zeros(max_seqs, np.int32)
        """Tokens of the sequence, those that steps in flight will sample included."""
        self.scheduled: Int32 = np.zeros(max_seqs, np.int32)
        self.settled: Int32 = np.zeros(max_seqs, np.int32)
        self.total: Int32 = np.zeros(max_seqs, np.int32)
        """Tokens of the sequence that the core has seen."""
        self.last_token: Int32 = np.zeros(max_seqs, np.int32)
        """The newest token that the core has seen."""
        self.limit: Int32 = np.zeros(max_seqs, np.int32)
        self.stop_from: Int32 = np.zeros(max_seqs, np.int32)
        """Stop ids count once the sequence has this many tokens (min_tokens)."""
        self.stop_ids: Int32 = np.full((max_seqs, STOP_COLUMNS), -1, np.int32)
        self.many_stops: Bool = np.zeros(max_seqs, np.bool_)
        """Has more stop ids than columns: they are looked up one by one."""
        self.stop_width = 1
        """Columns of `stop_ids` that any request has used so far."""
        self.fresh: Bool = np.zeros(max_seqs, np.bool_)
        """Has not delivered a token yet."""
        self.reports: Bool = np.zeros(max_seqs, np.bool_)
        """Wants to know how far its prompt is, and has not delivered a token yet."""
        self.synchronous: Bool = np.zeros(max_seqs, np.bool_)
        self.slow: Bool = np.zeros(max_seqs, np.bool_)
        """Its masks are computed beside the steps; it sits out until the next is ready."""
        self.ahead: Bool = np.zeros(max_seqs, np.bool_)
        """Its grammar has decided tokens that are not computed yet."""
        self.forced: dict[int, list[int]] = {}
        """Those that the workers have not been told, the last of the sequence, by slot."""
        self.in_flight: Int32 = np.zeros(max_seqs, np.int32)
        """Steps launched and not settled that contain the slot."""
        self.last_step: npt.NDArray[np.int64] = np.full(max_seqs, NO_STEP, np.int64)
        self.reserve: Int32 = np.zeros(max_seqs, np.int32)
        """Blocks it is expected to need in the end."""
        self.most: Int32 = np.zeros(max_seqs, np.int32)
        """Blocks it can need in the end."""
        self.share: Int32 = np.zeros(max_seqs, np.int32)
        """Column of the policy's served-tokens table."""
        self._free = list(range(max_seqs - 1, -1, -1))
        self._left: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_seated(self) -> int:
        """Slots in use, those that wait for their last step included."""
        return self.max_seqs - len(self._free)

    @property
    def num_running(self) -> int:
        return int(np.count_nonzero(self.running))

    def seat(self, request: Request, computed: int, settled: int, reserve: int, most: int) -> int:
        """Give `request` a free slot.

        Args:
            computed: tokens that need not be computed any more.
            settled: those of them whose KV exists now; a block that its first step copies does not.

        Returns:
            The slot.

        Raises:
            IndexError: none is free.
        """
        slot = self._free.pop()
        self.requests[slot] = request
        request.slot = slot
        self.running[slot] = self.live[slot] = True
        self.known[slot] = self.total[slot] = len(request.tokens)
        self.scheduled[slot], self.settled[slot] = computed, settled
        self.last_token[slot] = request.tokens[-1]
        self.limit[slot] = request.limit
        self.stop_from[slot] = request.num_prompt + request.sampling.min_tokens
        stops = request.stop_token_ids
        self.many_stops[slot] = len(stops) > STOP_COLUMNS
        self.stop_ids[slot] = -1
        if len(stops) <= STOP_COLUMNS:
            self.stop_ids[slot, : len(stops)] = stops
            self.stop_width = max(self.stop_width, len(stops))
        self.fresh[slot] = not request.delivered
        self.reports[slot] = request.reports and not request.delivered
        self.synchronous[slot] = request.synchronous
        self.slow[slot] = request.constraint is not None and request.constraint.slow
        self.ahead[slot] = False
        self.in_flight[slot] = 0
        self.last_step[slot] = NO_STEP
        self.reserve[slot], self.most[slot] = reserve, most
        self.share[slot] = request.share
        return slot

    def leave(self, slot: int) -> None:
        """Free `slot`; the next plan tells the workers."""
        request = self.requests[slot]
        if request is None:
            return
        request.slot = -1
        self.requests[slot] = None
        self.running[slot] = self.live[slot] = self.synchronous[slot] = self.slow[slot] = False
        self.known[slot] = self.scheduled[slot] = 0
        self.forced.pop(slot, None)
        self._free.append(slot)
        self._left.append(slot)

    def take_left(self) -> Int32:
        """Slots freed since the last call, each once."""
        left, self._left = self._left, []
        return np.array(list(dict.fromkeys(left)), np.int32)

    def announce_again(self, slots: Int32) -> None:
        """The plan that carried `slots` never reached the workers."""
        self._left = [*slots.tolist(), *self._left]

    def occupant(self, slot: int) -> Request:
        """The request in `slot`.

        Raises:
            LookupError: nobody is.
        """
        request = self.requests[slot]
        if request is None:
            raise LookupError(f"slot {slot} is empty")
        return request

    def outstanding_blocks(self, lengths: Int32, growth: Int32 | None = None) -> int:
        """Blocks the running requests are expected to take beyond the `lengths` [slots] they have: at least one each as long as
        they are not at their limit, and at most `growth` [slots], where that is known."""
        running = self.running
        lacking = np.minimum(np.maximum(self.reserve - lengths, 1), self.most - lengths)
        if growth is not None:
            lacking = np.minimum(lacking, growth)
        return int(lacking[running].sum())
