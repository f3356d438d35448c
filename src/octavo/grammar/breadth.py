"""How much may come next at one place of a JSON text, as its schema has it: what the engine's parser keeps entries for.

In an object any property that may be left out can be the next, and the engine keeps four entries for each; where several objects may stand,
those of all of them. A look at the next token goes through these entries again for every way in which a token may end a value and begin
the next name (`",` `", "` `."},` and so on: about a hundred in a large vocabulary). That is cheap, but it is a lot, and no sign of an
ambiguous grammar: the engine's limits are set by what is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from octavo.grammar.json_schema import ALTERNATIVES, parts_of
from octavo.grammar.pointers import Path, followed

MAX_OPTIONAL = 480
"""Properties that may be left out, of all objects that may stand at one place."""
MAX_STEPS = 200_000
_MAX_DEPTH = 100

Names = frozenset[str]


@dataclass(frozen=True)
class Breadth:
    """Of one value."""

    ways: int
    """Schemas that it may match, as far as they are alternatives."""
    optional: int
    """Properties that may be left out, of all of these."""


_NARROW = Breadth(1, 0)


class _TooIntricate(Exception):
    pass


def too_broad(schema: Any) -> tuple[Path, str] | None:
    """Where more may come next than the engine follows, and what to say; None if nowhere."""
    breadths = _Breadths(schema)
    try:
        for path, node in _values(schema):
            if breadths.of(node).optional > MAX_OPTIONAL:
                place, found = breadths.culprit(path, node)
                where = "can be in one object" if found.ways == 1 else "may be in all objects that can stand at one place"
                what = "its properties" if found.ways == 1 else f"the properties of its {found.ways} alternatives"
                return place, f"{found.optional} of {what} may be left out; at most {MAX_OPTIONAL} {where}. Make more of them required."
    except _TooIntricate:
        return (), "its references and alternatives are too intricate to count properties. Use a schema with fewer of them."
    return None


def breadth(schema: Any) -> int:
    """The most that may come next at one place: properties that may be left out, and alternatives."""
    breadths = _Breadths(schema)
    try:
        return max((found.optional + found.ways for found in (breadths.of(node) for _, node in _values(schema))), default=0)
    except _TooIntricate:
        return MAX_OPTIONAL


def _values(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The schemas in a schema that do not only say more of the value that the one around them speaks of."""
    for path, node in parts_of(schema):
        if not (len(path) > 1 and isinstance(path[-1], int) and path[-2] in ALTERNATIVES):
            yield path, node


class _Breadths:
    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._steps = 0
        self._known: dict[tuple[int, Names], Breadth] = {}
        self._open: set[int] = set()

    def of(self, node: Any, demanded: Names = frozenset()) -> Breadth:
        """Of the values of a schema.

        Args:
            demanded: names that other schemas of the same value require.
        """
        if not isinstance(node, dict) or id(node) in self._open or len(self._open) > _MAX_DEPTH:
            return _NARROW
        if (known := self._known.get((id(node), demanded))) is not None:
            return known
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _TooIntricate
        self._open.add(id(node))
        result = self._together(node, demanded | self._required(node, 0))
        self._open.discard(id(node))
        self._known[id(node), demanded] = result
        return result

    def culprit(self, path: Path, node: dict[str, Any]) -> tuple[Path, Breadth]:
        """The part of a schema that is too broad by itself; the schema, if it takes all of them."""
        demanded = self._required(node, 0)
        for key in ALTERNATIVES:
            for i, part in enumerate(node[key] if isinstance(node.get(key), list) else ()):
                if isinstance(part, dict) and self.of(part, demanded).optional > MAX_OPTIONAL:
                    return self.culprit((*path, key, i), part)
        return path, self.of(node)

    def _together(self, node: dict[str, Any], demanded: Names) -> Breadth:
        properties = node.get("properties")
        kinds = node.get("type", "object")
        may_be = "object" in kinds if isinstance(kinds, str | list) else True
        own = len(properties.keys() - demanded) if may_be and isinstance(properties, dict) else 0
        result = Breadth(1, own)
        for part in self._parts(node):
            result = _both(result, self.of(part, demanded))
        for key in ("anyOf", "oneOf"):
            if isinstance(choices := node.get(key), list) and choices:
                result = _both(result, _either([self.of(choice, demanded) for choice in choices]))
        if isinstance(values := node.get("enum"), list):
            result = _both(result, Breadth(max(1, sum(isinstance(value, dict | list) for value in values)), 0))
        return result

    def _parts(self, node: dict[str, Any]) -> list[Any]:
        """The schemas that a value must match besides."""
        parts = node.get("allOf")
        found = [*parts] if isinstance(parts, list) else []
        if isinstance(reference := node.get("$ref"), str) and (reference == "#" or reference.startswith("#/")):
            target = followed((), self._schema, reference[1:])
            found += [] if target is None else [target[1]]
        return found

    def _required(self, node: Any, depth: int) -> Names:
        if not isinstance(node, dict) or depth > 10:
            return frozenset()
        listed = node.get("required")
        names = frozenset(name for name in listed if isinstance(name, str)) if isinstance(listed, list) else frozenset[str]()
        for part in self._parts(node):
            names |= self._required(part, depth + 1)
        return names


def _both(one: Breadth, other: Breadth) -> Breadth:
    """Of a value that matches both: every pair of their alternatives is one."""
    return Breadth(one.ways * other.ways, one.optional * other.ways + other.optional * one.ways)


def _either(parts: list[Breadth]) -> Breadth:
    return Breadth(sum(part.ways for part in parts), sum(part.optional for part in parts))
