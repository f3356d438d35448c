"""The schemas of tools' parameters: what they say about calls as a whole, and arguments in a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.grammar.json_schema import prepared
from octavo.grammar.lark import inline_json, json_options


class CannotGuard(Exception):
    """The arguments of a strict tool cannot be held to their schema in the format of its calls. The message is for the user."""


_MAY_DEMAND = ("required", "minProperties", "anyOf", "oneOf", "allOf", "$ref")


def needs_arguments(schema: Any) -> bool:
    """Whether a call without arguments might be none that the schema allows."""
    return isinstance(schema, Mapping) and any(schema.get(key) for key in _MAY_DEMAND)


def arguments_rule(i: int, tool: Mapping[str, Any]) -> str:
    """The rule arguments_{i}: those of a tool, as JSON."""
    lenient = not tool.get("strict")
    schema = tool.get("parameters") or {"type": "object", "properties": {}}
    return f"arguments_{i}: {inline_json(as_object(schema, lenient=lenient), json_options(lenient=lenient))}"


def as_object(schema: Any, *, lenient: bool) -> Any:
    """Arguments are an object, whether the schema says so or not, and have the properties that it names, unless it allows others."""
    schema = prepared(schema, closed=True, lenient=lenient)
    if isinstance(schema, dict) and not {"type", "$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        return {"type": "object", **schema}
    if isinstance(schema, dict) and isinstance(schema.get("type"), list):
        return {**schema, "type": "object"}
    return schema
