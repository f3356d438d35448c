"""Numbers of a schema that the engine cannot hold as they are: it reads all of them as doubles, and ranges of integers as 64 bits.

Bounds are moved inwards, to the next number that it holds: what keeps to those keeps to the schema, and what is lost is a few numbers at the
edge. A value that must be met exactly, and a bound that leaves nothing, cannot be helped. (A range of nothing but the smallest of 64 bits even
ends the engine's process.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
EXACT = 2**53
"""Up to here every integer is a double, and is written as it was given."""
FARTHEST = 2**63 - 1024
"""The last double before the end of 64 bits."""
DIGITS = 15
"""So many of a number are the same after it was a double."""
SMALLEST = 1e-300


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def exact(value: int | float) -> bool:
    """Whether the engine writes this number, and no other that is near."""
    if abs(value) > EXACT:
        return False
    return isinstance(value, int) or value == 0 or (abs(value) >= SMALLEST and len(_decimal(value).normalize().as_tuple().digits) <= DIGITS)


def bounds(node: dict[str, Any]) -> dict[str, int | float | None]:
    """The bounds of a schema as they can be held: as good as equal, and no wider. None: that one cannot be."""
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


def _bound(value: int | float, up: bool, *, beyond: bool = False) -> int | float | None:
    """The first number that can be held from `value` on (or beyond it): upwards for a lower bound."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if not -FARTHEST <= value <= FARTHEST:
        return None if (value > 0) == up else (-FARTHEST if up else FARTHEST)
    if abs(value) <= EXACT and not beyond:
        return value if exact(value) else float(_decimal(value).normalize(Context(DIGITS, ROUND_CEILING if up else ROUND_FLOOR)))
    near = float(value)
    if beyond or (near < value if up else near > value):
        near = math.nextafter(near, math.inf if up else -math.inf)
    return int(near) if abs(near) <= FARTHEST else None


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
    held = bounds(node)
    for key in BOUNDS:
        if is_number(node.get(key)) and held.get(key) != node[key]:
            return (
                key,
                f"{_short(node[key])} cannot be held; numbers are held up to {FARTHEST} (exclusive bounds below {EXACT}) and to {DIGITS} digits.",
            )
    return None


def _short(value: int | float) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:20]}… ({len(text)} digits)"


def _decimal(value: int | float) -> Decimal:
    return Decimal(repr(value))
