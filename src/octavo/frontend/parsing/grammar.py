"""Grammars for calls: that there must be some (tool_choice required or named), and that those made are valid (strict)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.frontend.parsing.formats import CallSyntax
from octavo.grammar.json_schema import prepared
from octavo.grammar.lark import ANY_TEXT, inline_json, json_options, literal

_MARKER = re.compile(r"<[^>]*>|\[[A-Z_]+\]")
MAX_CALLS = 64
"""Most calls of one reply that must have some: a model that is made to call might never stop."""


def required_calls(syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int], *, most: int = MAX_CALLS) -> str:
    """A grammar of at least one call.

    Args:
        tools: "function" objects: name, parameters, strict.
        special: special tokens by their text.
        most: calls allowed.
    """
    rules = _call_rules(syntax, tools, special)
    return "\n".join([f"start: {_some(syntax, special, most)}", *rules])


def optional_calls(syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int], *, most: int = MAX_CALLS) -> str:
    """A grammar of free text in which whatever begins like a call is a valid one."""
    rules = _call_rules(syntax, tools, special)
    opening = syntax.begin or syntax.before
    if opening[0] == "{" or opening == "[":
        # Without a marker, a reply is calls or it is text, and its first character tells.
        free = r"FREE: /([^{\[\s](.|\n)*)?/"
        return "\n".join([f"start: {_some(syntax, special, most)} | FREE", free, *rules])
    trigger = _trigger(opening, special)
    text = f"TEXT: {ANY_TEXT}"
    rest = opening[len(trigger) :]
    if trigger in special:
        begin = f"TEXT {literal(trigger, special)}"
    else:
        rules.append(f"trigger[lazy]: TEXT {literal(trigger)}")
        begin = "trigger"
    first = _after_trigger(syntax, rest, special)
    rules.append(f"region: {begin} {first}")
    return "\n".join(["start: region* TEXT", text, *rules])


def _trigger(opening: str, special: Mapping[str, int]) -> str:
    """The first marker of an opening: what tells that a call begins."""
    at = min((name for name in special if opening.startswith(name)), key=len, default=None)
    if at is not None:
        return at
    marker = _MARKER.match(opening)
    return marker.group() if marker is not None else opening


def _after_trigger(syntax: CallSyntax, rest: str, special: Mapping[str, int]) -> str:
    """What follows the trigger: the rest of the opening, and the first call (or the list of them)."""
    if syntax.begin:
        separator = literal(syntax.separator, special)
        end = literal(syntax.end, special)
        return f"{literal(rest, special)} call ({separator} call)* {end}"
    return f"{literal(rest, special)} call_body"


def _some(syntax: CallSyntax, special: Mapping[str, int], most: int) -> str:
    begin, end = literal(syntax.begin, special), literal(syntax.end, special)
    separator = literal(syntax.separator, special)
    more = f"({separator} call){{0,{most - 1}}}" if most > 1 else ""
    return f"{begin} call {more} {end}"


def _call_rules(syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int]) -> list[str]:
    rules = [f"call: {literal(syntax.before, special)} call_body"]
    bodies = []
    for i, tool in enumerate(tools):
        schema = tool.get("parameters") or {"type": "object", "properties": {}}
        options = json_options(lenient=not tool.get("strict"))
        name = str(tool["name"])
        if syntax.before.endswith('"'):  # it stands in a JSON string
            name = json.dumps(name, ensure_ascii=False)[1:-1]
        rules.append(f"arguments_{i}: {inline_json(_object(schema, lenient=not tool.get('strict')), options)}")
        bodies.append(f"{literal(name)} {literal(syntax.between, special)} arguments_{i} {literal(syntax.after, special)}")
    rules.append("call_body: " + " | ".join(bodies))
    return rules


def _object(schema: Any, *, lenient: bool) -> Any:
    """Arguments are an object, whether the schema says so or not, and have the properties that it names, unless it allows others."""
    schema = prepared(schema, closed=True, lenient=lenient)
    if isinstance(schema, dict) and not {"type", "$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        return {"type": "object", **schema}
    if isinstance(schema, dict) and isinstance(schema.get("type"), list):
        return {**schema, "type": "object"}
    return schema
