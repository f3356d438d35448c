"""Numbers of a schema that the engine cannot hold as they are: it reads all of them as doubles, and ranges of integers as 64 bits.

Bounds are moved inwards, to the next number that it holds: what keeps to those keeps to the schema, and what is lost is a few numbers at the
edge. A value that must be met exactly, and a bound that leaves nothing, cannot be helped. (A range of nothing but the smallest of 64 bits even
ends the engine's process.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, cast

from octavo.grammar.pointers import objects_in

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
EXACT = 2**53
"""Up to here every integer is a double, and is written as it was given."""
FARTHEST = 2**63 - 1024
"""The last double before the end of 64 bits."""
DIGITS = 15
"""So many of a number are the same after it was a double."""
PLACES = 22
"""Behind the point: so far powers of ten are doubles."""


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def exact(value: int | float) -> bool:
    """Whether the engine writes this number, and no other that is near."""
    if abs(value) > EXACT:
        return False
    if isinstance(value, int):
        return True
    if abs(value) >= 10**DIGITS:  # it writes a digit behind the point, which is one too many
        return False
    _, digits, exponent = _decimal(value).normalize().as_tuple()
    return len(digits) <= DIGITS and isinstance(exponent, int) and exponent >= -PLACES


def bounds(node: dict[str, Any]) -> dict[str, int | float | None]:
    """The bounds of a schema as they can be held: as good as equal, and no wider. None: that one cannot be."""
    held = _held(node)
    return held | _beyond_whole(held)


def _held(node: dict[str, Any]) -> dict[str, int | float | None]:
    """Of each bound the nearest number that the engine holds."""
    held: dict[str, int | float | None] = {}
    for up, (plain, exclusive) in ((True, ("minimum", "exclusiveMinimum")), (False, ("maximum", "exclusiveMaximum"))):
        if is_number(node.get(plain)):
            held[plain] = _bound(node[plain], up)
        if not is_number(node.get(exclusive)):
            continue
        if abs(node[exclusive]) < EXACT:
            held[exclusive] = _bound(node[exclusive], up)
        elif (beyond := _bound(node[exclusive], up, beyond=True)) is None:
            held[exclusive] = None
        else:  # one more or less would be the same double: the next is a bound of its own
            other = held.get(plain)
            held[plain] = beyond if other is None else (max if up else min)(beyond, other)
    return held


def _beyond_whole(held: dict[str, int | float | None]) -> dict[str, float]:
    """Exclusive bounds moved inwards by a last digit, where the engine would let them in: whole ones, if the other bound is a fraction behind
    the same whole number, as in 0 < x <= 0.5."""
    moved = {}
    for exclusive, others, up in (("exclusiveMinimum", BOUNDS[2:], True), ("exclusiveMaximum", BOUNDS[:2], False)):
        bound = held.get(exclusive)
        ends = [end for key in others if (end := held.get(key)) is not None]
        if bound is None or bound != int(bound) or not any(end != int(end) == bound for end in ends):
            continue
        inwards = Decimal(1 if up else -1)
        beside = Decimal(int(bound)).next_toward(inwards * 2**64, Context(DIGITS)) if bound else inwards.scaleb(-PLACES)
        moved[exclusive] = float(beside)
    return moved


def _bound(value: int | float, up: bool, *, beyond: bool = False) -> int | float | None:
    """The first number that can be held from `value` on (or beyond it): upwards for a lower bound."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if not -FARTHEST <= value <= FARTHEST:
        if (value > 0) == up:
            return None
        value, beyond = (-FARTHEST if up else FARTHEST), False
    inwards = Context(DIGITS, ROUND_CEILING if up else ROUND_FLOOR)
    if abs(value) <= EXACT and not beyond:
        places = Decimal(1).scaleb(-PLACES)
        return value if exact(value) else float(_decimal(value).normalize(inwards).quantize(places, inwards.rounding, Context(60)))
    # Integers are compared with the double itself, other numbers with its shortest decimal: both have to be on the right side.
    edge = Decimal(int(value)) + ((1 if up else -1) if beyond else 0)
    near = edge.normalize(inwards)
    for _ in range(40):
        double = float(near)
        if all((n >= near) if up else (n <= near) for n in (Decimal(double), _decimal(double))):
            return int(near) if abs(double) <= FARTHEST else None
        near = near.next_plus(inwards) if up else near.next_minus(inwards)
    return None


def listed(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numbers that a text must meet exactly, in `const` and `enum`, however deep inside of a value; each with its keyword."""
    todo = [(key, node[key]) for key in ("const", "enum") if key in node]
    while todo:
        key, value = todo.pop()
        if isinstance(value, dict):
            todo += [(key, inner) for inner in value.values()]
        elif isinstance(value, list):
            todo += [(key, inner) for inner in value]
        elif is_number(value):
            yield key, value


def number_problem(node: dict[str, Any]) -> tuple[str, str] | None:
    """The keyword with a number that cannot be held, and what to say."""
    for key, value in listed(node):
        if not exact(value):
            return key, (
                f"the number {_short(value)} cannot be met exactly; numbers are held up to {EXACT} and to {DIGITS} digits. "
                "Give it as a string, or leave it out."
            )
    held = _held(node)
    for key in BOUNDS:
        if is_number(node.get(key)) and held.get(key) != node[key]:
            return (
                key,
                f"{_short(node[key])} cannot be held; numbers are held up to {FARTHEST} (exclusive bounds below {EXACT}) and to {DIGITS} digits.",
            )
    for key, value in _beyond_whole(held).items():
        return key, f"{_short(node[key])} would not be left out, next to a bound behind the same whole number; use {value!r}."
    return None


_MAY_BE_SMALLEST = re.compile(r"-\d{19}|-\d[\d.]*[eE]")


def smallest(source: str, schemas: Callable[[str], Iterable[Any]]) -> int | float | None:
    """A number with which the engine ends the process, wherever in a grammar it stands: a reference may lead to places where no schema is
    looked for. None if there is none.

    Args:
        schemas: those in a grammar.
    """
    if _MAY_BE_SMALLEST.search(source) is None:
        return None
    for node in (node for schema in schemas(source) for node in objects_in(schema)):
        for value in [*(number for _, number in listed(node)), *(node[key] for key in BOUNDS if is_number(node.get(key)))]:
            if value < -FARTHEST:
                return cast("int | float", value)
    return None


def _short(value: int | float) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:20]}… ({len(text)} digits)"


def _decimal(value: int | float) -> Decimal:
    return Decimal(repr(value))
