"""How large a JSON schema may be: what the engine compiles in about a second. Its own limits come after that, and say no place."""

from __future__ import annotations

from typing import Any

from octavo.grammar.breadth import too_broad
from octavo.grammar.divisors import too_many_states
from octavo.grammar.json_schema import parts_of
from octavo.grammar.pointers import Path

MAX_PROPERTIES = 2000
"""Of one object."""
MAX_SQUARES = 2 * MAX_PROPERTIES**2
"""Of the properties of all objects, each squared."""
MAX_ENUM_CONTAINERS = 10_000
"""Lists and objects among the values of all `enum` and `const`."""
MAX_ENUM_CHOICES = 1900
"""Of one `enum`, outermost: each is an entry of its own."""


def too_large(schema: Any) -> tuple[Path, str] | None:
    """Where a schema has more than the engine compiles in about a second, and what to say; None if nowhere."""
    containers = squares = 0
    for path, node in parts_of(schema):
        properties = node.get("properties")
        if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
            return path, f"it has {len(properties)} properties; at most {MAX_PROPERTIES} are allowed in one object."
        if (choices := sum(isinstance(value, dict | list) for value in _listed(node.get("enum")))) > MAX_ENUM_CHOICES:
            return (*path, "enum"), f"it holds {choices} lists and objects; at most {MAX_ENUM_CHOICES} are allowed."
        squares += len(properties) ** 2 if isinstance(properties, dict) else 0
        if squares > MAX_SQUARES:
            return path, f"this object and those before it have too many properties; two may have {MAX_PROPERTIES}, or 800 a hundred."
        values = [node[key] for key in ("enum", "const") if key in node]
        while values:
            if isinstance(value := values.pop(), dict | list):
                containers += 1
                values += value.values() if isinstance(value, dict) else value
        if containers > MAX_ENUM_CONTAINERS:
            return path, f"the values of enum and const hold more than {MAX_ENUM_CONTAINERS} lists and objects."
    return too_broad(schema) or too_many_states(schema)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
