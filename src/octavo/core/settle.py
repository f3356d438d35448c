"""What a finished step means: tokens to requests, ends, deltas for the frontend.

The steady case (every row of the step is alive and got one token) is array operations plus one Python loop that appends tokens and
builds deltas. Everything rare happens on a few rows afterwards: first tokens, ends, logprobs, errors.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from octavo.config.address_space import why_ended
from octavo.core.batch import Batch, Slots
from octavo.core.constraint import blamed
from octavo.core.kv.manager import KVManager
from octavo.core.lifecycle import Lifecycle
from octavo.core.policy import Policy
from octavo.core.request import Request, without_prompt_logprobs
from octavo.core.restriction import nothing_left
from octavo.protocol.engine import FinishReason, LogprobRow, PromptProgress, TokenDelta
from octavo.protocol.step import Bool, Int32, StepPlan, StepResult

logger = logging.getLogger(__name__)

PUBLISH_BLOCKS = 4
"""Output blocks a running request shares at a time. The rest follows when it ends."""
MAX_FORCED = 16
"""Most tokens that a grammar decides at once."""
LEAST_FORCED = 2
"""A single one saves a step of its row and widens another: no gain in a batch."""
SLIDE_SHARE = 4
"""Blocks behind the window are let go of a few at a time too: at most this part of the window's blocks, rounded down, and no more than are
shared at a time. Where memory is short, the scheduler lets go of all of them before anything else."""


@dataclass(frozen=True)
class Flight:
    """A step on its way."""

    plan: StepPlan
    launched: float
    """time.monotonic()."""


class Settler:
    """Applies step results to the shared state of one engine core."""

    def __init__(self, batch: Batch, kv: KVManager, policy: Policy, life: Lifecycle, *, forces: bool = False) -> None:
        """
        Args:
            forces: tokens that a grammar leaves no choice for need not be sampled.
        """
        self.batch = batch
        self.forces = forces
        self.kv = kv
        self.policy = policy
        self.life = life
        blocks = max(1, min(PUBLISH_BLOCKS, kv.window_blocks // SLIDE_SHARE))
        self._slide_tokens = blocks * kv.block_size

    def settle(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenDelta]:
        """Account for `result`. Requests that ended in the meantime ignore theirs."""
        batch = self.batch
        slots = plan.slots.astype(np.intp)
        batch.in_flight[slots] -= 1
        self._apply_errors(plan, result)
        live = batch.live[slots]
        rows = slice(None) if live.all() else live
        batch.settled[slots[rows]] = (plan.start + plan.count)[rows]
        if self.policy.charges:
            self.policy.charge(batch.share[slots[rows]], plan.count[rows])
        for slot, scored in (result.prompt_logprobs or {}).items():
            request = batch.requests[slot]
            if request is not None and batch.live[slot] and request.wants_prompt_logprobs:
                request.prompt_rows.extend(scored)
        answered, tokens = self._tokens(result, slots[plan.sample])
        reports = self._report_prompts(slots, now) if batch.reports[slots].any() else []
        deltas = self._deliver(answered, tokens, result.logprobs, now) if len(answered) else []
        deltas = [*reports, *deltas] if reports else deltas
        if self.kv.prefix_caching:
            self._publish(plan, slots)
        if self.kv.slides:
            self._slide(plan, slots)
        return deltas

    def _report_prompts(self, slots: Slots, now: float) -> list[TokenDelta]:
        """How far the prompts are whose requests want to know: news only, whatever a preemption has undone."""
        batch, deltas = self.batch, []
        for slot in slots[batch.reports[slots] & batch.live[slots]].tolist():
            request = batch.occupant(slot)
            processed = min(int(batch.settled[slot]), request.num_prompt)
            if processed > request.reported:
                request.reported = processed
                milliseconds = round((now - request.scheduled_time) * 1e3, 3)
                progress = PromptProgress(request.num_prompt, max(0, request.cached), processed, milliseconds)
                deltas.append(TokenDelta(request.id, request.index, [], prompt_progress=progress))
            if processed == request.num_prompt:
                batch.reports[slot] = False
        return deltas

    def fail_step(self, plan: StepPlan, message: str) -> None:
        """The step could not be computed: every request in it ends with `message`."""
        self.batch.in_flight[plan.slots] -= 1
        self.fail_rows(plan, message)

    def fail_rows(self, plan: StepPlan, message: str) -> None:
        """End every request of the step with `message`."""
        for slot in plan.slots.tolist():
            request = self.batch.requests[slot]
            if request is not None and self.batch.live[slot]:
                self.life.fail(request, message)

    def _apply_errors(self, plan: StepPlan, result: StepResult) -> None:
        if not result.errors:
            return
        in_step = set(plan.slots.tolist())
        for slot, message in result.errors.items():
            request = self.batch.requests[slot] if slot in in_step else None
            if request is not None and self.batch.live[slot]:
                why = nothing_left(request)
                self.life.fail(request, why or message, param="allowed_token_ids" if why else None)

    def _tokens(self, result: StepResult, sampled: Slots) -> tuple[Slots, Int32]:
        """(slots, tokens) of the live rows that got a token. Rows that lack one are dealt with here.

        Args:
            sampled: the slots for which there should be a token, in order.
        """
        batch, slots, tokens = self.batch, sampled, result.tokens
        if result.counts is None and len(result.slots) == len(sampled) and (result.slots == sampled).all():
            good = batch.live[slots] & (tokens >= 0)
            if good.all():
                return slots, tokens
        else:
            slots, tokens = self._uneven(result)
            good = batch.live[slots] & (tokens >= 0) & np.isin(slots, sampled)
        slots, tokens = slots[good], tokens[good]
        for slot in sampled[batch.live[sampled] & ~np.isin(sampled, slots)].tolist():
            if batch.known[slot] > batch.total[slot] + batch.in_flight[slot]:
                self.life.fail(batch.occupant(slot), "The engine returned no token for this request.")
        return slots, tokens

    def _uneven(self, result: StepResult) -> tuple[Slots, Int32]:
        """The rows with one token, of a result in which rows may have yielded none (their step is planned again) or several.

        Both need a request with no later step in flight, which only a synchronous one guarantees; several also need KV for each,
        which no plan of this scheduler provides. A row that breaks this ends with an error.
        """
        if result.counts is None:
            return result.slots.astype(np.intp), result.tokens
        batch, counts = self.batch, result.counts
        first = np.cumsum(counts) - counts
        for slot, count in zip(result.slots.tolist(), counts.tolist(), strict=True):
            if count == 1 or not batch.live[slot]:
                continue
            if count > 1 or batch.in_flight[slot]:
                self.life.fail(batch.occupant(slot), f"The engine returned {count} tokens for this request where one was planned.")
                continue
            batch.known[slot] -= 1
            batch.scheduled[slot] = batch.settled[slot] = batch.known[slot] - 1
        one = counts == 1
        return result.slots[one].astype(np.intp), result.tokens[first[one]]

    def _deliver(self, slots: Slots, tokens: Int32, logprobs: dict[int, list[LogprobRow]] | None, now: float) -> list[TokenDelta]:
        batch = self.batch
        requests = batch.requests
        owners: list[Request] = [requests[slot] for slot in slots.tolist()]
        ids = tokens.tolist()
        for request, token in zip(owners, ids, strict=True):
            request.tokens.append(token)
        deltas = [TokenDelta(request.id, request.index, [token]) for request, token in zip(owners, ids, strict=True)]
        self.life.counters.generation_tokens += len(deltas)

        if logprobs:
            row_of = {slot: row for row, slot in enumerate(slots.tolist())}
            for slot, rows in logprobs.items():
                if slot in row_of:
                    deltas[row_of[slot]].logprobs = rows

        batch.last_token[slots] = tokens
        ended, stopped = self._ends(slots, tokens)
        constrained = self.batch.synchronous[slots]
        if constrained.any():
            for row in np.flatnonzero(constrained).tolist():
                if self._constrain(owners[row], ids[row]):
                    ended[row] = stopped[row] = True
                elif self.forces and not ended[row] and batch.live[slots[row]]:
                    ended[row], stopped[row] = self._go_on(owners[row], deltas[row])
        fresh = batch.fresh[slots]
        special = ended | fresh
        if special.any():
            for row in np.flatnonzero(special).tolist():
                if fresh[row]:
                    self._first(owners[row], deltas[row], now)
                if ended[row]:
                    self._last(owners[row], deltas[row], bool(stopped[row]), now)
        return deltas

    def _constrain(self, request: Request, token: int) -> bool:
        """Move a request's constraint on by its token. True: its output is complete. What it cannot follow ends it with an error."""
        constraint = request.constraint
        if constraint is None:
            return False
        try:
            constraint.accept(token)
        except Exception as error:
            self.life.fail(request, why_ended(error, f"{error}"), param=blamed(request))
            return False
        return constraint.finished

    def _go_on(self, request: Request, delta: TokenDelta) -> tuple[bool, bool]:
        """Take the tokens that the grammar of a request decides on its own as if they had been sampled: nothing else could have been, and the
        next step computes all of them. Returns whether the request ends with them, and if so, because of its last token."""
        batch, slot, constraint = self.batch, request.slot, request.constraint
        if constraint is None or request.sampling.logprobs is not None or request.sampling.logprob_token_ids is not None:
            return False, False
        taken: list[int] = []
        ended = stopped = False
        forced = constraint.forced_tokens()[: min(MAX_FORCED, request.limit - len(request.tokens))]
        for token in forced if len(forced) >= LEAST_FORCED else ():
            stopped = request.stopped_by(token, request.num_outputs)
            request.tokens.append(token)
            taken.append(token)
            stopped |= self._constrain(request, token)
            ended = stopped or len(request.tokens) >= request.limit
            if ended or not batch.live[slot]:
                break
        if taken:
            delta.token_ids.extend(taken)
            self.life.counters.generation_tokens += len(taken)
            batch.known[slot] += len(taken)
            batch.total[slot] += len(taken)
            batch.last_token[slot] = taken[-1]
            batch.ahead[slot] = True
            batch.forced[slot] = taken
        return ended, stopped

    def _ends(self, slots: Slots, tokens: Int32) -> tuple[Bool, Bool]:
        """(rows that end here, rows that end because of their token)."""
        batch = self.batch
        before = batch.total[slots]
        batch.total[slots] = before + 1
        stopped: Bool = batch.stop_ids[slots, 0] == tokens
        for column in range(1, batch.stop_width):
            stopped |= batch.stop_ids[slots, column] == tokens
        many = batch.many_stops[slots]
        if many.any():
            for row in np.flatnonzero(many).tolist():
                stopped[row] = int(tokens[row]) in batch.occupant(int(slots[row])).stop_token_ids
        stopped &= before >= batch.stop_from[slots]
        return stopped | (before + 1 >= batch.limit[slots]), stopped

    def _first(self, request: Request, delta: TokenDelta, now: float) -> None:
        self.batch.fresh[request.slot] = False
        request.delivered = True
        request.first_token_time = now
        delta.num_cached_tokens = request.cached
        delta.times = request.times()  # a stop string ends a request in the frontend: there may be no last delta
        if request.wants_prompt_logprobs:
            delta.prompt_logprobs = [None, *request.prompt_rows]
            request.prompt_rows = []
            request.sampling = without_prompt_logprobs(request.sampling)
        if request.family is None or request.family.leader is request:
            self.life.counters.prompt_tokens += request.num_prompt
        self.life.prompt_computed(request)

    def _last(self, request: Request, delta: TokenDelta, stopped: bool, now: float) -> None:
        token = delta.token_ids[-1]
        delta.finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        delta.stop_reason = request.stop_reason(token) if stopped else None
        self.life.finish(request, now)
        delta.times = request.times()

    def _publish(self, plan: StepPlan, slots: Slots) -> None:
        """Share the blocks that are full by now: prompts' at once, those of decodes a few at a time, when it is their slot's turn,
        so that requests that march in step do not all come in the same one."""
        batch, size = self.batch, self.kv.block_size
        slots = slots[(plan.count > 1) | ((slots + plan.step_id) % (PUBLISH_BLOCKS * size) == 0)]
        slots = slots[batch.live[slots] & (batch.settled[slots] // size > self.kv.published[slots])]
        for slot, settled in zip(slots.tolist(), batch.settled[slots].tolist(), strict=True):
            request = batch.occupant(slot)
            self.kv.publish(slot, request.tokens, settled, request.extra_key)

    def _slide(self, plan: StepPlan, slots: Slots) -> None:
        """Let go of what the windows of the plan's rows have left behind: of decodes when it is their slot's turn, as for `_publish`. Not
        of what siblings are going to fork from."""
        slots = slots[((slots + plan.step_id) % self._slide_tokens == 0) | (plan.count > 1)]
        slots = slots[self.batch.live[slots]]
        for slot in self.kv.behind_window(slots, self.batch.settled[slots]).tolist():
            request = self.batch.occupant(slot)
            if request.family is None or request.family.leader is not request or not request.family.unforked:
                self.life.slide(request)
