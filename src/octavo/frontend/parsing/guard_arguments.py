"""Arguments that are not written as one JSON object, for grammars of strict tools: each has a name and a value of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.frontend.parsing.schemas import CannotGuard, as_object
from octavo.grammar.json_schema import subschemas
from octavo.grammar.lark import inline_json, json_options

_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "format"}
_OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id", *_NOTES}
_TEXT = {"type", "enum", "const", "minLength", "maxLength", *_NOTES} - {"format"}


@dataclass(frozen=True)
class Argument:
    """One argument of a tool."""

    name: str
    schema: dict[str, Any]
    required: bool
    lenient: bool
    where: str
    definitions: Mapping[str, Any]

    @property
    def json(self) -> str:
        """Its value as JSON, a part of a rule."""
        return inline_json({**self.schema, **self.definitions}, json_options(lenient=self.lenient))

    @property
    def texts(self) -> list[str] | None:
        """What a string may be, where it is one of few."""
        values = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        if values is None:
            return None
        return [value for value in values if isinstance(value, str)]

    def check_text(self, how: str) -> None:
        """Raises CannotGuard for a string that is held to more than a length or a list of texts."""
        if extra := sorted(self.schema.keys() - _TEXT):
            if self.lenient:
                return
            raise CannotGuard(
                f"{self.where}.properties.{self.name}: {extra[0]} of a string cannot be enforced in calls written {how}; leave out strict, "
                "or that keyword."
            )


def arguments_of(tool: Mapping[str, Any], how: str) -> list[Argument]:
    """The arguments of a tool, in the order in which they are written.

    Raises:
        CannotGuard: they depend on each other, or on names that are not known.
    """
    lenient = not tool.get("strict")
    schema = as_object(tool.get("parameters") or {"type": "object", "properties": {}}, lenient=lenient)
    where = f"The parameters of {tool['name']}"
    unknown = sorted(schema.keys() - _OBJECT)
    if unknown and not lenient:
        raise CannotGuard(
            f"{where}: {unknown[0]} cannot be enforced in calls written {how}, which have each argument by itself; leave out strict, or give "
            "an object with properties and required."
        )
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties = schema.get("properties") or {}
    required = [name for name in schema.get("required") or () if isinstance(name, str)]
    arguments = []
    for name in [*properties, *(name for name in dict.fromkeys(required) if name not in properties)]:
        inner = properties.get(name, schema.get("additionalProperties", True))
        if inner is False:
            if name in required and not lenient:
                raise CannotGuard(f"{where}: {name} is required, and nothing may be its value.")
            continue
        inner = inner if isinstance(inner, dict) else {}
        if any(not reference.startswith(("#/$defs/", "#/definitions/")) for reference in _references([inner, definitions])):
            if not lenient:
                raise CannotGuard(f"{where}.properties.{name}: references must be to $defs in calls written {how}.")
            inner = {}
        arguments.append(Argument(name, inner, name in required, lenient, where, definitions))
    return arguments


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference
        for _, inner in subschemas(value):
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def in_order(rules: list[tuple[str, bool]], separator: str = "") -> str:
    """Rules one behind the other, of which those that are not required may be missing.

    Args:
        rules: each with whether it is required.
        separator: between two of them.
    """
    if not separator:
        return " ".join(rule if required else f"({rule})?" for rule, required in rules)
    rest = ""
    for rule, required in reversed(rules):  # a chain: the separator stands before all but the first
        rest = f"{separator} {rule} {rest}" if required else f"({separator} {rule})? {rest}"
    return rest


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
