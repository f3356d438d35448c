"""JSON schemas on their way to the grammar engine: small adjustments, and where in the schema a problem sits.

The engine is exact: what it accepts, it enforces, and a keyword that it cannot enforce is an error rather than a promise broken. Its
messages do not say where; `failing_path` finds the smallest part of the schema that is refused by itself.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from octavo.grammar.numbers import loosened
from octavo.grammar.overlap import Overlap
from octavo.grammar.pointers import Path, followed, index_of

FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"))
"""Formats that can be enforced. Any other is an annotation, as JSON Schema has it, and is left out."""

NOTES = frozenset(
    ("$schema", "$id", "$comment", "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly")
)
"""Keywords that say nothing of a value."""

_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
ALTERNATIVES = ("anyOf", "oneOf", "allOf")
"""Lists of schemas that speak of the same value as the schema they are in."""
_LISTS = (*ALTERNATIVES, "prefixItems")
_SINGLE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedProperties",
)


def subschemas(schema: Any) -> Iterator[tuple[Path, Any]]:
    """The schemas directly inside a schema, each with its path from there."""
    if not isinstance(schema, dict):
        return
    for key in _MAPS:
        if isinstance(inner := schema.get(key), dict):
            for name, value in inner.items():
                yield (key, name), value
    for key in _LISTS:
        if isinstance(inner := schema.get(key), list):
            for i, value in enumerate(inner):
                yield (key, i), value
    for key in _SINGLE:
        if isinstance(inner := schema.get(key), list):  # of `items`, in older drafts
            for i, value in enumerate(inner):
                yield (key, i), value
        elif key in schema:
            yield (key,), inner


def parts_of(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A schema and all schemas inside it that are objects, each with its path."""
    todo: list[tuple[Path, Any]] = [((), schema)]
    while todo:
        path, node = todo.pop()
        if isinstance(node, dict):
            yield path, node
            todo += [((*path, *step), inner) for step, inner in subschemas(node)]


def prepared(schema: Any, *, closed: bool = False, lenient: bool = False) -> Any:
    """A copy for the engine.

    Args:
        closed: objects allow no properties but those they name, unless they say otherwise.
        lenient: what no grammar can hold a text to is left out, where the engine would not do so: patterns that look around or back,
            numbers of properties that it cannot count, and numbers that it would round.
    """
    return _Copy(schema, closed, lenient).of(schema)


class _Copy:
    def __init__(self, root: Any, closed: bool, lenient: bool) -> None:
        self._closed = closed
        self._lenient = lenient
        self._overlap = Overlap(root)

    def of(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.of(s) for s in schema]
        if not isinstance(schema, dict):
            return copy.deepcopy(schema)
        if self._lenient:
            schema = loosened(schema)
        result: dict[str, Any] = {}
        idle = _idle(schema) | (_uncounted(schema, closed=self._closed) if self._lenient else set())
        for key, value in schema.items():
            if key in idle:
                continue
            if key in _MAPS and isinstance(value, dict):
                result[key] = {name: self.of(inner) for name, inner in value.items()}
            elif key in _LISTS or key in _SINGLE:
                result[key] = self.of(value)
            elif (key == "format" and not (isinstance(value, str) and value in FORMATS)) or (
                key == "pattern" and self._lenient and isinstance(value, str) and _LOOKS_AROUND.search(value)
            ):
                continue
            elif key in _COUNTS and isinstance(value, float) and value.is_integer():
                result[key] = int(value)  # 2.0, which the engine does not take for a whole number
            else:
                result[key] = value
        if isinstance(parts := schema.get("oneOf"), list) and "$ref" not in schema and self._overlap.none(parts):
            # At most one can match, which the engine finds out in fewer cases: so any one that does is the one.
            choices = result.pop("oneOf")
            if "anyOf" not in result:
                result["anyOf"] = choices
            elif isinstance(result.setdefault("allOf", []), list):
                result["allOf"].append({"anyOf": choices})
        if self._closed and "properties" in result:
            result.setdefault("additionalProperties", False)
        return result


def _uncounted(schema: dict[str, Any], *, closed: bool) -> set[str]:
    """Numbers of properties that cannot be kept: where some may be left out, or free names be written twice."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return set()
    alone = "$ref" not in schema  # beside which some drafts heed nothing
    names = {name for name in required if isinstance(name, str) and alone}
    if not properties.keys() <= names and alone:
        return {"minProperties", "maxProperties"}
    open_end = schema.get("additionalProperties", not (closed and "properties" in schema)) is not False
    free = open_end or schema.get("patternProperties") or not alone
    least = schema.get("minProperties", 0)
    return {"minProperties"} if free and isinstance(least, int | float) and least > len(names) + 1 else set()


_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def _idle(schema: dict[str, Any]) -> set[str]:
    """Keywords that say nothing in this schema, which the engine would refuse all the same."""
    idle = {"uniqueItems"} if schema.get("uniqueItems") is False else set()
    if "contains" not in schema:
        idle |= {"minContains", "maxContains"}
    if "if" not in schema:
        idle |= {"then", "else"}
    elif "then" not in schema and "else" not in schema:
        idle.add("if")
    return idle


TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def malformed(schema: Any, path: Path = (), depth: int = 0) -> tuple[Path, str] | None:
    """Where `schema` is no JSON schema, and why; None where it looks like one. Needs no grammar engine."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return path, f"a schema is an object, got {type(schema).__name__}"
    if depth > 64:
        return path, "nested more than 64 levels deep"
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in TYPES:
            return (*path, "type"), f"must be one of {', '.join(TYPES)}"
    for keys, kind, name in ((_MAPS, dict, "an object"), (_LISTS, list, "a list"), (("enum", "required"), list, "a list")):
        for key in keys:
            if key in schema and not isinstance(schema[key], kind):
                return (*path, key), f"must be {name}"
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        return (*path, "required"), "must hold names of properties"
    return next((found for step, inner in subschemas(schema) if (found := malformed(inner, (*path, *step), depth + 1))), None)


MAX_ENDLESS_STEPS = 20_000


def endless(schema: Any) -> Path | None:
    """Where `schema` has a part that no finite text can match, because it always needs itself: {"$ref": "#"}, or an object with a
    required property of its own kind. None if nowhere, or if the schema is too intricate to tell."""
    steps = 0
    fine: set[int] = set()

    def needs_itself(node: Any, above: frozenset[int]) -> bool:
        nonlocal steps
        steps += 1
        if not isinstance(node, dict) or id(node) in fine or steps > MAX_ENDLESS_STEPS or len(above) > 200:
            return False
        if id(node) in above:
            return True
        inside = above | {id(node)}
        needed = [*node.get("allOf", ())] if isinstance(node.get("allOf"), list) else []
        if isinstance(reference := node.get("$ref"), str) and (reference == "#" or reference.startswith("#/")):
            needed.append(_target(schema, reference))
        names, properties = node.get("required"), node.get("properties")
        if node.get("type") == "object" and isinstance(names, list) and isinstance(properties, dict):
            needed += [properties[name] for name in names if isinstance(name, str) and name in properties]
        choices = [node[key] for key in ("anyOf", "oneOf") if isinstance(node.get(key), list) and node[key]]
        found = any(needs_itself(part, inside) for part in needed) or any(
            all(needs_itself(part, inside) for part in parts) for parts in choices
        )
        if not found:
            fine.add(id(node))
        return found

    def search(node: Any, path: Path, depth: int) -> Path | None:
        if depth > 64:
            return None
        # Definitions that nothing uses do no harm, and those in use are found where they are used. Inner parts first: they are the place.
        inner = ((step, part) for step, part in subschemas(node) if step[0] not in ("$defs", "definitions"))
        found = next((found for step, part in inner if (found := search(part, (*path, *step), depth + 1)) is not None), None)
        return path if found is None and needs_itself(node, frozenset()) else found

    return search(schema, (), 0)


def _target(schema: Any, reference: str) -> Any:
    """What a $ref into the same schema points at; True (anything) if that is not there."""
    node = schema
    for part in (step.replace("~1", "/").replace("~0", "~") for step in reference.removeprefix("#").split("/")[1:]):
        if isinstance(node, list) and (at := index_of(part)) < len(node):
            node = node[at]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        else:
            return True
    return node


SEARCH_SECONDS = 1.0
"""How long the place of a problem is looked for: then the place found so far has to do."""


def failing_path(schema: Any, problem: str, problem_of: Callable[[Any], str]) -> tuple[Path, str]:
    """Where a refused schema goes wrong: the path of the deepest part that is refused by itself, and what is said of it.

    Args:
        problem: what is wrong with the whole.
        problem_of: "" for a schema that is fine, else what is wrong with it.
    """
    path: Path = ()
    deadline = time.monotonic() + SEARCH_SECONDS
    shared = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    node, seen = schema, set[str]()
    while True:
        for step, inner in subschemas(node):
            if time.monotonic() > deadline:
                return path, problem
            alone = {**shared, **inner} if isinstance(inner, dict) and step[0] not in shared else inner
            # A part may be refused only because it stands alone (a $ref into the whole): then it says nothing about the whole.
            found = problem_of(alone)
            if found and not _misses_reference(found):
                path, problem, node = (*path, *step), found, inner
                break
        else:
            if _misses_reference(problem):
                return lost_reference(schema) or path, problem
            reference = node.get("$ref") if isinstance(node, dict) else None
            if not isinstance(reference, str) or reference in seen or not reference.startswith(("#/$defs/", "#/definitions/")):
                return path, problem
            seen.add(reference)
            _, key, name = reference.split("/", 2)
            target = schema.get(key, {}).get(name) if isinstance(schema.get(key), dict) else None
            if not isinstance(target, dict) or not (found := problem_of({**shared, **target})):
                return path, problem
            path, problem, node = (key, name), found, target


def lost_reference(schema: Any) -> Path | None:
    """Where the first $ref is that leads nowhere in `schema`, following those that lead somewhere."""
    todo: list[tuple[Path, Any]] = [((), schema)]
    seen: set[int] = set()
    while todo:
        path, node = todo.pop(0)
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        todo += [((*path, *step), inner) for step, inner in subschemas(node) if step[0] not in ("$defs", "definitions")]
        if isinstance(reference := node.get("$ref"), str):
            target = followed((), schema, reference[1:]) if reference in ("#", "") or reference.startswith("#/") else None
            if target is None:
                return path
            todo.append(target)
    return None


def _misses_reference(problem: str) -> bool:
    return problem.startswith(("Pointer ", "Resource "))
