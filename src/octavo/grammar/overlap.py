"""Which parts of a `oneOf` exclude one another, so that "exactly one" says no more than "any".

Says so only where it follows from what is read here: the types, the values of `const` and `enum`, ranges of numbers and lengths, and a
property that must be there and has schemas that exclude one another. Everything else may overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from octavo.grammar.pointers import followed, objects_in

MAX_STEPS = 20_000
MAX_DEPTH = 12
MAX_PARTS = 200

_KINDS = {
    "object": {"object"},
    "array": {"array"},
    "string": {"string"},
    "number": {"number", "integer"},
    "integer": {"integer"},
    "boolean": {"boolean"},
    "null": {"null"},
}
_ALL = frozenset(kind for kinds in _KINDS.values() for kind in kinds)
_LENGTHS = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems"), "object": ("minProperties", "maxProperties")}


class _TooMany(Exception):
    pass


class Overlap:
    """Compares schemas inside one."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        self._plain: bool | None = None

    def none(self, parts: list[Any]) -> bool:
        """No value can match two of `parts`."""
        if not 0 < len(parts) <= MAX_PARTS:
            return False
        self._steps = 0
        try:
            return all(self._exclude(one, other, 0) for i, one in enumerate(parts) for other in parts[:i])
        except _TooMany:
            return False

    def _exclude(self, one: Any, other: Any, depth: int) -> bool:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _TooMany
        if one is False or other is False:
            return True
        if depth > MAX_DEPTH:
            return False
        ours, theirs = self._together(one), self._together(other)
        for these, rest in ((ours, other), (theirs, one)):
            for part in these:
                for key in ("anyOf", "oneOf"):
                    choices = part.get(key)
                    if isinstance(choices, list) and all(self._exclude(choice, rest, depth + 1) for choice in choices):
                        return True
        if _rejects_all(ours, theirs) or _rejects_all(theirs, ours):
            return True
        return all(self._apart(kind, ours, theirs, depth) for kind in _kinds(ours) & _kinds(theirs))

    def _together(self, schema: Any) -> list[dict[str, Any]]:
        """The schemas that a value must match to match `schema`: itself, what it refers to, its `allOf`."""
        found: dict[int, dict[str, Any]] = {}
        todo = [schema]
        while todo:
            node = todo.pop()
            if not isinstance(node, dict) or id(node) in found:
                continue
            if "$ref" in node:  # beside which some drafts heed nothing
                todo.append(self._target(node["$ref"]))
                continue
            found[id(node)] = node
            parts = node.get("allOf")
            todo += parts if isinstance(parts, list) else []
            self._steps += 1
            if self._steps > MAX_STEPS:
                raise _TooMany
        return list(found.values())

    def _target(self, reference: Any) -> Any:
        """What a reference leads to; None where that is not plain: identifiers inside a schema change what pointers mean."""
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        if self._plain is None:
            self._plain = not _has_identifier(self._root)
        target = followed((), self._root, reference[1:]) if self._plain else None
        node = None if target is None else target[1]
        return None if isinstance(node, dict) and node.keys() == {"$ref"} and node["$ref"] == reference else node

    def _apart(self, kind: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], depth: int) -> bool:
        """No value of one kind matches both."""
        if kind in ("number", "integer"):
            return _beyond(_range(ours), _range(theirs)) or _beyond(_range(theirs), _range(ours))
        if kind in _LENGTHS:
            low, high = _LENGTHS[kind]
            for these, those in ((ours, theirs), (theirs, ours)):
                if max(_numbers(these, low), default=0) > min(_numbers(those, high), default=math.inf):
                    return True
        if kind != "object":
            return False
        for these, those in ((ours, theirs), (theirs, ours)):
            for name in dict.fromkeys(name for part in these for name in _names(part.get("required"))):
                if any(_closed_to(part, name) for part in those):
                    return True
                for one in _named(these, name):
                    if any(self._exclude(one, other, depth + 1) for other in _named(those, name)):
                        return True
        return False


def _has_identifier(root: Any) -> bool:
    return any(isinstance(node.get(key), str) for node in objects_in(root) if node is not root for key in ("$id", "id"))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _kinds(parts: list[dict[str, Any]]) -> frozenset[str]:
    kinds = _ALL
    for part in parts:
        given = part.get("type")
        if given is not None:
            allowed = frozenset(kind for name in (given if isinstance(given, list) else [given]) for kind in _KINDS.get(str(name), _ALL))
            kinds &= allowed | {"null"} if part.get("nullable") else allowed
    return kinds


def _values(part: dict[str, Any]) -> Iterator[list[Any]]:
    if "const" in part:
        yield [part["const"]]
    if isinstance(part.get("enum"), list):
        yield part["enum"]


def _rejects_all(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    """One list of values in `ours` has none that `theirs` could take."""
    if any(part.get("nullable") for part in (*ours, *theirs)):
        return False
    kinds = _kinds(theirs)
    for part in ours:
        for values in _values(part):
            if all(
                _kind(value) not in kinds
                or any(not any(_same(value, other) for other in listed) for their in theirs for listed in _values(their))
                or (_kind(value) in ("number", "integer") and _outside(value, _range(theirs)))
                for value in values
            ):
                return True
    return False


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return _kind(one) == _kind(other) and bool(one == other)


Range = tuple[float, bool, float, bool]
"""Least (and whether it is excluded), most (the same)."""


def _numbers(parts: list[dict[str, Any]], key: str) -> list[float]:
    return [part[key] for part in parts if isinstance(part.get(key), int | float) and not isinstance(part[key], bool)]


def _range(parts: list[dict[str, Any]]) -> Range:
    if any(isinstance(part.get(key), bool) for part in parts for key in ("exclusiveMinimum", "exclusiveMaximum")):
        return -math.inf, False, math.inf, False  # as older drafts have it
    low, low_out = max(
        [(n, False) for n in _numbers(parts, "minimum")] + [(n, True) for n in _numbers(parts, "exclusiveMinimum")],
        default=(-math.inf, False),
    )
    high, high_in = min(
        [(n, True) for n in _numbers(parts, "maximum")] + [(n, False) for n in _numbers(parts, "exclusiveMaximum")],
        default=(math.inf, True),
    )
    return low, low_out, high, not high_in


def _beyond(one: Range, other: Range) -> bool:
    """All of `one` is above all of `other`."""
    return one[0] > other[2] or (one[0] == other[2] and (one[1] or other[3]))


def _outside(value: float, within: Range) -> bool:
    return _beyond((value, False, value, False), within) or _beyond(within, (value, False, value, False))


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _named(parts: list[dict[str, Any]], name: str) -> list[Any]:
    return [part["properties"][name] for part in parts if isinstance(part.get("properties"), dict) and name in part["properties"]]


def _closed_to(part: dict[str, Any], name: str) -> bool:
    properties = part.get("properties", {})
    if not isinstance(properties, dict) or part.get("patternProperties"):
        return False
    return properties.get(name) is False or (part.get("additionalProperties") is False and name not in properties)
