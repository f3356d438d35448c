"""One reply as a stream of events: what the endpoints that are not chat completions build their own shapes from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from octavo.frontend.http.generation import Generation, UsageCounter
from octavo.frontend.outputs import CompletionOutput, PositionLogprobs
from octavo.frontend.parsing.events import Event
from octavo.frontend.parsing.reply import ReplyFormat, ReplyParser


@dataclass(frozen=True)
class Piece:
    """What one output of the engine added."""

    events: list[Event]
    output: CompletionOutput

    @property
    def token_ids(self) -> list[int]:
        return list(self.output.token_ids)

    @property
    def logprobs(self) -> list[PositionLogprobs]:
        return self.output.logprobs or []


async def reply_pieces(generation: Generation, form: ReplyFormat, usage: UsageCounter) -> AsyncIterator[Piece]:
    """The pieces of the one reply of a generation (n=1), whole or streamed. `usage` is kept up to date on the way."""
    parser = ReplyParser(form)
    async for number, result in generation.results():
        usage.add(number, result)
        for output in result.outputs:
            events = parser.push(output.text)
            if output.finish_reason is not None:
                events += parser.finish()
            yield Piece(events, output)
