"""What `multipleOf` costs, known before the engine finds out: it follows the remainder, so a divisor of a million is a million states.

Its fuel does not count them. Where one value has several divisors to keep (`allOf`), or one of several (`anyOf`), the states are the pairs of
their remainders; those of different values add up. Nothing here recurses deeper than the schema's own brackets do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

from octavo.grammar.pointers import Path, followed, objects_in

MAX_STATES = 250_000
"""Of one value: up to two seconds of work, and 300 MB."""
MAX_ALL_STATES = 500_000
"""Of all values of a schema."""
MAX_GROUPS = 20_000
"""Values that are looked at: a schema with more of them is left to the limit on its time."""
_DIGITS = 15
"""Of a divisor, from which on the engine refuses it by itself."""

_WORD = 2**32

Divisor = tuple[int, int]
"""Its digits as a number, without the zeros at its end, and how many these are (0 where there is a decimal point behind them)."""


def divisor_of(given: Any) -> Divisor:
    """(1, 0) for what is none."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given) or given <= 0:
        return 1, 0
    _, digits, exponent = Decimal(repr(given)).normalize().as_tuple()
    if len(digits) >= _DIGITS or not isinstance(exponent, int):
        return 1, 0
    return int("".join(map(str, digits))), max(0, exponent)


def states(divisors: Iterable[Divisor]) -> int:
    """How much it costs to keep to several divisors, in remainders: one with zeros at its end costs more than it has remainders."""
    listed = list(divisors)
    zeros = max((zeros for _, zeros in listed), default=0)
    return math.lcm(*(digits for digits, _ in listed)) * (10 * zeros * zeros or 1)


def too_many_states(schema: Any) -> tuple[Path, str] | None:
    """Where divisors cost too much, and what to say; None if nowhere."""
    if not any("multipleOf" in node for node in objects_in(schema)):
        return None
    total, counted = 0, set[frozenset[Divisor]]()
    for path, values in _values(schema):
        found = frozenset(divisor_of(part["multipleOf"]) for _, part in values if "multipleOf" in part)
        if len(found) > 1 and (place := _overflows(values)) is not None:
            return place, "this multipleOf and another of the same value are too large to be kept together. Use the larger one's multiple."
        if not found or found in counted:
            continue
        counted.add(found)
        cost = states(found)
        total += cost
        if cost > MAX_STATES:
            what = "its multipleOf has" if len(found) == 1 else f"its {len(found)} different multipleOf have, taken together,"
            return path, f"{what} too many digits: it would take {cost} states, and {MAX_STATES} are allowed. Use a rounder number."
        if total > MAX_ALL_STATES:
            return path, (
                f"this multipleOf and those before it would take more than {MAX_ALL_STATES} states. Use rounder numbers, or fewer "
                "different ones."
            )
    return None


def _overflows(values: list[tuple[Path, dict[str, Any]]]) -> Path | None:
    """Where the engine, which works out the least common multiple in 32 bits, would come to another one."""
    given = [(path, Decimal(repr(part["multipleOf"]))) for path, part in values if divisor_of(part.get("multipleOf")) != (1, 0)]
    for path, _ in given:
        together = [number for other, number in given if not _alternatives(path, other)]
        scale = min((min(0, int(number.normalize().as_tuple().exponent)) for number in together), default=0)
        whole = [int(number.scaleb(-scale)) for number in together]
        if len(set(whole)) > 1 and math.lcm(*whole) * max(whole) >= _WORD:
            return path
    return None


def _alternatives(one: Path, other: Path) -> bool:
    """Two schemas of one value of which only one must match."""
    at = next((i for i, steps in enumerate(zip(one, other, strict=False)) if steps[0] != steps[1]), 0)
    return at > 0 and one[at - 1] in ("anyOf", "oneOf") and isinstance(one[at], int)


def _values(schema: Any) -> Iterator[tuple[Path, list[tuple[Path, dict[str, Any]]]]]:
    """Every value that a text may have, as far as the schema names it: the path of the first of the schemas that speak of it, and all."""
    todo: list[tuple[Path, list[Any]]] = [((), [schema])]
    seen: set[frozenset[int]] = set()
    while todo and len(seen) < MAX_GROUPS:
        path, given = todo.pop()
        parts = _same_value(schema, path, given)
        key = frozenset(id(part) for _, part in parts)
        if not parts or key in seen:
            continue
        seen.add(key)
        yield next((place for place, part in parts if "multipleOf" in part), path), parts
        todo += _inside(parts)


def _same_value(schema: Any, path: Path, given: Iterable[Any]) -> list[tuple[Path, dict[str, Any]]]:
    """The schemas that speak of the value that `given` do: themselves, their alternatives, and what they refer to."""
    todo: list[tuple[Path, Any]] = [(path, part) for part in given]
    found: dict[int, tuple[Path, dict[str, Any]]] = {}
    while todo:
        place, part = todo.pop()
        if not isinstance(part, dict) or id(part) in found:
            continue
        found[id(part)] = place, part
        for key in ("allOf", "anyOf", "oneOf"):
            if isinstance(inner := part.get(key), list):
                todo += [((*place, key, i), one) for i, one in enumerate(inner)]
        if isinstance(reference := part.get("$ref"), str) and (reference == "#" or reference.startswith("#/")):
            target = followed((), schema, reference[1:])
            todo += [target] if target is not None else []
    return list(found.values())


def _inside(parts: list[tuple[Path, dict[str, Any]]]) -> list[tuple[Path, list[Any]]]:
    """The values inside a value: those of a property, or of a place in a list, under all schemas that speak of it."""
    groups: dict[tuple[str, str | int], tuple[Path, list[Any]]] = {}

    def add(key: tuple[str, str | int], place: Path, inner: Any) -> None:
        groups.setdefault(key, (place, []))[1].append(inner)

    for place, part in parts:
        for key in ("properties", "patternProperties"):
            if isinstance(named := part.get(key), dict):
                for name, inner in named.items():
                    add((key, name), (*place, key, name), inner)
        if isinstance(listed := part.get("prefixItems"), list):
            for i, inner in enumerate(listed):
                add(("prefixItems", i), (*place, "prefixItems", i), inner)
        for key in ("items", "additionalProperties"):
            if isinstance(part.get(key), dict):
                add((key, ""), (*place, key), part[key])
    return list(groups.values())
