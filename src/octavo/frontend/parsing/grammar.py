"""Grammars for replies that must call: tool_choice required or named. Those that may call are held to the grammars of `guard`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.frontend.parsing.formats import CallSyntax
from octavo.frontend.parsing.schemas import arguments_rule
from octavo.grammar.lark import literal

MAX_CALLS = 64
"""Most calls of one reply that must have some: a model that is made to call might never stop."""


def required_calls(syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int], *, most: int = MAX_CALLS) -> str:
    """A grammar of at least one call.

    Args:
        tools: "function" objects: name, parameters, strict.
        special: special tokens by their text.
        most: calls allowed.
    """
    rules = _call_rules(syntax, tools, special)
    return "\n".join([f"start: {_some(syntax, special, most)}", *rules])


def _some(syntax: CallSyntax, special: Mapping[str, int], most: int) -> str:
    begin, end = literal(syntax.begin, special), literal(syntax.end, special)
    separator = literal(syntax.separator, special)
    more = f"({separator} call){{0,{most - 1}}}" if most > 1 else ""
    return f"{begin} call {more} {end}"


def _call_rules(syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int]) -> list[str]:
    rules = [f"call: {literal(syntax.before, special)} call_body"]
    bodies = []
    for i, tool in enumerate(tools):
        name = str(tool["name"])
        if syntax.before.endswith('"'):  # it stands in a JSON string
            name = json.dumps(name, ensure_ascii=False)[1:-1]
        rules.append(arguments_rule(i, tool))
        bodies.append(f"{literal(name)} {literal(syntax.between, special)} arguments_{i} {literal(syntax.after, special)}")
    rules.append("call_body: " + " | ".join(bodies))
    return rules
