"""Reads one call written as a JSON object: {"name": ..., "arguments": {...}}, while it is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from typing import Any

from octavo.frontend.parsing.machine import JsonSpan, arguments_text, beginning_of_text

NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args")
_NAMES = (*NAME_KEYS, "function")
"""Keys of a guarded call that a name may stand at."""
_OTHER_KEYS = {"type", "id", "function"}
"""Keys that a call may have besides."""


class NotACall(Exception):
    """What is being read cannot become a call."""


class CallObject:
    """Feed it characters from the opening brace on.

    The start is reported once the name is known and it is clear that this is a call: at the arguments, or at the end of an object that
    has none.

    Args:
        known: names that calls may have; None for any.
        start: called with the name.
        arguments: called with pieces of the arguments.
        guarded: read only what the grammar of strict tools guards, and that a regular expression can tell from other JSON: before the
            arguments (or, behind a marker, the name) nothing is nested, and names and keys are written without escapes.
        empty: guarded, and any JSON may stand here: names of tools that a call without arguments is right for.
    """

    def __init__(
        self,
        known: Container[str] | None,
        start: Callable[[str], None],
        arguments: Callable[[str], None],
        *,
        guarded: bool = False,
        empty: Container[str] = (),
    ) -> None:
        self._known = known
        self._guarded, self._empty = guarded, empty
        self._inner: CallObject | None = None
        """Guarded: the object of "function", which holds name and arguments."""
        self._start = start
        self._arguments = arguments
        self._name: str | None = None
        self._key = ""
        self._value = ""
        self._held = ""
        """Arguments that came before the name."""
        self._others: dict[str, str] = {}
        self._has_arguments = False
        self._streams = False
        self._span = JsonSpan()
        self._state: Callable[[str], None] = self._open
        self.started = False
        self.done = False

    def feed(self, char: str) -> None:
        """Raises NotACall."""
        self._state(char)

    def cut(self) -> tuple[str, str] | None:
        """The object ends here, too early: its name, and what is known of its arguments beyond those given out. None if the name is not
        known, or if this is no call as far as it goes."""
        if self._known is not None and self._others.keys() - _OTHER_KEYS:
            return None
        inside = self._value if self._state == self._in_value else ""
        if self._name is None:
            return self._cut_nested(inside if inside and self._key == "function" else self._others.get("function", ""))
        held = self._held
        if inside and self._key in ARGUMENT_KEYS and not self._has_arguments and not self._streams:
            held += beginning_of_text(inside) if inside.startswith('"') else ""
        return self._name, held

    def _cut_nested(self, value: str) -> tuple[str, str] | None:
        if not value.startswith("{"):
            return None
        pieces: list[str] = []
        inner = CallObject(self._known, lambda _: None, pieces.append)
        try:
            for char in value:
                inner.feed(char)
        except NotACall:
            return None
        found = inner.cut()
        return found and (found[0], "".join(pieces) + found[1])

    def _open(self, char: str) -> None:
        if char == "{":
            self._state = self._before_key
        elif not char.isspace():
            raise NotACall

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._key = char
            self._span = JsonSpan()
            self._span.feed(char)
            self._state = self._in_key
        elif char == "}":
            self._close()
        elif char != "," and not char.isspace():
            raise NotACall

    def _in_key(self, char: str) -> None:
        self._span.feed(char)
        self._key += char
        if self._span.done:
            try:
                self._key = self._key[1:-1] if self._guarded else str(json.loads(self._key))
            except ValueError:
                raise NotACall from None
            self._state = self._before_value

    def _before_value(self, char: str) -> None:
        if char == ":":
            self._span = JsonSpan()
            self._value = ""
            self._state = self._in_value
        elif not char.isspace():
            raise NotACall

    def _in_value(self, char: str) -> None:
        begun = self._span.begun
        belongs = self._span.feed(char)
        if belongs:
            if not begun:
                self._begin_value(char)
            self._value += char
            if self._inner is not None:
                self._inner.feed(char)
            elif self._streams:
                self._give(char)
        if self._span.done:
            self._end_value()
            self._state = self._after_value
            if not belongs:
                self._after_value(char)

    def _begin_value(self, char: str) -> None:
        if self._guarded and not self._has_arguments:
            self._check_plain(char)
        # Only an object can be passed on as it comes; anything else must be seen whole.
        self._streams = self._key in ARGUMENT_KEYS and char == "{" and not self._has_arguments
        if self._key in ARGUMENT_KEYS:
            self._check_started()

    def _check_plain(self, char: str) -> None:
        """Raises NotACall for values that a guarded call cannot begin with."""
        if self._key in ARGUMENT_KEYS:
            if self._known is not None and self._name is None:
                raise NotACall
        elif self._key == "function" and char == "{":
            self._inner = CallObject(self._known, self._start_inner, self._arguments, guarded=True, empty=self._empty)
        elif char in "{[" or (self._key in _NAMES and (char != '"' or self._name is not None)):
            raise NotACall

    def _start_inner(self, name: str) -> None:
        self._name, self.started = name, True
        self._start(name)

    def _end_value(self) -> None:
        if self._inner is not None:
            if not self._inner.done:
                raise NotACall
            self._inner, self._has_arguments = None, True
        elif self._key in ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            if not self._streams:
                self._give(arguments_text(self._value))
        elif self._key in (_NAMES if self._guarded else NAME_KEYS):
            self._name = self._read_name(self._value)
            if self._held or self._has_arguments:
                self._check_started()
        else:
            self._others[self._key] = self._value
        self._streams = False

    def _after_value(self, char: str) -> None:
        if char == ",":
            self._state = self._before_key
        elif char == "}":
            self._close()
        elif not char.isspace():
            raise NotACall

    def _read_name(self, raw: str) -> str:
        try:
            name = json.loads(raw)
        except ValueError:
            raise NotACall from None
        if not isinstance(name, str) or not name or (self._known is not None and name not in self._known):
            raise NotACall
        if self._guarded and name != raw[1:-1]:
            raise NotACall
        return name

    def _check_started(self) -> None:
        if self._name is not None and not self.started:
            self.started = True
            self._start(self._name)
            held, self._held = self._held, ""
            self._arguments(held)

    def _give(self, text: str) -> None:
        if self.started:
            self._arguments(text)
        else:
            self._held += text

    def _close(self) -> None:
        if self._name is None:
            self._read_nested()
        if self._known is not None and not self._has_arguments and self._others.keys() - _OTHER_KEYS:
            raise NotACall  # an object that happens to have a name
        if self._guarded and self._known is not None and not self._has_arguments and self._name not in self._empty:
            raise NotACall
        self._check_started()
        if not self._has_arguments:
            self._arguments("{}")
        self.done = True

    def _read_nested(self) -> None:
        """{"type": "function", "function": {"name": ..., "parameters": ...}}, or {"function": "name", ...}."""
        try:
            inner: Any = json.loads(self._others.get("function", "null"))
        except ValueError:
            raise NotACall from None
        if isinstance(inner, dict):
            self._name = self._read_name(json.dumps(inner.get("name")))
            given = next((inner[key] for key in ARGUMENT_KEYS if inner.get(key) is not None), None)
            if given is not None and not self._has_arguments:
                self._has_arguments = True
                self._held = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        else:
            self._name = self._read_name(json.dumps(inner))
