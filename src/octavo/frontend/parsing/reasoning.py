"""Reasoning that stands between two markers before the answer: <think> ... </think>, [THINK] ... [/THINK] and the like."""

from __future__ import annotations

from octavo.frontend.parsing.events import Event, Reasoning, Text, merged
from octavo.frontend.parsing.machine import undecided


class ThinkingSplitter:
    """Splits a reply into reasoning and the rest (`Text`, which the parser of tool calls reads on).

    Blanks at the ends of the reasoning, and before the answer behind it, are layout and are dropped.

    Args:
        opened: the prompt has opened the reasoning already, or the model always begins with it. Otherwise the reply must begin with
            `start` to have any.
    """

    def __init__(self, start: str, end: str, *, opened: bool) -> None:
        self._start = start
        self._end = end
        self._state = self._inside if opened else self._undecided
        self._buffer = ""
        self._blanks = ""
        self._final = False
        self._fresh = True
        """No reasoning has been given out yet."""
        self._out: list[Event] = []

    @property
    def answers(self) -> bool:
        """The reasoning, if there is any, has ended."""
        return self._state in (self._before_answer, self._answer)

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        while self._buffer and self._state():
            pass
        out, self._out = merged(self._out), []
        return out

    def finish(self, *, cut_short: bool = False) -> list[Event]:
        """No more text will come.

        Args:
            cut_short: the model would have gone on: what has begun like a marker (by more than its first character) is one, and no text
                for a client. Markers that are words may be words.
        """
        if cut_short and self._state in (self._undecided, self._inside):
            begun = self._buffer.strip()
            self._buffer = "" if len(begun) > 1 and not begun[0].isalnum() else self._buffer
        self._final = True
        events = self.push("")
        if self._buffer:
            events.append(Reasoning(self._buffer) if self._state == self._inside else Text(self._buffer))
            self._buffer = ""
        return merged(events)

    def _undecided(self) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith(self._start):
            self._buffer = rest[len(self._start) :]
            self._state = self._inside
        elif (not rest or self._start.startswith(rest)) and not self._final:
            return False
        else:
            self._state = self._answer
        return True

    def _inside(self) -> bool:
        if self._fresh:
            # A model whose reasoning is taken for open may write the marker all the same.
            self._buffer = self._buffer.lstrip()
            if self._start.startswith(self._buffer) and not self._final:
                return False
            self._buffer = self._buffer.removeprefix(self._start)
            self._fresh = False
            self._after_start = True
            return True
        at = self._buffer.find(self._end)
        if at >= 0:
            self._reason(self._buffer[:at])
            self._blanks = ""
            self._buffer = self._buffer[at + len(self._end) :]
            self._state = self._before_answer
            return True
        end = len(self._buffer) if self._final else undecided(self._buffer, (self._end,))
        self._reason(self._buffer[:end])
        self._buffer = self._buffer[end:]
        return end > 0

    _after_start = False

    def _reason(self, text: str) -> None:
        whole = self._blanks + text
        if self._after_start:
            whole = whole.lstrip()
            self._after_start = not whole
        kept = whole.rstrip()
        self._blanks = whole[len(kept) :]
        if kept:
            self._out.append(Reasoning(kept))

    def _before_answer(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._state = self._answer
        return True

    def _answer(self) -> bool:
        self._out.append(Text(self._buffer))
        self._buffer = ""
        return True
