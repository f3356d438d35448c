"""What the engine takes without keeping it: such a schema is refused here, or written so that it is kept.

* Free names (of `additionalProperties`, `patternProperties`) may be written twice in one object, where the last value counts. That is no harm
  to the value, whose schema is the same; but a count of properties is met in the text and not by the object that it means.
* Beside names that a schema names, the engine takes a free one in any spelling: "\\u0061" would be "a" again, under another schema.
* It holds numbers as doubles (see `numbers`).
* A regular expression may end in a backslash that escapes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from octavo.grammar.json_schema import ALTERNATIVES, parts_of, subschemas
from octavo.grammar.numbers import MAX_BOUND, ends_the_process, unkept_number
from octavo.grammar.pointers import Path, followed, objects_in

ESCAPES = 'nrbtf\\"'
"""What may follow a backslash in a string: all but a character's number, which is needed for control characters only."""
_DEFINITIONS = ("$defs", "definitions")
MAX_STEPS = 100_000


def pattern_problem(pattern: str) -> str:
    """What is wrong with a regular expression; "" if nothing is known to be."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        return "the regular expression ends in a backslash that escapes nothing; a backslash itself is written twice"
    return ""


def string_options(schema: Any) -> dict[str, Any]:
    """How strings must be spelled, as options of the engine, for a schema to be kept."""
    for _, node in parts_of(schema):
        if node.get("additionalProperties") is not False and any(node.get(key) for key in ("properties", "required", "patternProperties")):
            return {"json_allowed_escapes": ESCAPES}
    return {}


def unkept(schema: Any) -> tuple[Path, str] | None:
    """Where a schema says what the engine would take and not keep, and what to say; None if nowhere."""
    for path, node in _referred_to(schema):
        patterns = node.get("patternProperties")
        for pattern in [node.get("pattern"), *(patterns if isinstance(patterns, dict) else ())]:
            if isinstance(pattern, str) and (problem := pattern_problem(pattern)):
                return path, f"{problem}."
        if (number := unkept_number(node)) is not None:
            return (*path, *number[0]), number[1]
    if any(map(ends_the_process, objects_in(schema))):
        return (), f"a number below -{MAX_BOUND} in it cannot be kept. Leave it out."
    return _Counts(schema).problem()


def _referred_to(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """All schemas in a schema, those in places that only references lead to among them."""
    seen = set[int]()
    todo: list[tuple[Path, Any]] = [((), schema)]
    while todo:
        references: list[str] = []
        for start, inner in todo:
            for path, node in parts_of(inner):
                if id(node) not in seen:
                    seen.add(id(node))
                    yield (*start, *path), node
                    references += [reference] if isinstance(reference := node.get("$ref"), str) and reference.startswith("#/") else []
        targets = [followed((), schema, reference[1:]) for reference in dict.fromkeys(references)]
        todo = [target for target in targets if target is not None and id(target[1]) not in seen]


Facts = tuple[bool, frozenset[str]]
"""Of an object: whether it has no names but those its schema names, and the names that it must have."""


class _Counts:
    """Looks at every `minProperties` together with all schemas that speak of the same object."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._seen: set[tuple[int, Facts]] = set()

    def problem(self) -> tuple[Path, str] | None:
        if not any("minProperties" in node for _, node in parts_of(self._schema)):
            return None
        nothing: Facts = (False, frozenset())
        todo: list[tuple[Path, Any, Facts]] = [((), self._schema, nothing)]
        while todo:
            path, node, outer = todo.pop()
            if not isinstance(node, dict) or (id(node), outer) in self._seen:
                continue
            self._seen.add((id(node), outer))
            if len(self._seen) > MAX_STEPS:
                return path, "its references are too intricate to count properties. Use a schema with fewer of them."
            closed, required = facts = _both(outer, self._facts(node, 0))
            least = node.get("minProperties", 0)
            if not closed and isinstance(least, int | float) and least > len(required) + 1:
                return path, (
                    f"minProperties {least} cannot be enforced where names are free (additionalProperties is not false, or there are "
                    f"patternProperties): one name written twice would count as two. Name the properties and require them; with "
                    f"{len(required)} required, minProperties may be at most {len(required) + 1}."
                )
            if isinstance(reference := node.get("$ref"), str):
                target = followed((), self._schema, reference[1:]) if reference.startswith("#") else None
                if target is not None and (reference == "#" or reference.startswith("#/")):
                    todo.append((*target, outer))
                else:
                    todo += [(place, part, nothing) for place, part in parts_of(self._schema)]  # one of these
            for step, inner in subschemas(node):
                if step[0] not in _DEFINITIONS:
                    todo.append(((*path, *step), inner, facts if step[0] in ALTERNATIVES else nothing))
        return None

    def _facts(self, node: Any, depth: int) -> Facts:
        """What a schema says of an object by itself. Beside a reference some drafts heed nothing, so nothing is counted on."""
        if not isinstance(node, dict) or "$ref" in node or depth > 20:
            return False, frozenset()
        names = node.get("required")
        required = frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset[str]()
        facts: Facts = node.get("additionalProperties") is False and not node.get("patternProperties"), required
        parts = node.get("allOf")
        for part in parts if isinstance(parts, list) else ():
            facts = _both(facts, self._facts(part, depth + 1))
        return facts


def _both(one: Facts, other: Facts) -> Facts:
    return one[0] or other[0], one[1] | other[1]
