"""One sequence in the core, from arrival to end.

A `NewRequest` for n continuations becomes n `Request`s, one a sibling, tied by a `Family`: the leader computes the prompt, the others
fork from its blocks. Where a running request stands (tokens scheduled, tokens settled, limits) lives in the columns of
`batch.Batch`, by slot; what is here is read once in a while: at admission, when a block fills up, at the end.
"""

from __future__ import annotations

import copy
import enum
from array import array
from dataclasses import dataclass, field

from octavo.core.constraint import Constraint
from octavo.core.kv.tables import BlockRun
from octavo.protocol.engine import LogprobRow, NewRequest, RequestTimes
from octavo.protocol.params import SamplingParams


class RequestState(enum.IntEnum):
    WAITING = 0
    """Not admitted yet."""
    RUNNING = 1
    """In a slot; may be scheduled."""
    PREEMPTED = 2
    """Lost its slot to make room, or will once its last step has settled; waits to be resumed."""
    HELD = 3
    """Ended; its blocks are kept for children and siblings that may fork from it."""
    FINISHED = 4


@dataclass(eq=False, slots=True)
class Family:
    """Siblings of one prompt."""

    leader: Request | None
    """Computes the prompt. The others fork from its blocks as long as it has them."""
    followers: list[Request]
    """Siblings that wait for the leader's prompt; not in the queue yet."""
    unforked: int = 0
    """Siblings (queued or not) that have not been admitted yet: as long as there are any, the leader's blocks are kept."""
    cached: int = -1
    """Prompt tokens the leader found in the prefix cache."""


@dataclass(eq=False, slots=True)
class Request:
    """A sequence. `tokens` are the prompt, then the outputs that have settled."""

    id: str
    index: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    """Everything that ends it, EOS included; empty when nothing does."""
    tokens: array[int]
    num_prompt: int
    limit: int
    """Most tokens, prompt and outputs together."""
    arrival: float
    order: int
    """Breaks ties between equal arrivals."""
    priority: int
    fair_key: str
    extra_key: str
    parent_id: str
    hold: bool
    synchronous: bool
    """The CPU must see a token before the next can be computed: never more than one step in flight."""
    state: RequestState = RequestState.WAITING
    slot: int = -1
    family: Family | None = None
    forks: bool = False
    """A sibling that has yet to fork from its family's leader."""
    run: BlockRun | None = None
    """Its blocks while HELD."""
    share: int = 0
    """Column of the policy's served-tokens table."""
    queued: bool = False
    computed: int = 0
    """Tokens that had KV when it last lost its slot."""
    cached: int = -1
    """Prompt tokens found in the prefix cache at the first admission."""
    constraint: Constraint | None = None
    """What it may say; set, if it wants one, before it is queued."""
    prompt_rows: list[LogprobRow] = field(default_factory=list)
    delivered: bool = False
    """Its first delta has gone out."""
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    preemptions: int = 0
    reports: bool = False
    """Wants to know how far its prompt is."""
    reported: int = 0
    """Prompt tokens that it knows to be computed."""

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling.prompt_logprobs is not None

    def stopped_by(self, token: int, outputs_before: int) -> bool:
        """Whether `token`, sampled after `outputs_before` outputs, ends the sequence."""
        return outputs_before >= self.sampling.min_tokens and token in self.stop_token_ids

    def stop_reason(self, token: int) -> int | None:
        """What to report for a stopping token: its id if it is one of the request's own, None for EOS and for what ends a grammar (which is EOS
        too, though `ignore_eos` may have it mean nothing elsewhere)."""
        return token if token in (self.sampling.stop_token_ids or ()) and token not in self.eos_token_ids else None

    def times(self) -> RequestTimes:
        return RequestTimes(self.arrival, self.scheduled_time, self.first_token_time, self.last_token_time, self.preemptions)


def expand(new: NewRequest, max_total: int, first_order: int) -> list[Request]:
    """The siblings a `NewRequest` asks for, indices `index .. index+n-1`.

    Args:
        max_total: most tokens a sequence can have here (context length, cache size).
        first_order: `order` of the first sibling.

    Raises:
        OverflowError, TypeError: token ids that are not 32-bit integers.
    """
    sampling = new.sampling
    eos = () if sampling.ignore_eos else tuple(new.eos_token_ids)
    num_prompt = len(new.prompt_token_ids)
    limit = max_total if sampling.max_tokens is None else min(max_total, num_prompt + sampling.max_tokens)
    if new.output_token_ids and sampling.prompt_logprobs is not None:
        sampling = without_prompt_logprobs(sampling)
    tokens = array("i", new.prompt_token_ids)
    tokens.extend(new.output_token_ids)
    return [
        Request(
            id=new.request_id,
            index=new.index + i,
            sampling=sampling if i == 0 else without_prompt_logprobs(sampling),
            eos_token_ids=eos,
            stop_token_ids=tuple(dict.fromkeys((*eos, *(sampling.stop_token_ids or ())))),
            tokens=tokens[:],
            num_prompt=num_prompt,
            limit=limit,
            arrival=new.arrival_time,
            order=first_order + i,
            priority=new.priority,
            fair_key=new.fair_key,
            extra_key=new.extra_key,
            parent_id=new.parent_id,
            hold=new.hold,
            synchronous=sampling.constraint is not None,
            reports=new.report_progress and i == 0 and not new.output_token_ids,
        )
        for i in range(sampling.n)
    ]


def without_prompt_logprobs(sampling: SamplingParams) -> SamplingParams:
    """`sampling` for a sequence whose prompt logprobs somebody else delivers, or that have been delivered already."""
    if sampling.prompt_logprobs is None:
        return sampling
    sampling = copy.copy(sampling)
    sampling.prompt_logprobs = None
    return sampling
