"""Grammars in GBNF (`root ::= ...`), which are put into Lark wherever a grammar may be given: the engine knows no other form."""

from __future__ import annotations

import re

from octavo.errors import InvalidRequest
from octavo.grammar.library import llguidance, one_line

MAX_GBNF_RULES = 1000
"""Converting them takes a time that grows with their square: a second for so many."""


_PIECES = re.compile(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\)')
_REPEATED = re.compile(r"\s*[*+?{]")


def _with_groups(text: str) -> str:
    """The same grammar, of which the converter keeps all brackets: it drops those around a single item that is repeated, as in ("a"+)*."""
    parts, at = [], 0
    for found in _PIECES.finditer(text):
        if found.group() == ")" and _REPEATED.match(text, found.end()) and text[: found.start()].rstrip()[-1:] in tuple("*+?}"):
            parts += [text[at : found.start()], ' ""']
            at = found.start()
    return "".join([*parts, text[at:]])


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
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        converted: str = any_to_lark(_with_groups(text))
    except RecursionError:
        raise InvalidRequest(f"{what} cannot be read: its brackets are nested too deep; 200 levels are fine.", param=param) from None
    except Exception as e:  # the converter has errors of many classes
        raise InvalidRequest(f"{what} cannot be read: {one_line(str(e))}", param=param) from None
    return converted
