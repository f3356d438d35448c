"""Reading grammars that users wrote, as far as is needed to speak of them: JSON schemas inside, rules that never end, rules of GBNF.

Nothing is refused here because it cannot be read: the engine says so, or there was nothing to say.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from octavo.grammar.unkept import string_options

_EMBEDDED = re.compile(r"%json\s*(?=\{)")


@dataclass(frozen=True)
class Parts:
    """A grammar in Lark, taken apart."""

    rest: str
    """What is besides the schemas."""
    schemas: list[tuple[int, Any]] = field(default_factory=list)
    """The JSON schemas in it, each with the number of its line."""


def parts_of(text: str) -> Parts:
    schemas: list[tuple[int, Any]] = []
    rest: list[str] = []
    decoder, at = json.JSONDecoder(), 0
    while (found := _EMBEDDED.search(text, at)) is not None:
        try:
            schema, end = decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError):
            rest.append(text[at : found.end()])
            at = found.end()
            continue
        schemas.append((text.count("\n", 0, found.start()) + 1, schema))
        rest.append(text[at : found.start()] + " %json ")
        at = end
    rest.append(text[at:])
    return Parts("".join(rest), schemas)


def schemas_in(source: str) -> list[Any]:
    """The JSON schemas in a grammar as the engine takes it."""
    if not source.lstrip().startswith("{"):
        return [schema for _, schema in parts_of(source).schemas]
    try:
        document = json.loads(source)
    except (ValueError, RecursionError):  # the engine will say so
        return []
    found: list[Any] = []
    grammars = document.get("grammars")
    for grammar in grammars if isinstance(grammars, list) else ():
        if isinstance(grammar, dict) and grammar.get("json_schema") is not None:
            found.append(grammar["json_schema"])
        if isinstance(grammar, dict) and isinstance(text := grammar.get("lark_grammar"), str):
            found += [schema for _, schema in parts_of(text).schemas]
    return found


def with_string_options(text: str) -> str:
    """A grammar whose schemas spell their strings as `unkept` has it, unless they have options of their own."""
    decoder, pieces, at = json.JSONDecoder(), [], 0
    for found in _EMBEDDED.finditer(text):
        if found.end() < at:
            continue
        try:
            schema, end = decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue
        options = string_options(schema)
        if options and "x-guidance" not in schema:
            pieces += [text[at : found.end()], f'{{"x-guidance": {json.dumps(options)}, ']
            at = found.end() + 1
            pieces.append(text[at:end])
            at = end
    return "".join([*pieces, text[at:]])


# Rules that never end

_DEFINITION = re.compile(r"^[ \t]*[?!]?([A-Za-z_][A-Za-z0-9_]*)[ \t]*(?:\[[^\]\n]*\]|\.\d+)*[ \t]*:", re.MULTILINE)
_TOKEN = re.compile(
    r"""\s+|//[^\n]*|(?P<text>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[imslux]*|<[^>\n]*>|%json)"""
    r"""|(?P<name>[a-z_][a-z0-9_]*)|(?P<terminal>[A-Z_][A-Z0-9_]*)|(?P<free>[?*]|\{0?,\d*\})|(?P<many>[+]|\{\d+(?:,\d*)?\}|~\d+(?:\.\.\d+)?)"""
    r"""|(?P<mark>[()\[\]|])|(?P<dots>\.\.)"""
)
_DIRECTIVE = re.compile(r"^[ \t]*%(?!json)\w.*$", re.MULTILINE)
MAX_DEFINITIONS = 2000
MAX_BRACKETS = 50


def never_ends(text: str) -> str:
    """The first rule of a grammar in Lark, beginning at `start`, that no finite text can match since it always needs itself; "" if there is
    none on the way, or the grammar cannot be read here."""
    found = list(_DEFINITION.finditer(text))
    if not found or len(found) > MAX_DEFINITIONS:
        return ""
    bodies: dict[str, str] = {}
    for this, after in zip(found, [*found[1:], None], strict=True):
        if this.group(1) in bodies:
            return ""
        bodies[this.group(1)] = text[this.end() : len(text) if after is None else after.start()]
    needs: dict[str, list[list[str]]] = {}
    for name, body in bodies.items():
        if name.upper() == name:
            continue
        alternatives = _alternatives(_DIRECTIVE.sub("", body))
        if alternatives is None:
            return ""
        needs[name] = alternatives
    fine: set[str] = set()
    while True:
        more = {n for n, ways in needs.items() if n not in fine and any(all(m in fine or m not in needs for m in way) for way in ways)}
        if not more:
            break
        fine |= more
    return "" if "start" not in needs or "start" in fine else "start"


def _alternatives(body: str) -> list[list[str]] | None:
    """The rules that each alternative of a body needs; None if it cannot be read. A group is spelled out as what its best way needs, which is
    not known yet: so a group counts as what all of its ways need in common."""
    stack: list[list[list[str]]] = [[[]]]
    last: list[list[str] | None] = [None]
    at = 0
    while at < len(body):
        found = _TOKEN.match(body, at)
        if found is None:
            return None
        at = found.end()
        kind, value = found.lastgroup, found.group()
        if kind == "name":
            stack[-1][-1].append(value)
            last[-1] = [value]
        elif kind in ("text", "terminal", "dots"):
            last[-1] = []
        elif kind == "free" and last[-1] is not None:
            for name in last[-1]:
                stack[-1][-1].remove(name)
            last[-1] = None
        elif value == "|":
            stack[-1].append([])
            last[-1] = None
        elif value in "([" and len(value) == 1:
            if len(stack) > MAX_BRACKETS:
                return None
            stack.append([[]])
            last.append(None)
        elif value in ")]" and len(value) == 1:
            if len(stack) == 1:
                return None
            ways = stack.pop()
            last.pop()
            common = [] if value == "]" else [name for name in dict.fromkeys(ways[0]) if all(name in way for way in ways)]
            stack[-1][-1] += common
            last[-1] = common
    return stack[0] if len(stack) == 1 else None


# GBNF

_GBNF_RULE = re.compile(r"^[ \t]*([A-Za-z0-9_-]+)[ \t]*::=", re.MULTILINE)
_LARK_RULE = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*):", re.MULTILINE)
_PLACE = re.compile(r"^(?:at )?(\d+)\(\d+\): ")
_QUOTE = re.compile(r" \d+ \| ")


def in_gbnf(problem: str, given: str, converted: str) -> str:
    """What the engine says of a grammar that was converted, about the one that was given: it names a place that the user never saw."""
    said = _QUOTE.split(problem, maxsplit=1)[0]
    place = _PLACE.match(said)
    if place is None:
        return said
    said = said[place.end() :]
    theirs, ours = list(_GBNF_RULE.finditer(given)), list(_LARK_RULE.finditer(converted))
    before = [rule for rule in ours if converted.count("\n", 0, rule.start()) < int(place.group(1))]
    if len(theirs) != len(ours) or not before:
        return said
    rule = theirs[len(before) - 1]
    return f"in the rule {rule.group(1)!r} (line {given.count(chr(10), 0, rule.start(1)) + 1}): {said}"
