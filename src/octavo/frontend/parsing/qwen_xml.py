"""Calls written as tags, as Qwen3-Coder does.

<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>

A value is text; what it means is decided by the parameter's type in the tool's schema. Arguments are reported parameter by parameter.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

from octavo.frontend.parsing.machine import MAX_NAME, Machine, undecided

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class QwenXmlCalls(Machine):
    """See the module.

    Args:
        schemas: by tool, the schema of its parameters.
        guarded: calls are those of known tools, which the grammar of strict tools guards.
    """

    def __init__(self, schemas: Mapping[str, Any], *, guarded: bool = False) -> None:
        super().__init__(self._free_text)
        self._guarded = guarded
        self._schemas = schemas
        self._properties: Mapping[str, Any] = {}
        self._parameters = 0
        self._unmarked = False
        """No <tool_call> stands before the function."""

    def _free_text(self) -> bool:
        markers = (CALL, FUNCTION)
        marker, moved = self._up_to_marker(markers)
        if marker is None:
            return moved
        self._begin_region()
        self._take(len(marker))
        self._unmarked = marker == FUNCTION
        self._state = self._in_name if self._unmarked else self._before_function
        return True

    def _before_function(self) -> bool:
        if self._buffer.startswith(FUNCTION):
            self._take(len(FUNCTION))
            self._state = self._in_name
        elif FUNCTION.startswith(self._buffer):
            return False
        elif self._buffer[0].isspace():
            self._take(1)
        else:
            self._give_up()
        return True

    def _in_name(self) -> bool:
        at = self._buffer.find(">")
        if at < 0 and len(self._buffer) <= MAX_NAME:
            return False
        name = self._buffer[:at].strip()
        # Without <tool_call> before it, only the name of a tool tells a call from text about such tags.
        known = name in self._schemas or not (self._guarded or self._unmarked)
        if not 0 < at <= MAX_NAME or not name or not known:
            self._give_up()
            return True
        self._take(at + 1)
        self._start_call(name)
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._parameters = 0
        self._state = self._between_parameters
        return True

    def _between_parameters(self) -> bool:
        markers = (PARAMETER, FUNCTION_END, CALL_END)
        marker = next((m for m in markers if self._buffer.startswith(m)), None)
        if marker == PARAMETER:
            end = self._buffer.find(PARAMETER_END)
            if end < 0:
                return False
            key, bracket, value = self._buffer[len(PARAMETER) : end].partition(">")
            self._take(end + len(PARAMETER_END))
            if bracket:
                self._parameter(key.strip(), value)
        elif marker is not None:
            if marker == FUNCTION_END:
                self._take(len(marker))
            self._arguments("}" if self._parameters else "{}")
            self._end_call()
            self._state = self._behind
        elif not self._final and any(m.startswith(self._buffer) for m in markers):
            return False
        else:
            self._take(1)
        return True

    def _parameter(self, key: str, text: str) -> None:
        # One line break on each side belongs to the layout.
        text = text.removeprefix("\n").removesuffix("\n")
        value = _typed(text, self._properties.get(key))
        opening = ", " if self._parameters else "{"
        self._parameters += 1
        self._arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}")

    def _cut_arguments(self) -> str:
        """The parameters so far, of the last one what there is."""
        if self._state != self._between_parameters or not self._buffer.startswith(PARAMETER):
            return ""
        key, bracket, text = self._buffer[len(PARAMETER) :].partition(">")
        text = text[: undecided(text, (PARAMETER_END,))].removeprefix("\n").removesuffix("\n")
        if not bracket or not text:
            return ""
        schema = self._properties.get(key.strip())
        value = json.dumps(text, ensure_ascii=False)[:-1] if isinstance(_typed(text, schema), str) else text
        return f"{', ' if self._parameters else '{'}{json.dumps(key.strip(), ensure_ascii=False)}: {value}"

    def _behind(self) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith(CALL_END):
            self._take(len(self._buffer) - len(rest) + len(CALL_END))
        elif not self._final and CALL_END.startswith(rest):
            return False
        self._state = self._free_text
        return True


def _typed(text: str, schema: Any) -> Any:
    """`text` as its schema wants it; text if it cannot be had so."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def qwen_xml(names: Container[str], *, schemas: Mapping[str, Any], guarded: bool = False) -> Machine:
    return QwenXmlCalls(schemas, guarded=guarded)
