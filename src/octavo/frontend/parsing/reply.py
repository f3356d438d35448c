"""One choice of a reply: reasoning, then text and calls. What every endpoint reads replies with, streamed or whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.frontend.parsing.events import CallEnd, CallStart, Event, Reasoning, Reply, Text, encodable, merged
from octavo.frontend.parsing.formats import Parser, ReasoningFormat, ToolFormat
from octavo.frontend.parsing.harmony import HarmonyParser
from octavo.frontend.parsing.reasoning import ThinkingSplitter


@dataclass(frozen=True)
class ReplyFormat:
    """How the replies to one request are to be read."""

    tools: ToolFormat | None = None
    """None: calls are not looked for."""
    schemas: Mapping[str, Any] = field(default_factory=dict)
    """The tools of the request: name -> schema of its parameters."""
    reasoning: ReasoningFormat | None = None
    opened: bool = False
    """The reply begins inside the reasoning."""
    closed: bool = False
    """The prompt has ended the reasoning: there is none in the reply."""
    max_calls: int | None = None
    whole_calls: bool = False
    """Give out a call only when it is complete, and the text of one that a stop string cut as text. For requests with stop strings, which
    may cut a call anywhere."""
    must_call: bool = False
    """The reply is held to calls: what ends before it is one is no answer either."""

    guarded: bool = False
    """The reply is held to the grammar of strict tools that may be called: read as calls what that guards, no more."""

    @property
    def plain(self) -> bool:
        """Replies are text and nothing else."""
        return self.tools is None and self.reasoning is None


class ReplyParser:
    """`push` the pieces of one reply, then `finish`, once. Joined events do not depend on the pieces."""

    def __init__(self, form: ReplyFormat) -> None:
        self._form = form
        self._splitter: ThinkingSplitter | None = None
        self._calls: Parser | None = None
        harmony = (form.tools is not None and form.tools.name == "openai") or (form.reasoning is not None and form.reasoning.harmony)
        if harmony:
            self._calls = HarmonyParser()
        else:
            if form.reasoning is not None and not form.closed:
                self._splitter = ThinkingSplitter(form.reasoning.start, form.reasoning.end, opened=form.opened)
            if form.tools is not None:
                self._calls = form.tools.make(frozenset(form.schemas), schemas=form.schemas, guarded=form.guarded)
        self._held: list[Event] | None = None
        self._num_calls = 0
        self._dropping = False

    def push(self, text: str) -> list[Event]:
        return self._after(self._read(text))

    def finish(self, *, cut_short: bool = False) -> list[Event]:
        """No more text will come.

        Args:
            cut_short: by a limit (max_tokens, an abort), so that the model would have gone on. A call whose name is known is then handed
                out with the arguments so far.
        """
        events = self._through_calls(self._splitter.finish(cut_short=cut_short)) if self._splitter is not None else []
        cut = self._calls.cut_source if self._calls is not None else ""
        if self._calls is not None:
            events += self._calls.finish(cut_short=cut_short)
        if cut_short and self._form.must_call:
            events = self._without_beginnings(events)
        return self._after(events, None if cut_short else cut)

    def _without_beginnings(self, events: list[Event]) -> list[Event]:
        """Text that only the end of the reply made text is the beginning of a call: of which one, is known if there is but one tool."""
        kept: list[Event] = [event for event in events if not isinstance(event, Text)]
        if kept == events or self._num_calls or any(isinstance(e, CallStart) for e in kept) or len(self._form.schemas) != 1:
            return kept
        return [*kept, CallStart(*self._form.schemas), CallEnd(complete=False)]

    def _read(self, text: str) -> list[Event]:
        if self._splitter is not None:
            return self._through_calls(self._splitter.push(text))
        return self._calls.push(text) if self._calls is not None else [Text(text)]

    def _through_calls(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        result: list[Event] = []
        for event in events:
            result += self._calls.push(event.text) if isinstance(event, Text) else [event]
        return result

    def _after(self, events: list[Event], cut: str | None = "") -> list[Event]:
        """The request's own rules: how many calls, and whether they are given out in parts.

        Args:
            cut: what a call that does not end is given out as; None for a call.
        """
        result: list[Event] = []
        for event in map(encodable, events):
            if isinstance(event, CallStart):
                self._num_calls += 1
                self._dropping = self._form.max_calls is not None and self._num_calls > self._form.max_calls
                if self._form.whole_calls:
                    self._held = []
            if self._dropping and not isinstance(event, Text | Reasoning):
                continue
            if self._held is None:
                result.append(event)
                continue
            self._held.append(event)
            if isinstance(event, CallEnd):
                result += self._held if event.complete or cut is None else [Text(cut)]
                self._held = None
        return merged(result)


def read_whole(form: ReplyFormat, text: str, *, cut_short: bool = False) -> Reply:
    """A whole reply at once."""
    parser, reply = ReplyParser(form), Reply()
    reply.add(parser.push(text))
    reply.add(parser.finish(cut_short=cut_short))
    return reply
