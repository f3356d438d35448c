"""What a reply is made of, in the order it is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.frontend.characters import whole_characters


@dataclass(frozen=True, slots=True)
class Text:
    """Part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Part of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Part of the arguments of the last call, JSON text as the model wrote it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The last call ends."""

    complete: bool = True
    """False: the reply ended in the middle of it."""


Event = Text | Reasoning | CallStart | CallArguments | CallEnd


@dataclass
class Call:
    """A tool call as a whole."""

    name: str
    arguments: str = ""
    complete: bool = False


@dataclass
class Reply:
    """Events put together."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Text():
                    self.text += event.text
                case Reasoning():
                    self.reasoning += event.text
                case CallStart():
                    self.calls.append(Call(event.name))
                case CallArguments():
                    self.calls[-1].arguments += event.text
                case CallEnd():
                    self.calls[-1].complete = event.complete


def encodable(event: Event) -> Event:
    """`event` with half surrogate pairs replaced: models write them as escapes in JSON, and no reply can carry what they stand for."""
    match event:
        case CallStart(name=text) | CallArguments(text=text):
            return type(event)(whole_characters(text))
    return event


def merged(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbours of a kind joined, and none empty."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Text | Reasoning | CallArguments):
            if not event.text:
                continue
            if type(last) is type(event):
                result[-1] = type(event)(last.text + event.text)
                continue
        result.append(event)
    return result
