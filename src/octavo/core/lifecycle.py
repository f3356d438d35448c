"""From arrival to the last freed block: every change of a request's state, in one place.

Owns the table of live requests, families of siblings, held requests, and what waits for a step to settle. The scheduler and the
settler call in here; nobody else changes a request's state, frees a slot or lets go of blocks.

Fences: a request that leaves its slot while steps with it are in flight keeps slot and blocks until the last of them has settled.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from octavo.config.address_space import why_ended
from octavo.core.batch import Batch
from octavo.core.constraint import Constraints, blamed
from octavo.core.kv.manager import KVManager
from octavo.core.kv.tables import BlockRun
from octavo.core.policy import Policy, WaitingQueue
from octavo.core.request import Family, Request, RequestState, expand
from octavo.errors import NO_MEMORY, clause
from octavo.protocol.engine import FinishReason, NewRequest, TokenDelta

logger = logging.getLogger(__name__)

MOST_SIBLINGS = 16384
"""Most continuations of one prompt: a sanity bound, the frontend has its own."""


@dataclass
class Counters:
    """Totals since the engine started."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    rejected: int = 0


@dataclass
class OutputLength:
    """How long outputs turn out to be: an exponential mean of those that ended."""

    mean: float = 256.0
    weight: float = 0.05

    def observe(self, tokens: int) -> None:
        self.mean += self.weight * (tokens - self.mean)


@dataclass
class Lifecycle:
    """The requests of one engine core."""

    batch: Batch
    kv: KVManager
    queue: WaitingQueue
    policy: Policy
    max_model_len: int
    constraints: Constraints = field(default_factory=Constraints)
    counters: Counters = field(default_factory=Counters)
    output_length: OutputLength = field(default_factory=OutputLength)
    outbox: list[TokenDelta] = field(default_factory=list)
    """Deltas that did not come out of a step: errors, aborts, requests that ended on arrival."""
    live: dict[str, dict[int, Request]] = field(default_factory=dict)
    """Requests that have not ended, by id and sibling index."""
    held: dict[Request, None] = field(default_factory=dict)
    """Requests whose blocks are kept after their end, longest unused first."""
    num_live: int = 0
    settled_step: int = -1
    _by_held_id: dict[str, list[Request]] = field(default_factory=dict)
    _leaving: list[Request] = field(default_factory=list)
    _arrivals: int = 0

    # Figures

    @property
    def num_waiting(self) -> int:
        """Requests without a slot that will want one."""
        return self.num_live - self.batch.num_running

    @property
    def leaving_blocks(self) -> int:
        """Blocks in tables that will be let go of when the steps in flight have settled."""
        return sum(self.kv.live_blocks(request.slot) for request in self._leaving)

    @property
    def max_total(self) -> int:
        """Most tokens of one sequence: the context length, or what the whole cache holds (the last token needs no KV)."""
        longest = self.kv.longest
        return self.max_model_len if longest is None else min(self.max_model_len, longest + 1)

    # Arrival

    def add(self, new: NewRequest) -> None:
        """Queue a request; one that cannot be served ends with an error delta."""
        try:
            refusal = self._refusal(new)
            if refusal is None:
                siblings = expand(new, self.max_total, self._arrivals)
        except Exception as error:
            refusal = why_ended(error, f"The request could not be read: {clause(error)}.")
        if refusal is not None:
            self.refuse(new, refusal)
            return
        self._arrivals += len(siblings)
        table = self.live.setdefault(new.request_id, {})
        family = Family(siblings[0], siblings[1:]) if len(siblings) > 1 else None
        for request in siblings:
            table[request.index] = request
            self.num_live += 1
            request.family = family
            self.policy.enter(request)
        if family is not None:
            family.unforked = len(family.followers)
            for follower in family.followers:
                follower.forks = True
        if new.output_token_ids and self._ended_already(siblings[0]):
            return
        if siblings[0].synchronous:
            self._park(siblings)
        else:
            self.queue.push(siblings[0])

    def refuse(self, new: NewRequest, problem: str) -> None:
        """End a request that was never queued with an error for the user."""
        self.counters.rejected += 1
        for i in range(min(new.sampling.n, MOST_SIBLINGS)):
            self.outbox.append(TokenDelta(new.request_id, new.index + i, [], FinishReason.ERROR, error=problem))

    def _park(self, siblings: list[Request]) -> None:
        """Requests that wait for their grammar; `unpark` queues them."""
        try:
            self.constraints.park(siblings)
        except Exception as error:
            self._refuse_all(siblings, why_ended(error, str(error)))

    def unpark(self, *, wait: bool) -> None:
        """Queue requests whose grammar is ready by now.

        Args:
            wait: for a moment, if none is.
        """
        if not self.constraints.num_parked:
            return
        for siblings, problem in self.constraints.ready(wait=wait):
            if problem:
                self._refuse_all(siblings, problem)
                continue
            first = siblings[0].family.leader if siblings[0].family is not None else siblings[0]
            if first is not None and first.state is RequestState.WAITING and not first.queued:
                self.queue.push(first)

    def _refuse_all(self, siblings: list[Request], problem: str) -> None:
        for request in reversed(siblings):  # the leader last: nobody takes over from it then
            self.fail(request, problem, param=blamed(request))

    def _refusal(self, new: NewRequest) -> str | None:
        """Why `new` cannot be served, in one sentence; None when it can."""
        if new.sampling.n > MOST_SIBLINGS:
            return f"n must be at most {MOST_SIBLINGS}, got {new.sampling.n}."
        known = range(new.index, new.index + new.sampling.n)
        siblings = self.live.get(new.request_id, {})
        held = [r.index for r in self._by_held_id.get(new.request_id, ())]
        if any(i in siblings or i in held for i in known):
            return f"Request id {new.request_id!r} is in use by a request that has not ended; use another id."
        if not new.prompt_token_ids:
            return "The prompt is empty; at least one token is needed."
        if new.output_token_ids and new.sampling.n != 1:
            return f"A resumed request continues one sequence, got n={new.sampling.n}."
        prompt = len(new.prompt_token_ids)
        if prompt >= self.max_model_len:
            return f"The prompt has {prompt} tokens; the context length is {self.max_model_len}, prompt and output together."
        room = self.kv.longest
        if room is not None and prompt > room:
            return f"The prompt has {prompt} tokens; the KV cache holds {room} in all. Shorten the prompt or give the cache more memory."
        if any(ids and min(ids) < 0 for ids in (new.prompt_token_ids, new.output_token_ids)):
            return "Token ids must not be negative."
        return None

    def _ended_already(self, request: Request) -> bool:
        """End a resumed request that had nothing left to generate."""
        last = request.tokens[-1]
        if request.stopped_by(last, request.num_outputs - 1):
            reason, stop_reason = FinishReason.STOP, request.stop_reason(last)
        elif len(request.tokens) >= request.limit:
            reason, stop_reason = FinishReason.LENGTH, None
        else:
            return False
        self._forget(request)
        request.state = RequestState.FINISHED
        self.outbox.append(TokenDelta(request.id, request.index, [], reason, stop_reason, times=request.times()))
        return True

    # Families, parents

    def prompt_computed(self, request: Request) -> None:
        """The whole prompt of `request` has KV: its followers can fork."""
        family = request.family
        if family is not None and family.leader is request:
            followers, family.followers = family.followers, []
            for follower in followers:
                self.queue.push(follower)

    def fork_source(self, request: Request) -> BlockRun | None:
        """Blocks that `request` may fork from: its family's leader, or the parent it names."""
        if request.forks and request.family is not None and request.family.leader is not None:
            return self._blocks_of(request.family.leader)
        if not request.parent_id:
            return None
        best: tuple[int, BlockRun] | None = None
        for parent in (*self._by_held_id.get(request.parent_id, ()), *self.live.get(request.parent_id, {}).values()):
            run = self._blocks_of(parent) if parent is not request else None
            if run is not None:
                agreed = self.kv.match_run(run, request.tokens, len(request.tokens)).num_tokens
                if best is None or agreed > best[0]:
                    best = agreed, run
        return best[1] if best else None

    def _blocks_of(self, request: Request) -> BlockRun | None:
        if request.run is not None:
            if request in self.held:
                self.held[request] = self.held.pop(request)
            return request.run
        if request.slot >= 0:
            return self.kv.view(request.slot, request.tokens, int(self.batch.settled[request.slot]))
        return None

    def admitted(self, request: Request, now: float, cached: int) -> None:
        """`request` has a slot and `cached` tokens of KV."""
        self.queue.remove(request)
        if request.state is RequestState.PREEMPTED:
            self.counters.recomputed_tokens += max(0, request.computed - cached)
        request.state = RequestState.RUNNING
        request.prompt_rows = []
        if not request.scheduled_time:
            request.scheduled_time = now
            if not request.forks and not request.parent_id:
                self.counters.prefix_queries += request.num_prompt
                self.counters.prefix_hits += min(cached, request.num_prompt)
            request.cached = min(cached, request.num_prompt)
        family = request.family
        if family is None:
            return
        if family.leader is request:
            if family.cached < 0:
                family.cached = request.cached
        elif request.forks:
            request.cached = max(0, family.cached)
            self._forked(request, family)

    def _forked(self, request: Request, family: Family) -> None:
        """`request` does not need its leader's blocks (any more)."""
        request.forks = False
        family.unforked -= 1
        leader = family.leader
        if family.unforked <= 0 and leader is not None and leader.state is RequestState.HELD and not leader.hold:
            self._let_go(leader)

    def _lost_leader(self, request: Request) -> None:
        """The leader is gone without a prompt computed: the next sibling takes over."""
        family = request.family
        if family is None or family.leader is not request:
            return
        family.leader = None
        if family.followers:
            family.leader = family.followers.pop(0)
            family.leader.forks = False
            family.unforked -= 1
            if family.leader.constraint is not None or not family.leader.synchronous:
                self.queue.push(family.leader)

    # Ends

    def finish(self, request: Request, now: float) -> None:
        """`request` has produced its last token; the caller delivers the final delta."""
        request.last_token_time = now
        self.output_length.observe(request.num_outputs)
        self._end(request)

    def fail(self, request: Request, message: str, *, param: str | None = None) -> None:
        """End `request` with an error for the user.

        Args:
            param: the field of the request that is to blame.
        """
        if request.state in (RequestState.FINISHED, RequestState.HELD):
            return
        if request.slot >= 0:
            self.kv.close(request.slot)
        blame = None if message == NO_MEMORY else param
        self.outbox.append(
            TokenDelta(request.id, request.index, [], FinishReason.ERROR, error=message, error_param=blame, times=request.times())
        )
        request.hold = False
        self._end(request, failed=True)

    def abort(self, request_id: str, index: int | None) -> None:
        """End the siblings of `request_id` (or the one with `index`); also let go of them when held."""
        for request in list(self.live.get(request_id, {}).values()):
            if index is None or request.index == index:
                request.hold = False
                if request.num_outputs:
                    # Stop strings are found by the frontend, so an abort is a common way to end well.
                    self.output_length.observe(request.num_outputs)
                self.outbox.append(TokenDelta(request.id, request.index, [], FinishReason.ABORT, times=request.times()))
                self._end(request)
        for request in list(self._by_held_id.get(request_id, ())):
            if index is None or request.index == index:
                self._let_go(request)

    def _end(self, request: Request, *, failed: bool = False) -> None:
        seated = request.slot >= 0
        preempted = request.state is RequestState.PREEMPTED
        self._forget(request)
        request.state = RequestState.FINISHED
        self.queue.remove(request)
        family = request.family
        if family is not None:
            if request in family.followers:
                family.followers.remove(request)
            if request.forks:
                self._forked(request, family)
            if failed or not seated or family.followers:
                self._lost_leader(request)
        if not seated:
            return
        self.batch.running[request.slot] = self.batch.live[request.slot] = False
        if not (preempted and request in self._leaving):
            self._leave(request)

    def _forget(self, request: Request) -> None:
        siblings = self.live.get(request.id)
        if siblings is not None and siblings.pop(request.index, None) is not None:
            self.num_live -= 1
            self.policy.leave(request)
            if not siblings:
                del self.live[request.id]

    # Preemption

    def preempt(self, request: Request) -> None:
        """Take the slot and the blocks of a running request; it is queued again once its last step has settled."""
        self.batch.running[request.slot] = False
        request.state = RequestState.PREEMPTED
        request.preemptions += 1
        self.counters.preemptions += 1
        logger.info(
            "Preempted request %s[%d] (%d tokens computed, %d times so far): the KV cache is full.",
            request.id, request.index, int(self.batch.settled[request.slot]), request.preemptions,
        )  # fmt: skip
        self._leave(request)

    def slide(self, request: Request) -> None:
        """Let go of the blocks that the windows of a seated request have left behind."""
        self.kv.slide(request.slot, request.tokens, int(self.batch.settled[request.slot]), request.extra_key)

    # Leaving a slot

    def _leave(self, request: Request) -> None:
        if self.batch.last_step[request.slot] > self.settled_step:
            self._leaving.append(request)
        else:
            self._vacate(request)

    def settle(self, step: int) -> None:
        """Step `step` and all before it have settled."""
        self.settled_step = max(step, self.settled_step)
        self.kv.settle(self.settled_step)
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            self._leave(request)

    def _vacate(self, request: Request) -> None:
        slot, settled = request.slot, int(self.batch.settled[request.slot])
        if request.state is RequestState.FINISHED and (request.hold or _has_followers(request)):
            request.run = self.kv.detach(slot, request.tokens, settled, request.extra_key)
            request.state = RequestState.HELD
            self.held[request] = None
            self._by_held_id.setdefault(request.id, []).append(request)
        else:
            self.kv.release(slot, request.tokens, settled, request.extra_key)
        self.batch.leave(slot)
        if request.state is RequestState.PREEMPTED:
            request.computed = settled
            self.queue.push(request)

    # Held requests

    def release_held(self, request_id: str) -> None:
        """The children of `request_id` have all arrived: its blocks need not be kept."""
        for request in self.live.get(request_id, {}).values():
            request.hold = False
        for request in self._leaving:
            if request.id == request_id:
                request.hold = False
        for request in list(self._by_held_id.get(request_id, ())):
            request.hold = False
            if not _has_followers(request):
                self._let_go(request)

    def give_up_held(self, sparing: BlockRun | None = None) -> bool:
        """Let go of the held request that was forked from longest ago, other than the owner of `sparing`. False if there is none."""
        for request in self.held:
            if sparing is None or request.run is not sparing:
                self._let_go(request)
                return True
        return False

    def _let_go(self, request: Request) -> None:
        if request.run is None:
            return
        self.kv.drop(request.run)
        request.run = None
        request.state = RequestState.FINISHED
        self.held.pop(request, None)
        same_id = self._by_held_id.get(request.id, [])
        if request in same_id:
            same_id.remove(request)
        if not same_id:
            self._by_held_id.pop(request.id, None)
        if request.family is not None and request.family.leader is request:
            request.family.leader = None


def _has_followers(request: Request) -> bool:
    """Whether siblings are going to fork from `request`."""
    family = request.family
    return family is not None and family.leader is request and family.unforked > 0
