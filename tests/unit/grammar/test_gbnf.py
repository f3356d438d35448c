"""Grammars in GBNF mean the same once they are in Lark."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.grammar.source import grammar_source
from octavo.protocol.params import StructuredOutputsParams
from tests.support.grammars import matches


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= ("a"+)+', ["a", "aaa"], ["", "b"]),
        ('root ::= ("a"*)*', ["", "aa"], ["b"]),
        ('root ::= ("ab"{2}){2}', ["abababab"], ["abab"]),
        ('root ::= ("a"{2})?', ["", "aa"], ["a"]),
        ('root ::= ("a"{1,2}){1,2}', ["a", "aaaa"], ["", "aaaaa"]),
        ('root ::= (("a"{2}))+ "." | [x-z]{2,}', ["aaaa.", "xyz"], ["aaa.", "x"]),
        ("root ::= my-part+ (tail | \"c\" 'd')*".replace("'", '"') + '\nmy-part ::= ("a" | "b"{2}){2}\ntail ::= "z"', ["abbcdz"], ["ab"]),
        ('root ::= ( | "a") "b" # nothing, or a', ["b", "ab"], ["a"]),
    ],
)
def test_groups_that_are_repeated(grammar: str, right: list[str], wrong: list[str]) -> None:
    source = grammar_source(StructuredOutputsParams(grammar=grammar))
    assert [matches(source, text) for text in right] == [True] * len(right)
    assert [matches(source, text) for text in wrong] == [False] * len(wrong)


def _grown(inner: st.SearchStrategy[tuple[str, str]]) -> st.SearchStrategy[tuple[str, str]]:
    """A part of a rule, and the same as a regular expression."""
    many = st.lists(inner, min_size=1, max_size=3)
    counts = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{1,}"])
    return st.one_of(
        many.map(lambda parts: ("(" + " ".join(p for p, _ in parts) + ")", "(?:" + "".join(r for _, r in parts) + ")")),
        many.map(lambda parts: ("(" + " | ".join(p for p, _ in parts) + ")", "(?:" + "|".join(r for _, r in parts) + ")")),
        st.tuples(inner, counts).map(lambda both: (f"({both[0][0]}){both[1]}", f"(?:{both[0][1]}){both[1]}")),
    )


PARTS = st.recursive(st.sampled_from([('"a"', "a"), ('"b"', "b"), ("[ab]", "[ab]")]), _grown, max_leaves=5)


@given(PARTS)
@settings(max_examples=60, deadline=None)
def test_any_brackets(part: tuple[str, str]) -> None:
    source = grammar_source(StructuredOutputsParams(grammar=f"root ::= {part[0]}"))
    expected = re.compile(part[1])
    for text in ("".join(letters) for size in range(5) for letters in itertools.product("ab", repeat=size)):
        assert matches(source, text) == bool(expected.fullmatch(text)), text
