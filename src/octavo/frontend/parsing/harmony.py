"""The channels of gpt-oss ("harmony"): reasoning, calls and answer are messages of their own, each with a header.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
<|start|>assistant<|channel|>final<|message|>...<|return|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from octavo.frontend.parsing.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text, merged
from octavo.frontend.parsing.machine import first_marker, undecided

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")
_CALLED = re.compile(_RECIPIENT.pattern + r"(?=[\s<])")
"""A recipient of whose name nothing can be missing."""
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser:
    """See the module. Both a reasoning parser and a parser of calls."""

    def __init__(self) -> None:
        self._buffer = ""
        self._final = False
        self._out: list[Event] = []
        self._state: Callable[[], bool] = self._between
        self._body: type[Text] | type[Reasoning] | type[CallArguments] = Text
        self._source = ""
        self._arguments = ""

    @property
    def cut_source(self) -> str:
        if self._state == self._header:
            return self._buffer
        return self._source + self._buffer if self._in_call else ""

    @property
    def _in_call(self) -> bool:
        return self._state == self._inside and self._body is CallArguments

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        while self._buffer and self._state():
            pass
        out, self._out = merged(self._out), []
        return out

    def finish(self, *, cut_short: bool = False) -> list[Event]:
        """No more text will come.

        Args:
            cut_short: the model would have gone on.
        """
        self._final = not (cut_short and self._in_call)  # half a marker at the end of arguments is none of them
        events = self.push("")
        if self._in_call and cut_short:
            events.append(CallEnd(_whole(self._arguments)))
        elif self._in_call:
            # <|call|> is a stop token, and so not part of the text: a call usually ends with the reply.
            events += self._close_call()
        elif self._state == self._header and cut_short and (name := _CALLED.search(self._buffer)):
            events += [CallStart(name.group(1)), CallEnd(complete=False)]
        elif self._state == self._between and self._buffer:
            events.append(Text(self._buffer))
        self._buffer = ""
        return merged(events)

    def _between(self) -> bool:
        """Before a header; plain text here is answer."""
        for marker in (CHANNEL, START):
            if self._buffer.startswith(marker):
                self._state = self._header
                return True
        if self._buffer.startswith(ENDS):
            self._take(len(next(end for end in ENDS if self._buffer.startswith(end))))
            return True
        if any(marker.startswith(self._buffer) for marker in (CHANNEL, START, *ENDS)) and not self._final:
            return False
        self._body = Text
        self._state = self._inside
        return True

    def _header(self) -> bool:
        at = self._buffer.find(MESSAGE)
        if at < 0:
            return False
        header = self._take(at + len(MESSAGE))
        self._source = header
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        name = channel.group(1) if channel else "final"
        self._body = Text
        if recipient is not None and name != "final":
            self._body = CallArguments
            self._arguments = ""
            self._out.append(CallStart(recipient.group(1)))
        elif name == "analysis":
            self._body = Reasoning
        self._state = self._inside
        return True

    def _inside(self) -> bool:
        markers = (*ENDS, START, CHANNEL)
        found = first_marker(self._buffer, markers)
        if found is not None:
            at, marker = found
            self._give(self._take(at))
            if self._body is CallArguments:
                self._out += self._close_call()
            if marker in ENDS:
                self._take(len(marker))
            self._state = self._between
            return True
        end = len(self._buffer) if self._final else undecided(self._buffer, markers)
        self._give(self._take(end))
        return end > 0

    def _give(self, text: str) -> None:
        if self._body is CallArguments:
            self._arguments += text
        if text:
            self._out.append(self._body(text))

    def _close_call(self) -> list[Event]:
        done: list[Event] = [] if self._arguments.strip() else [CallArguments("{}")]
        return [*done, CallEnd(_balanced(self._arguments))]

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        self._source += taken
        return taken


def _balanced(text: str) -> bool:
    """Whether arguments look whole."""
    return not text.strip() or text.rstrip().endswith("}")


def _whole(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
