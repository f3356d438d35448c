"""One choice of a reply: reasoning, then text and calls. What every endpoint reads replies with, streamed or whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.frontend.parsing.events import CallEnd, CallStart, Event, Reasoning, Reply, Text, merged
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
    """Give out a call only when it is complete, and the text of one that was cut short as text. For requests with stop strings,
    which may cut a call anywhere."""

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
                self._calls = form.tools.make(frozenset(form.schemas), schemas=form.schemas)
        self._held: list[Event] | None = None
        self._num_calls = 0
        self._dropping = False

    def push(self, text: str) -> list[Event]:
        return self._after(self._read(text))

    def finish(self) -> list[Event]:
        events = self._through_calls(self._splitter.finish()) if self._splitter is not None else []
        cut = self._calls.cut_source if self._calls is not None else ""
        if self._calls is not None:
            events += self._calls.finish()
        return self._after(events, cut)

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

    def _after(self, events: list[Event], cut: str = "") -> list[Event]:
        """The request's own rules: how many calls, and whether they are given out in parts."""
        result: list[Event] = []
        for event in events:
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
                result += self._held if event.complete else [Text(cut)]
                self._held = None
        return merged(result)


def read_whole(form: ReplyFormat, text: str) -> Reply:
    """A whole reply at once."""
    parser, reply = ReplyParser(form), Reply()
    reply.add(parser.push(text))
    reply.add(parser.finish())
    return reply
