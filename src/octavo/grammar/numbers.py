"""Numbers in a schema that the grammar engine would keep only roughly: it holds them as doubles.

An identifier of 64 bits would come back as another one. Such a number is refused, with its path; where a schema is only followed as far as
it goes, the keyword says no more than can be kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from octavo.grammar.pointers import Path

EXACT = 2**53
"""Whole numbers up to here are doubles, each of them."""
MAX_BOUND = 2**63 - 1
MAX_OPEN_BOUND = 10**18 - 1
"""Where the other side is open."""
_POWERS = 22
"""Powers of ten up to here are doubles: a number of few digits times or by one of them is read without an error."""
_DIGITS = 15
_COEFFICIENTS = 2**32
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_VALUES = ("const", "enum")

_TOO_FINE = "has more digits than can be kept exactly (15 always can, and whole numbers up to 9007199254740992)"


def unkept_number(node: dict[str, Any]) -> tuple[Path, str] | None:
    """Where a schema by itself, without those inside it, has a number that would not be kept, and what to say; None if nowhere."""
    for key in _VALUES:
        if key in node:
            for path, value in _numbers(node[key], (key,)):
                if not _written_exactly(value):
                    return path, f"{_shown(value)} {_TOO_FINE}: the reply would have another value. Give it as a string."
    for key in BOUNDS:
        if problem := _bound_problem(key, node.get(key)):
            return (key,), problem
    if not _divides_exactly(node.get("multipleOf")):
        return ("multipleOf",), f"{_shown(node['multipleOf'])} {_TOO_FINE}. Use a rounder number."
    return None


def ends_the_process(node: dict[str, Any]) -> bool:
    """A schema, if this is one, has a whole number that the engine would negate without end, until its stack is full."""
    numbers = [number for key in _VALUES for _, number in _numbers(node.get(key), ())]
    numbers += [node[key] for key in BOUNDS if isinstance(node.get(key), int | float)]
    return any(number < -MAX_BOUND for number in numbers)


def loosened(node: dict[str, Any]) -> dict[str, Any]:
    """A schema, by itself, that says what can be kept of what it says."""
    result: dict[str, Any] = {}
    choices: list[list[dict[str, Any]]] = []
    for key, value in node.items():
        if key in BOUNDS:
            if _bound_problem(key, value) or (isinstance(value, int) and abs(value) > MAX_OPEN_BOUND):
                continue
        elif key == "multipleOf":
            if not _divides_exactly(value):
                continue
        elif key in _VALUES and not all(_written_exactly(number) for _, number in _numbers(value, ())):
            values = [value] if key == "const" else value if isinstance(value, list) else [value]
            fine = [one for one in values if all(_written_exactly(number) for _, number in _numbers(one, ()))]
            rough = {_kind(one): None for one in values if one not in fine}
            choices.append([*([{"enum": fine}] if fine else []), *({"type": kind} for kind in rough)])
            continue
        result[key] = value
    for choice in choices:
        if "anyOf" not in result:
            result["anyOf"] = choice
        elif isinstance(parts := result.get("allOf", []), list):
            result["allOf"] = [*parts, {"anyOf": choice}]
    return result


def _numbers(value: Any, path: Path) -> Iterator[tuple[Path, int | float]]:
    """All numbers in a JSON value, each with its path."""
    todo = [(path, value)]
    while todo:
        place, node = todo.pop()
        if isinstance(node, dict):
            todo += [((*place, name), inner) for name, inner in node.items()]
        elif isinstance(node, list):
            todo += [((*place, i), inner) for i, inner in enumerate(node)]
        elif isinstance(node, int | float) and not isinstance(node, bool):
            yield place, node


def _written_exactly(value: int | float) -> bool:
    """A text held to this value has this value."""
    if isinstance(value, float):
        return _read_exactly(value)
    if value == MAX_BOUND or abs(value) <= EXACT:
        return True
    if not _is_double(value) or value == -MAX_BOUND - 1:
        return False
    return abs(value) <= MAX_BOUND or Decimal(repr(float(value))) == value  # written with zeros behind the digits that tell doubles apart


def _bound_problem(key: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""  # as older drafts have it, or nothing at all
    if not abs(value) <= MAX_BOUND:
        return f"{_shown(value)} is out of the range that can be kept: bounds go from -{MAX_BOUND} to {MAX_BOUND}. Leave it out."
    if value == MAX_BOUND:
        exact = key == "maximum"  # of whole numbers; for others the engine says that it is too large
    else:
        exact = _read_exactly(value) if isinstance(value, float) else _is_double(value) and Decimal(repr(float(value))) == value
    if not exact:
        return f"{_shown(value)} {_TOO_FINE}. Use a rounder number."
    if key.startswith("exclusive") and abs(value) >= EXACT:
        return f"{_shown(value)} is too large for a bound that is excluded: up to {EXACT - 1}. Use {key[9:].lower()} instead."
    return ""


def _divides_exactly(value: Any) -> bool:
    """The engine, which looks for the number of decimals by multiplying, comes to this number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return True  # nothing that it divides by
    if value >= _COEFFICIENTS:
        return False
    double, decimals = float(value), 0
    while not double.is_integer():
        double, decimals = 10 * double, decimals + 1
    return double < _COEFFICIENTS and Decimal(int(double)).scaleb(-decimals) == Decimal(repr(value))


def _is_double(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _read_exactly(value: float) -> bool:
    """The engine reads the digits of this double as this double."""
    if not math.isfinite(value):
        return True  # which no JSON can hold: said elsewhere
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    if abs(value) > EXACT and Decimal(value) != Decimal(repr(value)):
        return False  # digits of a whole number that is not the double
    return isinstance(exponent, int) and abs(exponent) <= _POWERS and len(digits) <= _DIGITS


def _kind(value: Any) -> str:
    if isinstance(value, dict | list):
        return "object" if isinstance(value, dict) else "array"
    return "integer" if isinstance(value, int) or (isinstance(value, float) and value.is_integer()) else "number"


def _shown(value: int | float) -> str:
    """Digits without end say nothing, and of some thousand none can be had."""
    return repr(value) if isinstance(value, float) or abs(value) < 10**40 else "a number of more than 40 digits"
