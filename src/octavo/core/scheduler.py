"""What to compute in the next step.

One token budget a step, spent in this order: a decode for every running request that can take one; chunks of prompts that are being
computed; admissions. When decodes share the step with prompts, chunks are sized so that the step lasts about `target_step_ms`.

Fairness among prompts: on even turns the oldest prompt goes first, on odd turns the shortest of the others and the newcomers do. So
a 32k prompt neither stalls the short ones behind it nor stops.

Memory: a request is admitted when the cache has room for what it and all running requests are *expected* to need in the end, so
that running out is rare. When it happens: unreferenced cached blocks go first, then held requests, then the request that has least
to lose is preempted and recomputed later. A request that has been evicted `MOST_EVICTIONS` times is protected while there is another
victim, and among the protected the oldest wins: somebody always finishes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from octavo.config.types import SchedulerConfig
from octavo.core.batch import Batch, Slots
from octavo.core.constraint import blamed
from octavo.core.kv.block_pool import NULL_BLOCK, OutOfBlocks
from octavo.core.kv.manager import KVManager
from octavo.core.kv.prefix_tree import common_tokens
from octavo.core.kv.tables import Match
from octavo.core.lifecycle import Lifecycle
from octavo.core.policy import Policy, WaitingQueue
from octavo.core.request import Request, RequestState
from octavo.core.step_time import StepTimeModel, chunk_pairs
from octavo.core.trial import MaskTrial
from octavo.errors import clause
from octavo.protocol.step import Int32, KnownTokens, SlotInit, StepPlan, TokenMasks

logger = logging.getLogger(__name__)

CHUNK_FLOOR = 32
"""Prompt tokens a step computes however long its decodes take..."""
FLOOR_SHARE = 0.25
"""... unless they are so far down a long prompt that they would take more than this share of the target,"""
CHUNK_LEAST = 8
"""and then still so many."""
PROMPT_STEP_FACTOR = 4.0
"""A step of prompts alone may last this many times the target: nobody's stream waits for it, but newcomers and aborts do."""
MOST_EVICTIONS = 3
UNDERWAY_BLOCKS = 2
"""A request waits for blocks of its prefix that another one is computing if there are at least this many."""
UNDERWAY_STEPS = 4
"""And if they will be there within about this many steps: requests behind it wait as well."""


@dataclass
class PromptBudget:
    """What is left for prompts in one step: tokens, and seconds when there is a target."""

    tokens: int
    seconds: float | None
    floor: int
    model: StepTimeModel
    whole: int
    """`tokens` before anything was spent."""
    floor_seconds: float = 0.0
    """What the floor may take, beyond `CHUNK_LEAST` tokens."""

    def room(self, start: int, wanted: int) -> int:
        """Tokens of a chunk after `start` others, at most `wanted`."""
        count = min(wanted, self.tokens)
        if self.seconds is not None:
            floor = min(self.floor, max(CHUNK_LEAST, self.model.largest_chunk(start, self.floor_seconds)))
            count = min(count, max(floor, self.model.largest_chunk(start, self.seconds)))
        return count

    def spend(self, start: int, count: int) -> None:
        self.tokens -= count
        self.floor = max(0, self.floor - count)
        if self.seconds is not None:
            self.seconds -= self.model.cost(start, count)


@dataclass
class Draft:
    """A plan in the making. Rows after the decodes: (slot, start, count, sample)."""

    step: int
    decodes: Slots = field(default_factory=lambda: np.empty(0, np.intp))
    grown: Int32 | None = None
    """[3, n]: slot, column, block of the table entries that decodes got."""
    rows: list[tuple[int, int, int, bool]] = field(default_factory=list)
    init: list[SlotInit] = field(default_factory=list)
    diffs: list[tuple[int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def table_diffs(self) -> Int32:
        """[3, n]: slot, column, block of every new table entry that no `SlotInit` lists."""
        if not self.diffs:
            return np.empty((3, 0), np.int32) if self.grown is None else self.grown
        diffs = np.array(self.diffs, np.int32).T
        return np.ascontiguousarray(diffs if self.grown is None else np.concatenate([self.grown, diffs], axis=1))

    @property
    def empty(self) -> bool:
        return not (len(self.decodes) or self.rows)


class Scheduler:
    """Plans steps over the shared state of one engine core."""

    def __init__(
        self,
        config: SchedulerConfig,
        batch: Batch,
        kv: KVManager,
        queue: WaitingQueue,
        policy: Policy,
        life: Lifecycle,
        *,
        tries: bool = False,
    ) -> None:
        """
        Args:
            tries: the workers can draw tokens first and have them judged then.
        """
        self.tries = tries
        self._trial: MaskTrial | None = None
        """Of the newest plan."""
        self.config = config
        self.batch = batch
        self.kv = kv
        self.queue = queue
        self.policy = policy
        self.life = life
        self.step_time = StepTimeModel(config.first_chunk)
        self._turn = 0
        self._promised = 0
        """Rows passed over in this turn that get a block when steps in flight settle."""
        self._swept = False
        """Duplicates, and what windows have left behind, have been freed in this turn."""
        self._starved: Request | None = None
        """For whose prompt others have been preempted: nobody is admitted in front of it until it has got their blocks."""
        self._refused: tuple[Request, int] | None = None
        """The request that did not fit last time, and the blocks there were."""

    def plan(self, step: int, now: float, in_flight: int) -> StepPlan | None:
        """The next step, or None when there is nothing that can be computed right now.

        Args:
            step: its id.
            now: time.monotonic().
            in_flight: steps launched and not settled yet.
        """
        self._promised, self._swept = 0, False
        draft = Draft(step)
        rest = self.batch.known - self.batch.scheduled
        computing = self._computing(rest)
        self._plan_decodes(draft, rest, self._decode_budget(bool(computing), rest), in_flight)
        taken = len(draft.decodes)
        if self.batch.ahead.any():
            taken += self._plan_forced(draft, rest, self.config.max_num_batched_tokens - taken)
            computing = [request for request in computing if self.batch.last_step[request.slot] != step]
        prompts = self._prompt_budget(draft, self.config.max_num_batched_tokens - taken)
        contended = len(computing) > 1 or (bool(computing) and len(self.queue) > 0)
        self._turn += contended
        if contended and self._turn % 2 and self._starved not in computing:
            self._plan_prompts(draft, computing[1:], prompts, in_flight)
            self._admit(draft, prompts, now, in_flight)
            self._plan_prompts(draft, computing[:1], prompts, in_flight)
        else:
            self._plan_prompts(draft, computing, prompts, in_flight)
            self._admit(draft, prompts, now, in_flight)
        return None if draft.empty else self._finish(draft)

    # Decodes

    def _decode_budget(self, computing: bool, rest: Int32) -> int:
        """Most decodes a step: all, but for a quarter when the token budget is smaller than the batch and prompts wait.

        Stages of a pipeline work on different requests at the same time: each has a share of the decodes, and there are no more shares
        than stages, whatever else is in flight. Each share reads all weights anew, so that one more makes every token wait longer.
        """
        budget, stages = self.config.max_num_batched_tokens, self.config.stages
        if budget < self.batch.max_seqs and (computing or len(self.queue) > 0):
            budget = max(1, budget - max(1, budget // 4))
        if stages == 1:
            return budget
        if self._shares_in_flight(rest) >= stages:
            return 0  # those that are ready go with those that the next one to settle brings
        return min(budget, max(1, -(-self.batch.num_running // stages)))

    def _shares_in_flight(self, rest: Int32) -> int:
        """Steps in flight with decodes. Those with prompts alone are not counted: they need no turn."""
        batch = self.batch
        decoding = batch.running & ~batch.fresh & (rest == 1) & (batch.in_flight > 0)
        return len(set(batch.last_step[decoding].tolist()))

    def _plan_decodes(self, draft: Draft, rest: Int32, budget: int, in_flight: int) -> None:
        batch = self.batch
        ready = batch.running & (rest == 1) & (batch.known < batch.limit)
        if in_flight and self.config.stages > 1:
            ready &= batch.in_flight == 0  # the first stage has to be told the token
        elif in_flight:
            ready &= ~(batch.synchronous & (batch.in_flight > 0))
        for slot in np.flatnonzero(ready & batch.slow).tolist() if batch.slow.any() else ():
            constraint = batch.occupant(slot).constraint
            ready[slot] = constraint is None or self.life.constraints.turns.has(constraint)
        slots = np.flatnonzero(ready)
        if len(slots) > budget:
            oldest = np.argsort(batch.last_step[slots], kind="stable")[:budget]
            slots = np.sort(slots[oldest])
        full = batch.scheduled[slots] >= self.kv.lengths[slots] * self.kv.block_size
        if full.any():
            growing = slots[full]
            if len(growing) <= self.kv.available:
                self.kv.extend_each(growing)
            else:
                growing = self._grow_under_pressure(growing, draft.step, in_flight)
                grown = np.zeros(batch.max_seqs, np.bool_)
                grown[growing] = True
                slots = slots[batch.running[slots] & (~full | grown[slots])]
            draft.grown = self.kv.last_entries(growing)
        draft.decodes = slots
        batch.last_step[slots] = draft.step

    def _plan_forced(self, draft: Draft, rest: Int32, budget: int) -> int:
        """Decodes whose next tokens are decided: all of them in one row. What has no room goes on like a prompt. Returns the tokens."""
        batch, kv, tokens = self.batch, self.kv, 0
        for slot in np.flatnonzero(batch.running & batch.ahead & (rest > 1)).tolist():
            count, start, have = int(rest[slot]), int(batch.scheduled[slot]), int(kv.lengths[slot])
            if batch.in_flight[slot] or tokens + count > budget or kv.blocks_for(start + count) - have > kv.available:
                continue
            kv.extend(slot, start + count)
            draft.diffs.extend(kv.entries(slot, have))
            self._add_row(draft, slot, start, count, True)
            batch.ahead[slot] = False
            tokens += count
        return tokens

    def _grow_under_pressure(self, slots: Slots, step: int, in_flight: int) -> Slots:
        """One more block for as many of `slots` as possible, most important first. Returns those that got one."""
        requests = sorted((self.batch.occupant(int(slot)) for slot in slots), key=self._keep_key)
        grown = []
        for request in requests:
            if request.state is not RequestState.RUNNING:
                continue
            try:
                if self._make_room(request, step, in_flight):
                    self.kv.extend(request.slot, (int(self.kv.lengths[request.slot]) + 1) * self.kv.block_size)
                    grown.append(request)
            except Exception as error:
                self._planning_failed(request, error)
        return np.array(sorted(r.slot for r in grown if r.state is RequestState.RUNNING), np.intp)

    # Prompts

    def _prompt_budget(self, draft: Draft, tokens: int) -> PromptBudget:
        target = self.config.target_step_ms
        if target is None or not self.config.chunked_prefill:
            return PromptBudget(tokens, None, 0, self.step_time, tokens)
        decodes = draft.decodes
        if len(decodes):
            pairs = float(self.batch.scheduled[decodes].sum(dtype=np.int64)) + len(decodes)
            seconds = target / 1000.0 - self.step_time.predict(len(decodes), pairs)
            most = self.step_time.most_tokens() - len(decodes)
        else:
            seconds = PROMPT_STEP_FACTOR * target / 1000.0 - self.step_time.predict(0, 0.0)
            most = self.step_time.most_tokens()
        tokens = min(tokens, max(most, CHUNK_FLOOR))
        return PromptBudget(tokens, seconds, CHUNK_FLOOR, self.step_time, tokens, FLOOR_SHARE * target / 1000.0)

    def _computing(self, rest: Int32) -> list[Request]:
        """Admitted requests whose prompt is not computed yet: the oldest, then the others, shortest rest first."""
        batch = self.batch
        slots = np.flatnonzero(batch.running & (rest > 1))
        if not len(slots):
            return []
        requests = sorted((batch.occupant(slot) for slot in slots.tolist()), key=self._keep_key)
        return [requests[0], *sorted(requests[1:], key=lambda r: int(rest[r.slot]))]

    def _plan_prompts(self, draft: Draft, requests: list[Request], budget: PromptBudget, in_flight: int) -> None:
        for request in requests:
            if budget.tokens <= 0:
                return
            if request.state is not RequestState.RUNNING or self.batch.last_step[request.slot] == draft.step:
                continue
            try:
                self._plan_chunk(draft, request, budget, in_flight)
            except Exception as error:
                self._planning_failed(request, error)

    def _plan_chunk(self, draft: Draft, request: Request, budget: PromptBudget, in_flight: int) -> None:
        slot, kv = request.slot, self.kv
        start = int(self.batch.scheduled[slot])
        rest = int(self.batch.known[slot]) - start
        count = self._chunk(request, budget, start, rest)
        have = int(kv.lengths[slot])
        if count and kv.blocks_for(start + count) - have > kv.available:
            # Decodes and older prompts are served by now: make room only if nothing else can go on.
            if have * kv.block_size <= start and not kv.available and draft.empty and not self._make_room(request, draft.step, in_flight):
                self._starved = request
                return
            count = min(count, (have + kv.available) * kv.block_size - start)
        if count <= 0:
            return
        if self._starved is request:
            self._starved = None
        kv.extend(slot, start + count)
        draft.diffs.extend(kv.entries(slot, have))
        self._add_row(draft, slot, start, count, count == rest)
        budget.spend(start, count)

    def _chunk(self, request: Request, budget: PromptBudget, start: int, rest: int) -> int:
        """Tokens of the next chunk of a prompt that has `rest` left; 0 is none in this step."""
        threshold = self.config.long_prefill_token_threshold
        wanted = min(rest, threshold) if 0 < threshold < request.num_prompt else rest
        if not self.config.chunked_prefill and wanted > budget.tokens:
            # Whole prompts only, unless this one is larger than what decodes leave.
            return budget.tokens if wanted > budget.whole else 0
        return budget.room(start, wanted)

    def _add_row(self, draft: Draft, slot: int, start: int, count: int, sample: bool) -> None:
        draft.rows.append((slot, start, count, sample))
        self.batch.last_step[slot] = draft.step

    # Admission

    def _admit(self, draft: Draft, budget: PromptBudget, now: float, in_flight: int) -> None:
        while budget.tokens > 0 and self.batch.num_free:
            request = self.queue.peek()
            if request is None:
                return
            try:
                if not self._try_admit(draft, request, budget, now, in_flight):
                    return
            except Exception as error:
                self._planning_failed(request, error)

    def _try_admit(self, draft: Draft, request: Request, budget: PromptBudget, now: float, in_flight: int) -> bool:
        """Seat `request` and plan its first chunk. False: not now, and nobody behind it either."""
        kv, batch = self.kv, self.batch
        alone = batch.num_seated == 0
        room = kv.room - batch.outstanding_blocks(kv.lengths, kv.growth())
        if not alone and self._refused is not None and self._refused[0] is request and room <= self._refused[1]:
            return False
        reserve, most = self._expected_blocks(request)
        match = self._find_match(request)
        if not alone and self._underway(request, match, budget):
            return False
        if kv.needed(reserve, match) > room - kv.idle_room(match):
            if not alone:
                self._refused = request, room
                return False
            # A lone request is admitted in any case; held blocks go first, except those it forks from.
            source = self.life.fork_source(request)
            while kv.needed(reserve, match) > kv.room - kv.idle_room(match) and self.life.give_up_held(source):
                pass
        self._refused = None
        return self._seat(draft, request, match, (reserve, most), budget, now, in_flight)

    def _seat(
        self, draft: Draft, request: Request, match: Match, blocks: tuple[int, int], budget: PromptBudget, now: float, in_flight: int
    ) -> bool:
        """Give `request` a slot behind the tokens of `match`, and plan its first chunk."""
        kv, batch = self.kv, self.batch
        known, start = len(request.tokens), match.num_tokens
        count = self._chunk(request, budget, start, known - start)
        if count <= 0:
            return False
        shared = len(match.blocks) * kv.block_size
        slot = batch.seat(request, start, shared, *blocks)
        kv.attach(slot, match)
        fits = len(match.blocks) + kv.available - int(match.tail_block != NULL_BLOCK and kv.num_idle(match))
        if match.tail_block != NULL_BLOCK and fits <= len(match.blocks):
            start = shared
            match = replace(match, tail_block=NULL_BLOCK, num_tokens=start)
            batch.scheduled[slot] = start
            fits = len(match.blocks) + kv.available
        count = min(count, fits * kv.block_size - start)
        if count <= 0:
            return self._unseat(request, in_flight)
        copies = kv.copy_tail(slot, match, draft.step) if match.tail_block != NULL_BLOCK else []
        kv.extend(slot, start + count)
        draft.copies.extend(copies)
        blocks_of_main, entries = kv.first_blocks(slot)
        draft.diffs.extend(entries)
        self._add_row(draft, slot, start, count, start + count == known)
        draft.init.append(
            SlotInit(
                slot=slot,
                token_ids=np.array(request.tokens, np.int32),
                num_prompt_tokens=request.num_prompt,
                block_ids=blocks_of_main,
                sampling=request.sampling,
                index=request.index,
                eos_token_ids=list(request.eos_token_ids),
                adapter="",
            )
        )
        budget.spend(start, count)
        self.life.admitted(request, now, start)
        return True

    def _unseat(self, request: Request, in_flight: int) -> bool:
        """Undo a seat for which there was not even one block."""
        slot = request.slot
        self.kv.release(slot, request.tokens, 0, request.extra_key)
        self.batch.leave(slot)
        if self.batch.num_seated == 0 and not in_flight and not self.life.give_up_held():
            raise RuntimeError("the KV cache has no free block though nothing runs")
        return False

    @staticmethod
    def _reads_no_cache(request: Request) -> bool:
        return bool(request.sampling.skip_reading_prefix_cache) or (request.wants_prompt_logprobs and not request.delivered)

    def _find_match(self, request: Request) -> Match:
        most = len(request.tokens) - 1
        source = self.life.fork_source(request)
        forked = self.kv.match_run(source, request.tokens, most) if source is not None else Match()
        if self._reads_no_cache(request):
            return forked if not request.wants_prompt_logprobs else Match()
        if forked.num_tokens >= most:
            return forked
        cached = self.kv.match_cached(request.tokens, request.extra_key, most)
        return cached if cached.num_tokens > forked.num_tokens else forked

    def _underway(self, request: Request, match: Match, budget: PromptBudget) -> bool:
        """Whether a running prompt is about to finish computing more of `request`'s prefix than is cached: waiting a step or a few
        for it beats computing the same blocks twice. So a burst of requests behind one system prompt computes it once."""
        if not self.kv.prefix_caching or self._reads_no_cache(request):
            return False
        batch, size = self.batch, self.kv.block_size
        data = request.tokens.tobytes()
        for slot in np.flatnonzero(batch.running & batch.fresh).tolist():
            leader = batch.occupant(slot)
            if leader.extra_key != request.extra_key or leader.tokens[:size] != request.tokens[:size] or self.kv.is_closed(slot):
                continue
            common = min(common_tokens(leader.tokens[: leader.num_prompt].tobytes(), data), len(request.tokens) - 1) // size * size
            ahead = common - int(batch.scheduled[slot])
            pending = batch.settled[slot] < common and ahead <= UNDERWAY_STEPS * budget.whole
            if pending and common - match.num_tokens >= UNDERWAY_BLOCKS * size:
                return True
        return False

    def _expected_blocks(self, request: Request) -> tuple[int, int]:
        """(blocks the request will probably need, blocks it can need at most). The last token of a sequence needs no KV."""
        most = request.limit - 1
        expected = most
        if request.stop_token_ids:
            # A request that outgrew the mean, or was evicted for lack of room, is expected to be a long one.
            outputs = max(self.life.output_length.mean, 1.25 * request.num_outputs) * (1 << min(request.preemptions, 16))
            expected = min(most, max(len(request.tokens), request.num_prompt + int(outputs)))
        return self.kv.blocks_for(max(expected, len(request.tokens))), self.kv.blocks_for(max(most, len(request.tokens)))

    # Pressure

    def _keep_key(self, request: Request) -> tuple[int, float, int]:
        """Sorts requests by who is served first."""
        return self.policy.importance(request), request.arrival, request.order

    def _victim_key(self, request: Request) -> tuple[int, int, int, float, int]:
        """The greatest is preempted."""
        if request.preemptions >= MOST_EVICTIONS:
            return 0, 0, 0, request.arrival, request.order
        settled = int(self.batch.settled[request.slot])
        return 1, self.policy.importance(request), -settled, request.arrival, request.order

    def _make_room(self, request: Request, step: int, in_flight: int) -> bool:
        """Get one block free for `request`. False: it must wait, or has been preempted itself."""
        kv, batch, life = self.kv, self.batch, self.life
        while kv.available < 1:
            if not self._swept:
                self._swept = True
                for slot in np.flatnonzero(batch.running).tolist() if kv.slides else ():
                    life.slide(batch.occupant(slot))  # also those that siblings would fork from: they can do without
                kv.free_duplicates()
                continue
            if life.give_up_held():
                continue
            if life.leaving_blocks > self._promised:
                self._promised += 1
                return False
            if in_flight and kv.pinned:
                return False
            candidates = np.flatnonzero(batch.running & (batch.last_step != step))
            victims = [batch.occupant(slot) for slot in candidates.tolist()]
            if len(victims) == 1:
                if in_flight:
                    return False
                raise OutOfBlocks("the KV cache is full though nothing else runs")
            victim = max(victims, key=self._victim_key)
            life.preempt(victim)
            self._swept = False
            if victim is request:
                return False
        return True

    def _planning_failed(self, request: Request, error: Exception) -> None:
        logger.error("Planning request %s[%d] failed.", request.id, request.index, exc_info=error)
        self.life.fail(request, f"The engine could not schedule this request: {clause(error)}.")

    # The plan

    def _finish(self, draft: Draft) -> StepPlan:
        batch = self.batch
        rows = sorted(draft.rows, key=lambda row: row[2] != 1)
        slots, start = draft.decodes, batch.scheduled[draft.decodes]
        count: Int32 = np.ones(len(slots), np.int32)
        sample: npt.NDArray[np.bool_] = np.ones(len(slots), np.bool_)
        batch.scheduled[slots] = start + 1
        batch.known[slots] += 1
        if rows:
            more = np.array([row[:3] for row in rows], np.int32)
            samples = np.array([row[3] for row in rows], np.bool_)
            batch.scheduled[more[:, 0]] = more[:, 1] + more[:, 2]
            batch.known[more[:, 0]] += samples
            slots, start = np.concatenate([slots, more[:, 0]]), np.concatenate([start, more[:, 1]])
            count, sample = np.concatenate([count, more[:, 2]]), np.concatenate([sample, samples])
        batch.in_flight[slots] += 1
        constrained = slots[sample & batch.synchronous[slots]] if batch.synchronous.any() else slots[:0]
        self._trial, masks = self._constrain(constrained.astype(np.int32)) if len(constrained) else (None, None)
        table_slots, table_index, table_blocks = draft.table_diffs()
        copy_src, copy_dst = np.array(draft.copies, np.int32).T.copy() if draft.copies else np.empty((2, 0), np.int32)
        return StepPlan(
            step_id=draft.step,
            init=draft.init,
            free_slots=batch.take_left(),
            slots=slots.astype(np.int32),
            start=start,
            count=count,
            sample=sample,
            table_slots=table_slots,
            table_index=table_index,
            table_blocks=table_blocks,
            copy_src=copy_src,
            copy_dst=copy_dst,
            num_tokens=int(count.sum()),
            max_context=int((start + count).max()),
            masks=masks,
            trial=self._trial,
            forced=self._forced(slots) if batch.forced else None,
            told=batch.last_token[draft.decodes] if self.config.stages > 1 else None,
        )

    def _forced(self, slots: Slots) -> KnownTokens | None:
        """Tokens of the plan's rows that the workers do not know."""
        batch = self.batch
        found = [(slot, tokens) for slot in slots.tolist() if (tokens := batch.forced.pop(slot, None))]
        if not found:
            return None
        places = [(slot, len(batch.occupant(slot).tokens) - len(tokens) + i, t) for slot, tokens in found for i, t in enumerate(tokens)]
        return KnownTokens(*np.array(places, np.int32).T.copy())

    def _constrain(self, slots: Int32) -> tuple[MaskTrial | None, TokenMasks | None]:
        """How the constrained rows of the plan are held to what they may say: in a trial, or by masks."""
        requests = [self.batch.occupant(slot) for slot in slots.tolist()]
        if not self.tries or self.life.constraints.scarce:
            return None, self._masks(slots, requests)
        tried = np.array([r.constraint is not None and not r.sampling.min_tokens and r.constraint.may_be_tried() for r in requests])
        trial = MaskTrial(self.life.constraints, slots[tried], [requests[row] for row in np.flatnonzero(tried).tolist()])
        rest = np.flatnonzero(~tried).tolist()
        return (trial if tried.any() else None), (self._masks(slots[rest], [requests[row] for row in rest]) if rest else None)

    def _masks(self, slots: Int32, requests: list[Request]) -> TokenMasks:
        """What rows of the plan may sample. A request whose constraint fails ends with an error."""
        masks, problems = self.life.constraints.masks(slots, requests)
        self._note_slow(slots, requests)
        for row, problem in problems.items():
            self.life.fail(requests[row], problem, param=blamed(requests[row]))
        return masks

    def _note_slow(self, slots: Int32, requests: list[Request]) -> None:
        self.batch.slow[slots] = [request.constraint is not None and request.constraint.slow for request in requests]

    def conclude(self) -> None:
        """The newest plan has been computed: what its trial has shown of the constraints, if it had one."""
        trial, self._trial = self._trial, None
        if trial is None:
            return
        self._note_slow(trial.slots, trial.requests)
        for request, problem in trial.problems:
            self.life.fail(request, problem, param=blamed(request))


def plan_pairs(plan: StepPlan) -> float:
    """Query-key pairs of a plan, for the step-time model."""
    if plan.num_tokens == len(plan.slots):
        return float(plan.start.sum(dtype=np.int64)) + plan.num_tokens
    return float(sum(chunk_pairs(s, c) for s, c in zip(plan.start.tolist(), plan.count.tolist(), strict=True)))
