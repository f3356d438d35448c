"""The frame of all parsers: a buffer that is consumed from the front, state by state.

A state looks at the buffer and either consumes something (True) or waits for more (False). It may consume only what it would consume
whatever came next: that is what makes the events independent of how the text was cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from octavo.frontend.parsing.events import CallArguments, CallEnd, CallStart, Event, Text, merged

State = Callable[[], bool]
MAX_NAME = 200
"""Characters of a tool's name; whatever is longer is no call."""


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """(place, marker) of the first marker in `text`; the longest of those at the same place."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker


def undecided(text: str, markers: Sequence[str]) -> int:
    """Where the end of `text` begins that may turn out to be the beginning of a marker; its length if there is none."""
    longest = max((len(marker) for marker in markers), default=1)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at
    return len(text)


class Machine:
    """A parser. `push` the pieces, then `finish`, once.

    Blanks before a call, behind the last one, and before the first text are layout, not answer, and are dropped; all other text is kept.
    """

    def __init__(self, start: State) -> None:
        self._span = JsonSpan()
        self._behind_json = start
        """Where it goes on behind arguments in JSON."""
        self._buffer = ""
        self._events: list[Event] = []
        self._state = start
        self._final = False
        self._blanks = ""
        """Blanks at the end of the text so far: dropped if a call follows."""
        self._blanks_before_call = ""
        self._after_call = False
        self._given = False
        """Some text has been given out."""
        self._raw: str | None = None
        """What was consumed of a call (or of something that looked like one) so far."""
        self._in_call = False

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        return self._run()

    def finish(self, *, cut_short: bool = False) -> list[Event]:
        """No more text will come.

        Args:
            cut_short: the model would have gone on: what has begun like a call is one as soon as its name is known.
        """
        self._final = True
        self._run_into_events()
        if self._raw is not None:
            if cut_short and not self._in_call and (name := self._cut_name()):
                self._start_call(name)
            if self._in_call:
                self._arguments(self._cut_arguments())
                self._events.append(CallEnd(complete=False))
            else:
                self._text(self._raw + self._buffer)
        else:
            self._text(self._buffer)
        self._buffer, self._raw, self._in_call = "", None, False
        if self._blanks and not self._after_call:
            self._events.append(Text(self._blanks))
        return self._flush()

    @property
    def cut_source(self) -> str:
        """Inside a call (or what looks like one): its text so far, for those who would rather show it than a broken call."""
        if self._raw is None:
            return ""
        return (self._blanks_before_call if self._in_call else self._blanks) + self._raw + self._buffer

    def _cut_name(self) -> str | None:
        """The reply ends in what looks like a call and has not been reported: its name, if it is known."""
        return None

    def _cut_arguments(self) -> str:
        """The reply ends in a call: what is known of its arguments and has not been reported."""
        return ""

    def _free_text(self) -> bool:
        """The state of text in which a call may begin."""
        raise NotImplementedError

    def _run(self) -> list[Event]:
        self._run_into_events()
        return self._flush()

    def _run_into_events(self) -> None:
        while self._buffer and self._state():
            pass

    def _flush(self) -> list[Event]:
        events, self._events = merged(self._events), []
        return events

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        if self._raw is not None:
            self._raw += taken
        return taken

    def _text(self, text: str) -> None:
        """Part of the answer."""
        whole = self._blanks + text
        kept = whole.rstrip()
        if kept:
            if self._after_call and not self._given:
                kept = kept.lstrip()  # nothing but calls before it
            self._after_call, self._given = False, True
        self._blanks = whole[len(whole.rstrip()) :]
        if kept:
            self._events.append(Text(kept))

    def _begin_region(self) -> None:
        """From here on consumed text is remembered, until a call has begun and ended."""
        self._raw = ""

    def _start_call(self, name: str) -> None:
        self._blanks_before_call, self._blanks = self._blanks, ""
        self._in_call = True
        self._events.append(CallStart(name))

    def _arguments(self, text: str) -> None:
        self._events.append(CallArguments(text))

    def _end_call(self) -> None:
        self._events.append(CallEnd())
        self._in_call = False
        self._after_call = True
        self._raw = None

    def _up_to_marker(self, markers: Sequence[str]) -> tuple[str | None, bool]:
        """Give out the text before the first of the markers, which is then the beginning of the buffer.

        Returns:
            (the marker, if it is there already; whether anything was consumed or found)
        """
        found = first_marker(self._buffer, markers)
        if found is not None:
            at, marker = found
            self._text(self._take(at))
            return marker, True
        end = len(self._buffer) if self._final else undecided(self._buffer, markers)
        self._text(self._take(end))
        return None, end > 0

    def _begin_json(self, name: str, behind: State) -> None:
        """A call whose arguments, in JSON, the buffer begins with.

        Args:
            behind: the state after them.
        """
        self._start_call(name)
        self._span, self._behind_json = JsonSpan(), behind
        self._state = self._in_json

    def _in_json(self) -> bool:
        for count, char in enumerate(self._buffer, start=1):
            self._span.feed(char)
            if self._span.done:
                self._arguments(self._take(count))
                self._end_call()
                self._state = self._behind_json
                return True
        self._arguments(self._take(len(self._buffer)))
        return True

    def _give_up(self) -> None:
        """What looked like a call is text after all."""
        raw, self._raw = self._raw or "", None
        self._text(raw)
        self._state = self._free_text


class JsonSpan:
    """Follows one JSON value to its end, without building it."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False
        self.begun = False
        self.done = False

    def feed(self, char: str) -> bool:
        """Whether `char` belongs to the value. False: the value ended before it (or `char` is a blank before its beginning)."""
        if self.done:
            return False
        if self._in_string:
            self._string(char)
            return True
        if not self.begun:
            return self._begin(char)
        if self._scalar:
            if char in ",]}:" or char.isspace():
                self.done = True
                return False
            return True
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth == 0
        return True

    def _begin(self, char: str) -> bool:
        if char.isspace():
            return False
        self.begun = True
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth = 1
        else:
            self._scalar = True
        return True

    def _string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            self.done = self._depth == 0


def arguments_text(raw: str) -> str:
    """The arguments of a call from the JSON text of the value that holds them: an object, or an object inside a string."""
    if not raw.startswith('"'):
        return "{}" if raw in ("", "null") else raw
    try:
        inner = json.loads(raw)
    except ValueError:
        return raw
    return inner.strip() or "{}"


def beginning_of_text(raw: str) -> str:
    """What the beginning of a JSON string says, as far as it is whole."""
    for end in range(len(raw), max(0, len(raw) - 12), -1):  # an escape, or a pair of them, may be cut
        try:
            text = str(json.loads(raw[:end] + '"'))
        except ValueError:
            continue
        if not "\ud800" <= text[-1:] <= "\udbff":
            return text
    return ""
