"""The engine core: plan -> dispatch -> settle, with a bounded number of steps in flight.

Owns one scheduler, one KV cache and one executor. Nothing a request does, and no step that fails, ends the loop: the requests
concerned end with an error, the others go on.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque

from octavo.config.address_space import why_ended
from octavo.config.types import EngineConfig
from octavo.core.batch import Batch
from octavo.core.constraint import WAIT_SECONDS
from octavo.core.kv.manager import KVManager
from octavo.core.lifecycle import Lifecycle
from octavo.core.policy import WaitingQueue, make_policy
from octavo.core.scheduler import Scheduler, plan_pairs
from octavo.core.settle import Flight, Settler
from octavo.errors import EngineDead, clause, debugging
from octavo.executor.base import Executor
from octavo.protocol.engine import AbortRequests, EngineStats, NewRequest, ReleaseHeld, StepOutputs, TokenDelta, Vocabulary
from octavo.protocol.step import StepPlan

logger = logging.getLogger(__name__)

IDLE_TURNS = 3
"""Turns with waiting work, nothing in flight and nothing to plan, before a request is given up for stuck."""


class EngineCore:
    """Turns requests into steps and steps into tokens. Not thread-safe: one thread calls everything."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        shape, scheduler = executor.cache_shape, config.scheduler
        max_model_len = min(config.model.max_model_len, executor.ready_report.max_model_len or config.model.max_model_len)
        self.executor = executor
        self.inflight = scheduler.inflight
        self.policy = make_policy(scheduler.policy)
        self.batch = Batch(scheduler.max_num_seqs)
        self.kv = KVManager(shape, scheduler.max_num_seqs, max_model_len, config.cache.prefix_caching)
        self.queue = WaitingQueue(self.policy)
        self.life = Lifecycle(self.batch, self.kv, self.queue, self.policy, max_model_len)
        tries = executor.tries and not scheduler.inflight
        self.scheduler = Scheduler(scheduler, self.batch, self.kv, self.queue, self.policy, self.life, tries=tries)
        # On a GPU such a step leaves the graphs of decodes, which nobody has weighed against the steps that it saves.
        forces = scheduler.stages == 1 and config.device.kind == "cpu"
        self.settler = Settler(self.batch, self.kv, self.policy, self.life, forces=forces)
        self._flights: deque[Flight] = deque()
        self._next_step = 0
        self._idle_turns = 0
        self._last_tokens = 0
        self._last_time = time.monotonic()

    # Messages

    def add(self, request: NewRequest) -> None:
        """Take in a request. One that cannot be served ends with an error delta in the next turn."""
        self.life.add(request)

    def abort(self, message: AbortRequests) -> None:
        """End requests; their last delta (finish_reason abort) comes with the next turn. Unknown ids are ignored."""
        for request_id in message.request_ids:
            self.life.abort(request_id, message.index)

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """What tokens stand for. Must come before the first request with an output constraint."""
        self.life.constraints.set_vocabulary(vocabulary)

    def release(self, message: ReleaseHeld) -> None:
        """Let go of the blocks of held requests."""
        for request_id in message.request_ids:
            self.life.release_held(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached tokens. Requests in progress keep their blocks, but nothing built on them is shared."""
        self.kv.reset([request.run for request in self.life.held if request.run is not None])
        return True

    def has_work(self) -> bool:
        """Whether `step` has anything to do or to deliver."""
        return bool(self.life.num_live or self._flights or self.life.outbox)

    def prepare(self) -> bool:
        """Use a moment for what makes later steps quicker; whether something is left of that."""
        try:
            return self.executor.prepare(idle=not self.has_work())
        except Exception:
            logger.exception("Preparing for quicker steps failed; the engine goes on without.")
            return False

    def shutdown(self) -> None:
        self.life.constraints.close()
        self.executor.shutdown()

    # The turn

    def step(self) -> StepOutputs:
        """One turn: launch a step if there is one to launch, settle at most one."""
        deltas: list[TokenDelta] = []
        while self._flights and self._next_waits():
            deltas += self._settle()
        self.life.unpark(wait=not self._flights and self.life.num_live == self.life.constraints.num_parked)
        now = time.monotonic()
        plan = self._plan(now)
        if plan is not None:
            self._launch(plan, now)
        if self._flights and (plan is None or len(self._flights) > self.inflight):
            deltas += self._settle()
            if plan is None and self.scheduler.config.stages > 1:
                # All rows waited for their tokens, which the first stage has to be told. It waits now, and what is delivered can wait.
                now = time.monotonic()
                plan = self._plan(now)
                if plan is not None:
                    self._launch(plan, now)
        elif plan is None:
            self.life.constraints.turns.wait(WAIT_SECONDS)
        self._watch(plan is not None)
        if self.life.outbox:
            deltas = [*deltas, *self.life.outbox]
            self.life.outbox.clear()
        return StepOutputs(deltas, self.stats())

    def _next_waits(self) -> bool:
        """Whether a request in flight can only go on once its token is known (its constraint needs it).

        Then the step in flight is settled before the next is planned. Planning without that request would keep the device busy, but
        give it a token in every second step only; what is lost instead is the overlap of planning with computing.
        """
        batch = self.batch
        return bool((batch.synchronous & batch.live & (batch.in_flight > 0)).any())

    def _plan(self, now: float) -> StepPlan | None:
        if not self.life.num_live:
            return None
        try:
            return self.scheduler.plan(self._next_step, now, len(self._flights))
        except Exception as error:
            logger.exception("Planning a step failed; the running requests end with an error.")
            self._forget_step(self._next_step)
            for request in self.batch.requests:
                if request is not None:
                    self.life.fail(request, why_ended(error, f"The engine could not plan a step: {clause(error)}."))
            return None

    def _launch(self, plan: StepPlan, now: float) -> None:
        self._next_step += 1
        try:
            self.executor.submit(plan)
        except Exception as error:
            self._log(f"Step {plan.step_id} could not be launched.", error)
            self._forget_step(plan.step_id)
            self.batch.announce_again(plan.free_slots)
            self.settler.fail_step(plan, why_ended(error, f"The engine failed while computing this request: {clause(error)}."))
            self.life.settle(self.life.settled_step)
            return
        self.scheduler.conclude()
        self._flights.append(Flight(plan, now))

    @staticmethod
    def _log(what: str, error: Exception) -> None:
        """Who finds that a rank is gone has said so, in a line; that all steps after it fail is nothing new."""
        if not isinstance(error, EngineDead) or debugging(sys.argv):
            logger.error("%s", what, exc_info=error)

    def _forget_step(self, step: int) -> None:
        """Step `step` will never run: what was to wait for it waits for the newest step in flight instead, or for nothing."""
        fence = self._flights[-1].plan.step_id if self._flights else self.life.settled_step
        last = self.batch.last_step
        last[last == step] = fence
        self.kv.lower_fence(step, fence)

    def _settle(self) -> list[TokenDelta]:
        flight = self._flights.popleft()
        plan, deltas = flight.plan, []
        try:
            result = self.executor.collect()
            if result.step_id != plan.step_id:
                raise RuntimeError(f"step {result.step_id} came back instead of {plan.step_id}")
        except Exception as error:
            self._log(f"Step {plan.step_id} failed.", error)
            self.settler.fail_step(plan, why_ended(error, f"The engine failed while computing this request: {clause(error)}."))
        else:
            now = time.monotonic()
            try:
                deltas = self.settler.settle(plan, result, now)
            except Exception as error:
                logger.exception("Settling step %d failed.", plan.step_id)
                self.settler.fail_rows(plan, why_ended(error, f"The engine failed on the result of this request: {clause(error)}."))
            if self.scheduler.config.target_step_ms is not None:
                seconds = result.step_seconds or (now - flight.launched if not self.inflight else 0.0)
                self.scheduler.step_time.observe(plan.num_tokens, plan_pairs(plan), seconds)
        self.life.settle(plan.step_id)
        self._last_tokens = plan.num_tokens
        self._last_time = time.monotonic()
        return deltas

    def _watch(self, planned: bool) -> None:
        """Work that can never be scheduled would spin for ever: after a few turns, give up the request at its head."""
        if planned or self._flights or not self.life.num_live or self.life.constraints.num_waiting:
            self._idle_turns = 0
            return
        self._idle_turns += 1
        if self._idle_turns < IDLE_TURNS:
            return
        self._idle_turns = 0
        stuck = self.queue.peek() or next((r for siblings in self.life.live.values() for r in siblings.values()), None)
        if stuck is not None:
            logger.error("Request %s[%d] cannot be scheduled; giving it up (please report this).", stuck.id, stuck.index)
            self.life.fail(stuck, "The engine found no way to schedule this request.")

    # Figures

    def stats(self) -> EngineStats:
        """A snapshot."""
        counters, kv, batch = self.life.counters, self.kv, self.batch
        used = kv.num_used
        running = batch.num_running
        return EngineStats(
            step=self._next_step,
            last_step_time=self._last_time,
            running=running,
            waiting=self.life.num_live - running,
            kv_blocks_total=kv.capacity,
            kv_blocks_used=used,
            kv_blocks_cached=kv.tree.num_evictable,
            kv_tokens_live=max(0, used * kv.block_size - self.wasted_tokens()),
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            preemptions=counters.preemptions,
            recomputed_tokens=counters.recomputed_tokens,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            evictions=kv.tree.evictions,
            cow_copies=kv.copies,
            step_tokens=self._last_tokens,
            rejected=counters.rejected,
        )

    def wasted_tokens(self) -> int:
        """Room in used blocks that holds no token. Only the last block of a sequence has any, and nobody shares that one."""
        kv, batch = self.kv, self.batch
        room = int(kv.lengths.sum()) * kv.block_size - int(batch.scheduled.sum())
        return room + sum(len(r.run.blocks) * kv.block_size - r.run.length for r in self.life.held if r.run is not None)
