"""How much a check of a grammar may cost, and which grammars are known to cost little.

Most are: a schema of some fields takes a millisecond or two, and is checked where it comes in. The engine's fuel does not bound
everything, though (see `divisors`), so what is not known to be cheap is checked in a process that can be
ended; and so is what turns out to need more than a quick check may take, or to be wrong: finding the place takes longer than the check.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from octavo.grammar.breadth import MAX_OPTIONAL
from octavo.grammar.divisors import Divisor, divisor_of, states
from octavo.grammar.json_schema import NOTES, parts_of
from octavo.grammar.library import llguidance
from octavo.protocol.params import StructuredOutputsParams

MAX_GRAMMAR_SIZE = 100_000
"""Symbols of a compiled grammar: 8 for a property, 4 if it is required, 1 for a list or object in an `enum`."""
STEP_ITEMS = 10_000
"""Items of the parser that looking at the next token may add: what makes an ambiguous grammar slow (20 to 60 ms for so many). Every schema of
the test suite, and every tool of real APIs, does with 2,000."""
STEP_ITEMS_OF_EACH = 1000
"""More for each that may come next at one place of a JSON text: 310 are needed with vocabularies of 128,000 to 262,000 tokens. These take
less time than those of ambiguous grammars: 5 to 15 ms for 480 properties, all of which may be left out."""
ROW_ITEMS = 2000
ROW_ITEMS_OF_EACH = 5
"""The same for entries at one place of the text. Four are needed."""
MAX_BREADTH = 2 * MAX_OPTIONAL


class NeedsMore(Exception):
    """A quick check cannot tell: it reached its limits, or something is wrong with the grammar."""


@dataclass(frozen=True)
class Effort:
    """Limits of the grammar engine."""

    quick: bool
    lexer_fuel: int
    step_fuel: int
    items: int
    lexer_states: int
    symbols: int

    def limits(self, breadth: int = 0) -> Any:
        """
        Args:
            breadth: of the JSON schemas in the grammar, see `breadth`.
        """
        breadth = 0 if self.quick else min(breadth, MAX_BREADTH)
        return llguidance().LLParserLimits(
            initial_lexer_fuel=self.lexer_fuel,
            step_lexer_fuel=self.step_fuel,
            step_max_items=self.items + STEP_ITEMS_OF_EACH * breadth,
            max_items_in_row=ROW_ITEMS + ROW_ITEMS_OF_EACH * breadth,
            max_lexer_states=self.lexer_states,
            max_grammar_size=self.symbols,
            verbose_errors=False,
        )


FULL = Effort(False, 1_000_000, 200_000, STEP_ITEMS, 50_000, MAX_GRAMMAR_SIZE)
"""A second or two to build, a tenth to step; tens of MB. (What takes more for its size: `size`.)"""
QUICK = Effort(True, 20_000, 20_000, 1_000, 5_000, 10_000)
"""Some milliseconds."""

CHEAP_CHARS = 32_768
CHEAP_PARTS = 1000
CHEAP_PROPERTIES = 300
CHEAP_COUNT = 10_000
CHEAP_NUMBER = 1e15
CHEAP_PATTERN = 200
CHEAP_STATES = 1000
"""Of all divisors together."""
CHEAP_RULES = 8192
"""Characters of a grammar besides the schemas in it."""
_COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems"))
_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_PLAIN = frozenset(
    (
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "prefixItems",
        "enum",
        "const",
        "anyOf",
        "allOf",
        "format",
        "nullable",
    )
)
_CHEAP = NOTES | _COUNTS | _NUMBERS | _PLAIN | {"$ref", "$defs", "definitions", "x-guidance", "multipleOf"}
"""Keywords that cost little."""
_COUNTED = re.compile(r"\{\d*,?\d{2,}")
_OPERATORS = re.compile(r"[&~]|%regex|%lark|\{\d*,?\d{3}")


def cheap(wish: StructuredOutputsParams) -> bool:
    """Whether a check of `wish` is known to take no more than milliseconds."""
    if wish.whitespace_pattern is not None:
        return False
    if wish.json_object is not None:
        return True
    if wish.json is not None:
        return isinstance(wish.json, dict) and cheap_schema(wish.json)
    if wish.choice is not None:
        texts = wish.choice
        return isinstance(texts, list) and len(texts) <= CHEAP_PARTS and sum(len(t) for t in texts if isinstance(t, str)) <= CHEAP_CHARS
    if wish.regex is not None:
        return isinstance(wish.regex, str) and len(wish.regex) <= CHEAP_PATTERN and not _COUNTED.search(wish.regex)
    return isinstance(wish.grammar, str) and len(wish.grammar) <= 2 * CHEAP_CHARS  # it is looked at when its parts are known


def cheap_rules(text: str, schemas: list[Any]) -> bool:
    """The same of a grammar in Lark.

    Args:
        text: without the schemas in it.
    """
    return len(text) <= CHEAP_RULES and not _OPERATORS.search(text) and cheap_schema({"anyOf": schemas})


def cheap_schema(schema: Any) -> bool:
    """The same of a JSON schema."""
    properties = characters = 0
    divisors: set[Divisor] = set()
    for parts, (_, node) in enumerate(parts_of(schema), 1):
        named, listed = node.get("properties"), [*_values(node, "enum"), node.get("const")]
        properties += len(named) if isinstance(named, dict) else 0
        characters += sum(map(len, node)) + sum(len(str(value)) for value in listed if not isinstance(value, dict | list))
        if isinstance(named, dict):
            characters += sum(map(len, named))
        if "multipleOf" in node:
            divisors.add(divisor_of(node["multipleOf"]))
        if (
            not node.keys() <= _CHEAP
            or any(isinstance(value, dict | list) for value in listed)
            or len(_values(node, "allOf")) > 1
            or any(not isinstance(node.get(key, 0), int) or node.get(key, 0) > CHEAP_COUNT for key in _COUNTS)
            or any(not isinstance(node.get(key, 0), int | float) or abs(node.get(key, 0)) > CHEAP_NUMBER for key in _NUMBERS)
            or states(divisors) > CHEAP_STATES
            or parts > CHEAP_PARTS
            or properties > CHEAP_PROPERTIES
            or characters > CHEAP_CHARS
        ):
            return False
    return True


def _values(node: dict[str, Any], key: str) -> list[Any]:
    values = node.get(key)
    return values if isinstance(values, list) else []
