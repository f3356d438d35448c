"""Grammars for replies that must call: tool_choice required or named. Those that may call are held to the grammars of `guard`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.frontend.parsing.formats import CallSyntax
from octavo.frontend.parsing.schemas import arguments_rule
from octavo.grammar.lark import inline_json, json_options, literal

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


def answer_or_calls(
    syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int], answer: str, *, most: int = MAX_CALLS
) -> str:
    """A grammar of an answer in JSON, or calls instead of it.

    Args:
        answer: the rule of that name, and those it needs.
    """
    if not syntax.is_json:
        calls = required_calls(syntax, tools, special, most=most)
        return f"{calls.replace('start: ', 'start: answer | ', 1)}\n{answer}"
    # An answer may begin like a call. The engine's lexer takes the longest that may come, and never goes back: so what both begin with has to
    # be in pieces that are the same for both, down to single brackets and strings.
    separator = "SEMICOLON" if ";" in syntax.separator else 'SPACE? "," SPACE?'
    calls = f"call ({separator} call){{0,{most - 1}}}" if most > 1 else "call"
    listed = f'"[" SPACE? {calls} SPACE? "]"'
    colon, comma = 'SPACE? ":" SPACE?', 'SPACE? "," SPACE?'
    bodies, rules = [], []
    for i, tool in enumerate(tools):
        rules.append(arguments_rule(i, tool))
        bodies.append(f"{_in_json(str(tool['name']))} {comma} {_in_json(syntax.arguments_key)} {colon} arguments_{i}")
    return "\n".join(
        [
            f"start: answer | {f'{listed} | call' if syntax.begin else calls}",
            f'call: "{{" SPACE? {_in_json("name")} {colon} ({" | ".join(bodies)}) SPACE? "}}"',
            r"SPACE: /[ \n\r\t]{1,40}/",
            *([r"SEMICOLON: /[ \n]{0,4};[ \n]{0,4}/"] if separator == "SEMICOLON" else []),
            *rules,
            answer,
        ]
    )


def any_object_but_a_call(tools: Sequence[Mapping[str, Any]]) -> str:
    """The rule `answer` of any JSON object that the parser does not read as a call of one of the tools."""
    names = " | ".join(_in_json(str(tool["name"])) for tool in tools)
    anything = inline_json({}, json_options())
    others = inline_json({"type": ["object", "array", "number", "boolean", "null"]}, json_options())
    return "\n".join(
        [
            'answer: "{" GAP? (member (GAP? "," GAP? member)* GAP?)? "}"',
            'member: OTHER_KEY GAP? ":" GAP? anything | NAME_KEY GAP? ":" GAP? (OTHER_NAME | no_text)',
            r"GAP: /[ \n\r\t]{1,40}/",
            r'TEXT_IN_JSON: /"([^"\\\x00-\x1f\x7f]|\\["\\\/bfnrt]|\\u[0-9a-fA-F]{4})*"/',
            r'NAME_KEY: "\"name\"" | "\"tool_name\"" | "\"function\""',
            r"OTHER_KEY: TEXT_IN_JSON & ~NAME_KEY & ~/.*\\u.*/",
            rf"OTHER_NAME: TEXT_IN_JSON & ~({names}) & ~/.*\\u.*/",
            f"anything: {anything}",
            f"no_text: {others}",
        ]
    )


def _in_json(text: str) -> str:
    """`text` as a JSON string, as part of a rule."""
    return json.dumps(json.dumps(text, ensure_ascii=False), ensure_ascii=False)


def _some(syntax: CallSyntax, special: Mapping[str, int], most: int) -> str:
    begin, end = literal(syntax.begin, special), literal(syntax.end, special)
    separator = literal(syntax.separator, special)
    more = f"({separator} call){{0,{most - 1}}}" if most > 1 else ""
    alone = " | call" if syntax.is_json and syntax.begin else ""  # which many models write without the brackets
    return f"{begin} call {more} {end}{alone}"


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
