"""Grammars in GBNF (`root ::= ...`), which are put into Lark wherever a grammar may be given: the engine knows no other form."""

from __future__ import annotations

from typing import Any

from octavo.errors import InvalidRequest
from octavo.grammar.library import llguidance, one_line

MAX_GBNF_RULES = 1000
"""Converting them takes a time that grows with their square: a second for so many."""


def is_gbnf(text: str) -> bool:
    return "::=" in text


def in_lark(text: str, what: str, param: str) -> str:
    """The same grammar in Lark.

    Args:
        what: the name of the grammar in the request, for error messages.

    Raises:
        InvalidRequest: it has too many rules, or cannot be read.
    """
    if text.count("::=") > MAX_GBNF_RULES:
        raise InvalidRequest(f"{what} has more than {MAX_GBNF_RULES} rules in GBNF. Use fewer, or write it in Lark.", param=param)
    llguidance()  # says what to install where it is missing
    from llguidance import gbnf_to_lark as converter

    try:
        if converter.is_lark_syntax(text):
            return text
        rules = converter.GrammarParser().parse(text)
        converter.resolve(rules)
        return "\n".join(["%llguidance {}", *(f"{rule.name}: {_body(rule.alternatives)}" for rule in _in_order(rules))])
    except RecursionError:
        raise InvalidRequest(f"{what} cannot be read: its brackets are nested too deep; 200 levels are fine.", param=param) from None
    except Exception as e:  # the converter has errors of many classes
        raise InvalidRequest(f"{what} cannot be read: {one_line(str(e))}", param=param) from None


def _in_order(rules: dict[str, Any]) -> list[Any]:
    """As they were given: renaming moves them to the end."""
    return sorted(rules.values(), key=lambda rule: rule.order)


def _body(node: Any, *, inside: bool = False) -> str:
    """A part of a rule, in Lark. The converter's own writing loses the brackets around a repetition that is repeated.

    Args:
        inside: of a sequence or a repetition, where alternatives need brackets.
    """
    kind = type(node).__name__
    if kind == "AlternativeNode":
        text = " | ".join(_body(part) for part in node.alternatives)
        return f"({text})" if inside else text
    if kind == "SequenceNode":
        return " ".join(_body(part, inside=True) for part in node.nodes) or '""'
    if kind == "RepetitionNode":
        least, most = node.min_times, node.max_times
        count = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most), f"{{{least},{'' if most is None else most}}}")
        single = type(node.node).__name__ in ("LiteralNode", "RegexNode", "RuleRefNode")
        return f"{_body(node.node)}{count}" if single else f"({_body(node.node)}){count}"
    return str(node)
