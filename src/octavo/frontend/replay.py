"""What a frontend must remember of a live request to continue it on another engine, and whom to suspect when engines die.

Sampling is a pure function of (seed, sibling index, position), so a request sent again with the tokens already delivered goes
on with the tokens it would have had. Pure data and decisions: no I/O here (process_client.py acts on them).

A request that takes the engine process down would do so again after every restart. Who it is shows by elimination: whoever was
in flight at `suspect_after` crashes in a row without getting anywhere in between is a suspect. A single suspect is guilty. Several
go on probation: each in turn is the only newcomer in the engine, until it either gets on (cleared) or the engine dies (guilty).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from octavo.frontend.client import Sink
from octavo.protocol.engine import NewRequest, TokenDelta

CLEARED_TOKENS = 4
"""New tokens after which a request did not cause the last crash. More than one: the last deltas before a crash may be lost."""


@dataclass
class LiveRequest:
    """One request, from `add` to the end of its last sibling."""

    request: NewRequest
    sink: Sink
    outputs: dict[int, list[int]] = field(default_factory=dict)
    """Tokens delivered, by sibling still running."""
    in_flight: bool = False
    """The current engine process has it."""
    progress: int = 0
    """Tokens delivered since it was last sent."""
    crashes: int = 0
    """Crashes in a row that found it in flight, without progress in between."""
    first_index_scored: bool = False
    """Sibling 0's first delta, with the prompt logprobs, has been delivered."""

    def __post_init__(self) -> None:
        first = self.request.index
        self.outputs = {i: list(self.request.output_token_ids) for i in range(first, first + self.request.sampling.n)}

    def take(self, delta: TokenDelta) -> bool:
        """Record a delta. False: not ours any more (that sibling has ended)."""
        output = self.outputs.get(delta.index)
        if output is None:
            return False
        output += delta.token_ids
        self.progress += len(delta.token_ids)
        if delta.index == 0 and delta.prompt_progress is None:
            self.first_index_scored = True
        if delta.finish_reason is not None:
            del self.outputs[delta.index]
        return True

    @property
    def ended(self) -> bool:
        return not self.outputs

    @property
    def cleared(self) -> bool:
        return self.ended or self.progress >= CLEARED_TOKENS

    def messages(self) -> Iterator[NewRequest]:
        """What to send a fresh engine so that every living sibling goes on from where it is."""
        sampling = self.request.sampling
        untouched = len(self.outputs) == sampling.n and not any(
            len(tokens) > len(self.request.output_token_ids) for tokens in self.outputs.values()
        )
        if untouched:
            yield self.request
            return
        for index, tokens in self.outputs.items():
            scored = index != 0 or self.first_index_scored
            alone = msgspec.structs.replace(sampling, n=1, prompt_logprobs=None if scored else sampling.prompt_logprobs)
            # A held parent died with its engine: the child's tokens are all in its prompt.
            yield msgspec.structs.replace(self.request, sampling=alone, index=index, output_token_ids=list(tokens), parent_id="")


@dataclass
class Verdict:
    """What to do with the live requests after a crash."""

    guilty: LiveRequest | None
    """Fail this one; never send it again."""
    suspects: list[LiveRequest]
    """Send these one at a time, before all others."""


def judge(live: list[LiveRequest], on_probation: LiveRequest | None, named: str, suspect_after: int) -> Verdict:
    """Who ended the engine process?

    Args:
        live: every live request, in order of arrival; those in flight get their crash counted.
        on_probation: the suspect that was being tried.
        named: engine id of the request that the engine itself blamed, or "".
    """
    for one in live:
        if one.in_flight:
            one.crashes = 1 if one.cleared else one.crashes + 1
    guilty = next((one for one in live if named and one.request.request_id == named), None)
    if guilty is None and on_probation is not None and not on_probation.cleared:
        guilty = on_probation
    suspects = [one for one in live if one.in_flight and one.crashes >= suspect_after]
    if guilty is None and len(suspects) == 1:
        guilty = suspects[0]
    if guilty is not None:
        for one in live:
            one.crashes = 0
        return Verdict(guilty, [])
    return Verdict(None, suspects)
