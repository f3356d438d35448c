"""Calls behind a marker: Hermes and Qwen, Granite, Mistral, and Llama's python tag; and calls without any.

Behind a marker stands one of: a JSON object a call, a JSON list of them, or a name followed by JSON arguments.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from octavo.frontend.parsing.call_object import CallObject, NotACall
from octavo.frontend.parsing.machine import MAX_NAME, Machine, first_marker, undecided
from octavo.frontend.parsing.schemas import needs_arguments

_FENCE = re.compile(r"```(?:json|JSON)?\s*(?=[{\[])")
_OPEN_FENCE = re.compile(r"`{1,2}|```(?:j|js|jso|json|J|JS|JSO|JSON)?\s*")
"""What may become one."""


class TaggedCalls(Machine):
    """See the module.

    Args:
        opens: markers that a call follows.
        close: marker behind a call (or a list of them); what stands between the call and it is dropped. Empty for none.
        names: the tools of the request; calls of bare JSON must name one of them, since any JSON answer may have a "name".
        bare: the reply may also be calls from its first character on, without a marker.
        named: behind a marker may stand a name, then arguments.
        name_ends: markers that may stand between such a name and its arguments.
        guarded: read what the grammar of strict tools guards, no more.
        schemas: by tool, the schema of its parameters.
    """

    def __init__(
        self,
        opens: Sequence[str],
        close: str,
        names: Container[str],
        *,
        bare: bool = False,
        named: bool = False,
        name_ends: Sequence[str] = (),
        guarded: bool = False,
        schemas: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(self._beginning if bare else self._free_text)
        self._opens = tuple(opens)
        self._close = close
        self._names = names
        self._named = named
        self._name_ends = tuple(name_ends)
        self._guarded = guarded
        self._empty = frozenset(name for name, schema in (schemas or {}).items() if not needs_arguments(schema))
        self._pending_name = ""
        self._bare = False
        self._fenced = False
        """The calls stand in a block of code that has not ended."""
        self._list = False
        self._some_in_list = False
        self._object: CallObject | None = None

    # Text

    def _beginning(self) -> bool:
        """Nothing but blanks so far: a bare call may follow."""
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if self._fenced_call(rest):
            return True
        if not self._final and not self._guarded and _OPEN_FENCE.fullmatch(rest):
            return False
        if rest[0] in "{[" and not any(marker.startswith(rest[:1]) for marker in self._opens):
            self._begin_region()
            self._bare = True
            self._state = self._body
        else:
            self._state = self._free_text
        return True

    def _fenced_call(self, rest: str) -> bool:
        """Whether the reply begins with JSON in a block of code, as some models write all of theirs: it may be a call. (What strict tools guard
        has no blocks.)"""
        found = None if self._guarded else _FENCE.match(rest)
        if found is None:
            return False
        self._begin_region()
        self._take(len(self._buffer) - len(rest) + found.end())
        self._bare = self._fenced = True
        self._state = self._body
        return True

    def _free_text(self) -> bool:
        marker, moved = self._up_to_marker(self._opens)
        if marker is None:
            return moved
        self._begin_region()
        self._take(len(marker))
        self._bare = False
        self._state = self._body
        return True

    # Calls

    def _body(self) -> bool:
        """Behind a marker, or where a bare call begins."""
        char = self._buffer[0]
        if char.isspace():
            self._take(1)
        elif char == "{":
            self._new_object()
        elif char == "[":
            self._take(1)
            self._list, self._some_in_list = True, False
            self._state = self._next_in_list
        elif self._named and not self._bare:
            self._state = self._name
        else:
            self._give_up()
        return True

    def _new_object(self) -> None:
        # With a marker, the model means to call, whatever the name; without one, any JSON may look like a call.
        known = self._names if self._bare else None
        self._object = CallObject(known, self._start_call, self._arguments, guarded=self._guarded, empty=self._empty)
        self._state = self._in_object

    def _in_object(self) -> bool:
        call = self._object
        assert call is not None
        for count, char in enumerate(self._buffer, start=1):
            try:
                call.feed(char)
            except NotACall:
                if call.started:
                    self._take(count - 1)
                    self._end_call()
                    self._state = self._behind
                else:
                    self._take(count)
                    self._give_up()
                return True
            if call.done:
                self._take(count)
                self._end_call()
                self._state = self._next_in_list if self._list else self._behind
                self._some_in_list = True
                return True
        self._take(len(self._buffer))
        return True

    def _next_in_list(self) -> bool:
        char = self._buffer[0]
        if char == "{":
            if self._raw is None:
                self._begin_region()
            self._new_object()
        elif char == "]":
            self._take(1)
            self._list = False
            if self._raw is not None:  # an empty list
                self._give_up()
            else:
                self._state = self._behind
        elif char.isspace() or (char == "," and self._some_in_list):
            self._take(1)
        elif self._raw is not None:
            self._give_up()
        else:
            self._list = False
            self._state = self._behind
        return True

    def _name(self) -> bool:
        ends = (*self._name_ends, "{")
        found = first_marker(self._buffer, ends)
        # As much of it as will not change, whatever comes next: so that it does not matter how much is there already.
        at = undecided(self._buffer, ends) if found is None else found[0]
        if at > MAX_NAME or "\n" in self._buffer[:at].strip():
            self._give_up()
            return True
        if found is None:
            return False
        name = self._take(at).strip()
        if not name or (self._guarded and name not in self._names):
            self._give_up()
            return True
        self._pending_name = name
        self._state = self._before_arguments
        return True

    def _before_arguments(self) -> bool:
        """Markers and blanks up to the brace: [ARGS], or [CALL_ID] and an id."""
        at = self._buffer.find("{")
        if (at if at >= 0 else len(self._buffer)) > MAX_NAME:
            self._give_up()
            return True
        if at < 0:
            return False
        self._take(at)
        self._begin_json(self._pending_name, self._behind)
        return True

    def _behind(self) -> bool:
        """Behind a call (or a list): up to the closing marker, if there is to be one; then another call may follow without a marker."""
        if self._bare or not self._close:
            return self._behind_open_end()
        if self._buffer.startswith(self._close):
            self._take(len(self._close))
            self._state = self._free_text
        elif self._buffer.startswith(self._opens):
            self._state = self._free_text
        elif not self._final and any(marker.startswith(self._buffer) for marker in (self._close, *self._opens)):
            return False
        elif self._buffer[0] == "{":  # a second call inside one pair of markers
            self._begin_region()
            self._new_object()
        else:
            self._take(1)
        return True

    def _behind_open_end(self) -> bool:
        rest = self._buffer.lstrip(" \t\r\n,;")
        if not rest:
            return False
        gap = self._buffer[: len(self._buffer) - len(rest)]
        if self._fenced and rest.startswith("`"):
            if len(rest) < len("```") and not self._final:
                return False
            self._fenced = False
            self._take(len(gap) + len("```") if rest.startswith("```") else 0)
            return True
        if rest[0] == "{":
            self._take(len(gap))
            self._begin_region()
            self._new_object()
        else:
            if gap.strip():
                self._text(self._take(len(gap)))
            self._state = self._free_text
        return True

    def _cut_name(self) -> str | None:
        if self._state == self._before_arguments:
            return self._pending_name
        found = self._object.cut() if self._state == self._in_object and self._object is not None else None
        return found and found[0]

    def _cut_arguments(self) -> str:
        found = self._object.cut() if self._state == self._in_object and self._object is not None else None
        return found[1] if found else ""

    def _give_up(self) -> None:
        self._list = False
        super()._give_up()


def hermes(names: Container[str], **how: Any) -> Machine:
    return TaggedCalls(["<tool_call>"], "</tool_call>", names, **how)


def granite(names: Container[str], **how: Any) -> Machine:
    return TaggedCalls(["<|tool_call|>", "<tool_call>"], "</tool_call>", names, **how)


def mistral(names: Container[str], **how: Any) -> Machine:
    return TaggedCalls(["[TOOL_CALLS]"], "", names, named=True, name_ends=("[ARGS]", "[CALL_ID]"), **how)


def llama_json(names: Container[str], **how: Any) -> Machine:
    return TaggedCalls(["<|python_tag|>"], "", names, bare=True, **how)


def any_json(names: Container[str], **how: Any) -> Machine:
    """For models of unknown habits: <tool_call> tags, or JSON from the first character on."""
    return TaggedCalls(["<tool_call>"], "</tool_call>", names, bare=True, **how)
