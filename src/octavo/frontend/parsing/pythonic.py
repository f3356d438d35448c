"""Calls written as a Python list: [get_weather(city="Paris"), now()]. Llama 4 and several small models.

A call is reported when it is complete: only then is its Python known to be valid, and its arguments can be written as JSON.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

from octavo.frontend.parsing.machine import Machine
from octavo.frontend.parsing.schemas import needs_arguments

START, END = "<|python_start|>", "<|python_end|>"
MAX_CALL = 100_000
"""Characters of one call."""
NAME = re.compile(r"[A-Za-z_][\w.\-]*")
KEYWORDS = frozenset(keyword.kwlist)
_PLAIN = re.compile(r"[A-Za-z_][\w.\-]* *\([ \t\r\n]*([^\W\d]\w*[ \t\r\n]*=|\))")
"""How a call begins that the grammar of strict tools guards."""


class PythonicCalls(Machine):
    """See the module.

    Args:
        guarded: read what the grammar of strict tools guards, no more.
        schemas: by tool, the schema of its parameters.
    """

    def __init__(self, names: Container[str], *, guarded: bool = False, schemas: Mapping[str, Any] | None = None) -> None:
        super().__init__(self._beginning)
        self._names = names
        self._guarded = guarded
        self._empty = frozenset(name for name, schema in (schemas or {}).items() if not needs_arguments(schema))
        self._some = False

    def _beginning(self) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith("["):
            self._begin_region()
            self._take(len(self._buffer) - len(rest) + 1)
            self._some = False
            self._state = self._before_call
        elif rest.startswith(START):
            self._take(len(self._buffer) - len(rest) + len(START))
        elif not rest or (START.startswith(rest) and not self._final):
            return False
        else:
            self._state = self._free_text
        return True

    def _free_text(self) -> bool:
        """Only the markers can bring calls now."""
        marker, moved = self._up_to_marker((START, END))
        if marker is None:
            return moved
        self._take(len(marker))
        if marker == START:
            self._state = self._beginning
        return True

    def _before_call(self) -> bool:
        char = self._buffer[0]
        if char.isspace() or (char == "," and self._some):
            self._take(1)
        elif char == "]":
            if self._some:
                self._take(1)
                self._state = self._free_text
            else:
                self._give_up()
        elif char.isalpha() or char == "_":
            if self._raw is None:
                self._begin_region()
            self._state = self._in_call_text
        else:
            self._give_up()
        return True

    def _in_call_text(self) -> bool:
        end = _end_of_call(self._buffer)
        if end is None:
            if len(self._buffer) > MAX_CALL:
                self._give_up()
                return True
            return False
        source = self._buffer[:end]
        call = _parsed(source, self._names)
        self._take(end)
        if call is not None and self._guarded and not (_PLAIN.match(source) and (call[1] != "{}" or call[0] in self._empty)):
            call = None
        if call is None:
            self._give_up()
            return True
        name, arguments = call
        self._start_call(name)
        self._arguments(arguments)
        self._end_call()
        self._some = True
        self._state = self._before_call
        return True

    def _cut_name(self) -> str | None:
        return (found := self._cut()) and found[0]

    def _cut_arguments(self) -> str:
        found = self._cut()
        return found[1] if found is not None else ""

    def _cut(self) -> tuple[str, str] | None:
        """The call at the end, as far as its arguments are whole."""
        if self._state != self._in_call_text:
            return None
        for end in _ends_of_arguments(self._buffer):
            if (call := _parsed(self._buffer[:end] + ")", self._names)) is not None:
                name, arguments = call
                return name, arguments[:-1] if len(arguments) > 2 else ""
        return None


def _end_of_call(text: str) -> int | None:
    """Where the call at the beginning of `text` ends (behind its closing bracket, or where it cannot be one); None if not yet."""
    depth = 0
    for i, char in _outside_strings(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth <= 0:
                return i + 1
        elif not depth and not (char.isalnum() or char in "_.- "):
            return i + 1
    return None


def _ends_of_arguments(text: str) -> list[int]:
    """Where the beginning of a call may be cut so that what is left is whole arguments; the last place first."""
    places, depth = list[int](), 0
    for i, char in _outside_strings(text):
        if char in "([{":
            depth += 1
            if depth == 1:
                places.append(i + 1)
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 1:
            places.append(i)
    return places[::-1]


def _outside_strings(text: str) -> Iterator[tuple[int, str]]:
    """(place, character) of what stands outside of Python's strings, and of the quotes that open them."""
    quote, escaped = "", False
    for i, char in enumerate(text):
        if not quote:
            if char in "\"'":
                quote = char
            yield i, char
        elif escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == quote:
            quote = ""


def _parsed(source: str, names: Container[str]) -> tuple[str, str] | None:
    """(name, arguments as JSON); None for what is no call of a known tool."""
    matched = NAME.match(source)
    if matched is None or matched.group() not in names or not source[matched.end() :].lstrip().startswith("("):
        return None
    try:
        # Names of tools may have hyphens, which Python reads as a difference.
        node = ast.parse("f" + source[matched.end() :].lstrip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.args or any(given.arg is None for given in node.keywords):
            return None
        values = {given.arg: _value(given.value) for given in node.keywords}
        return matched.group(), json.dumps(values, ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    """A literal; JSON's own names for constants are understood as well."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.Dict):
        return {str(_value(key)): _value(value) for key, value in zip(node.keys, node.values, strict=True) if key is not None}
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    return ast.literal_eval(node)


def pythonic(names: Container[str], **how: Any) -> Machine:
    return PythonicCalls(names, **how)
