"""How much a check of a grammar may cost, and which grammars are known to cost little.

Most are: a schema of some fields takes a millisecond or two, and is checked where it comes in. The engine's fuel does not bound
everything, though (see `divisors`), so what is not known to be cheap is checked in a process that can be
ended; and so is what turns out to need more than a quick check may take, or to be wrong: finding the place takes longer than the check.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from octavo.grammar.divisors import Divisor, divisor_of, states
from octavo.grammar.json_schema import NOTES, parts_of
from octavo.grammar.library import llguidance
from octavo.grammar.rules import parts_of as grammar_parts
from octavo.protocol.params import StructuredOutputsParams

MAX_GRAMMAR_SIZE = 100_000
"""Symbols of a compiled grammar: 8 for a property, 4 if it is required, 1 for a list or object in an `enum`."""
STEP_ITEMS = 10_000
"""Items of the parser that looking at the next token may add: what makes an ambiguous grammar slow (20 to 60 ms for so many). Every schema of
the test suite, and every tool of real APIs, does with 2,000."""
ITEMS_OF_OPTION = 300
"""As many more for each property that may be left out: each is an entry of its own wherever a token ends the one before. So many are quick (2 ms
for the masks of an object of 480)."""
MOST_OPTIONS = 480
"""Of all that are counted."""
_FEW_CHARS = 2000
"""A grammar of fewer has no need of more items."""


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

    def limits(self, more_items: int = 0) -> Any:
        return llguidance().LLParserLimits(
            initial_lexer_fuel=self.lexer_fuel,
            step_lexer_fuel=self.step_fuel,
            step_max_items=self.items + more_items,
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


def items_of_options(source: str) -> int:
    """How many more items a step of a grammar may take, for the properties in it that may be left out.

    Args:
        source: as the engine takes it.
    """
    if len(source) < _FEW_CHARS:
        return 0
    options = 0
    for grammar in json.loads(source).get("grammars", ()) if source.lstrip().startswith("{") else ():
        schemas = [grammar.get("json_schema")]
        if isinstance(text := grammar.get("lark_grammar"), str):
            schemas += [schema for _, schema in grammar_parts(text).schemas]
        for _, node in (part for schema in schemas for part in parts_of(schema)):
            properties, required = node.get("properties"), node.get("required")
            if isinstance(properties, dict):
                options += len(properties) - len(required if isinstance(required, list) else ())
    return ITEMS_OF_OPTION * min(MOST_OPTIONS, max(0, options))
