"""The tools of a request: what may be asked for, and which of them a reply may (or must) call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.errors import InvalidRequest
from octavo.frontend.http.errors import short_repr
from octavo.grammar.json_schema import malformed
from octavo.grammar.pointers import pointer

MAX_TOOLS = 512
MAX_NAME = 128
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME}}}")
_TOOL = 'Each of tools must be {"type": "function", "function": {"name": ...}}'
_NAMED = 'A named tool_choice is {"type": "function", "function": {"name": ...}}.'


@dataclass(frozen=True)
class ToolUse:
    """What a reply may do with tools."""

    mode: Literal["none", "auto", "required", "named"]
    functions: tuple[dict[str, Any], ...] = ()
    """The "function" objects that may be called."""

    @property
    def must_call(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def strict(self) -> bool:
        return any(function.get("strict") is True for function in self.functions)


def tool_use(tools: Sequence[Any] | None, choice: Any) -> ToolUse:
    """What `tools` and `tool_choice` come to.

    Raises:
        InvalidRequest: names the field, and where in a tool's schema it is wrong.
    """
    functions = None if tools is None else _functions(tools)
    if choice is None:
        return ToolUse("none") if functions is None else ToolUse("auto", functions)
    if choice == "none":
        return ToolUse("none")
    if isinstance(choice, str) and choice not in ("auto", "required"):
        raise InvalidRequest(
            f"tool_choice must be none, auto, required or a named function, got {short_repr(choice)}.", param="tool_choice"
        )
    if functions is None:
        raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
    if isinstance(choice, str):
        return ToolUse("required" if choice == "required" else "auto", functions)
    if not isinstance(choice, dict):
        raise InvalidRequest(f"tool_choice must be a string or an object, got {short_repr(choice)}.", param="tool_choice")
    if choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools", choice), functions)
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise InvalidRequest(_NAMED, param="tool_choice")
    return ToolUse("named", _only([name], functions))


def _allowed(given: Any, functions: tuple[dict[str, Any], ...]) -> ToolUse:
    listed = given.get("tools") if isinstance(given, dict) else None
    if not isinstance(listed, list) or not listed or given.get("mode") not in ("auto", "required"):
        raise InvalidRequest("tool_choice of type allowed_tools needs mode (auto or required) and tools.", param="tool_choice")
    return ToolUse(given["mode"], _only([_name_of(tool) for tool in listed], functions))


def _name_of(tool: Any) -> Any:
    """What an entry of allowed_tools names, as chat writes it or as /v1/responses does."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else tool.get("name") if isinstance(tool, dict) else None


def check_number(tools: Sequence[Any] | None) -> None:
    """Raises InvalidRequest for more tools than are allowed: before anything is made of each."""
    if tools is not None and len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries; {MAX_TOOLS} are allowed.", param="tools")


def _only(names: Sequence[Any], functions: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    by_name = {function["name"]: function for function in functions}
    for name in names:
        if not isinstance(name, str) or name not in by_name:
            raise InvalidRequest(f"tool_choice names {short_repr(name)}, which is not among tools.", param="tool_choice")
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _functions(tools: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    if not tools:
        raise InvalidRequest("tools must not be an empty list; leave it out.", param="tools")
    check_number(tools)
    functions: list[dict[str, Any]] = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function" or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{_TOOL}, got {short_repr(tool)}.", param="tools")
        name, parameters = function["name"], function.get("parameters")
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"tools[{i}].function.name must be 1 to {MAX_NAME} letters (a-z, A-Z), digits, dots, dashes or underscores, "
                f"got {short_repr(name)}.",
                param="tools",
            )
        for field, kind, what in (("strict", bool, "true or false"), ("description", str, "a string")):
            if not isinstance(function.get(field), kind | None):
                raise InvalidRequest(f"tools[{i}].function.{field} must be {what}, got {short_repr(function[field])}.", param="tools")
        if name in (other["name"] for other in functions):
            raise InvalidRequest(f"tools[{i}].function.name {name!r} is that of an earlier tool; names must differ.", param="tools")
        if parameters is not None:
            problem = malformed(parameters)
            if problem is not None:
                where = pointer(problem[0]).removeprefix("$")
                raise InvalidRequest(f"tools[{i}].function.parameters{where}: {problem[1]}.", param="tools")
            if not _describes_an_object(parameters):
                raise InvalidRequest(
                    f'tools[{i}].function.parameters must be the schema of an object ({{"type": "object", ...}}), '
                    f"got {short_repr(parameters)}.",
                    param="tools",
                )
        functions.append(function)
    return tuple(functions)


def _describes_an_object(schema: Any) -> bool:
    """Arguments have names: a schema that says it is of something else is none of arguments. One that does not say is taken."""
    if not isinstance(schema, dict):
        return False
    if "type" in schema:
        return "object" in (schema["type"] if isinstance(schema["type"], list) else [schema["type"]])
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list) and parts:
            return any(_describes_an_object(part) for part in parts)
    return True
