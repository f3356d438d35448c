"""The end of a reasoning, found in its text however that is cut into tokens; its budget; and a grammar that begins behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest

from octavo.core.constraint import Constraint
from octavo.core.reasoning import Marker, Phase, Reasoning, marker_of
from octavo.frontend.parsing.reasoning import ThinkingSplitter
from octavo.grammar.compiler import GrammarCompiler
from octavo.protocol.engine import Vocabulary
from octavo.protocol.params import OutputConstraint

WORDS = [b"", b"<", b"/", b"think", b">", b"</", b"think>", b"\n\n", b"so", b" </thi", b"nk>\nyes", b"</thinker"]
WORDS += [b"nk", b"yes", b"y", b"nk>\n", b"a</think>b", b"es", b"<t", b"hink>", b"n"]
YES, OVERRUN, BLANK_END, INSIDE, LESS_T, HINK = 13, 10, 15, 16, 18, 19
BY_TEXT = OutputConstraint(reasoning_start="<think>", reasoning_end="</think>", reasoning_stop_ids=[5, 6])


def constraint_of(
    *, opened: bool = False, budget: int | None = None, grammar: str = "", compiler: GrammarCompiler | None = None
) -> Constraint:
    spec = OutputConstraint(
        grammar=grammar,
        reasoning_start="" if opened else "<think>",
        reasoning_end="</think>",
        reasoning_stop_ids=[5, 6],
        reasoning_budget=budget,
    )
    start = None if opened else marker_of("<think>", WORDS)
    matcher = None if compiler is None else compiler.matcher(compiler.compile(grammar))
    return Constraint(spec, matcher, [0], Reasoning(spec, WORDS, start, marker_of("</think>", WORDS)))


def allowed(constraint: Constraint) -> set[int]:
    words = np.zeros(1, np.int32)
    if (matcher := constraint.mask(words)) is not None:
        matcher.fill(words)
    return {i for i in range(len(WORDS)) if int(words.view(np.uint32)[0]) >> i & 1}


ALL = set(range(len(WORDS)))


def forced(constraint: Constraint) -> int | None:
    """The only token that may come next; None if any may."""
    found = allowed(constraint)
    assert len(found) == 1 or found == ALL
    return None if found == ALL else found.pop()


@contextmanager
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler()
    made.set_vocabulary(Vocabulary(WORDS, [0], [0]))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    ("tokens", "then"),
    [
        ([1, 3, 4, 8, 8], None),  # two tokens of reasoning
        ([1, 3, 4, 8, 8, 8], 5),
        ([7, 1, 6, 8, 8, 8, 5], 6),  # blanks before the marker, which is cut in another way
        ([1, 3, 4, 8, 8, 8, 5, 6, 8, 8, 8, 8], None),  # ended by force
        ([1, 3, 4, 8, 9, 10, 8, 8, 8, 8], None),  # ended by itself, within a token that goes on
        ([1, 3, 4, 8, 11, 8], 5),  # </thinker> is something else
        ([8, 8, 8, 8, 8], None),  # no reasoning
        ([1, 8, 8, 8, 8], None),  # <so
        ([1, 3, 4, 8, 8, 5], 6),  # half a marker is gone on with, not begun again
        ([1, 3, 4, 8, 8, 9], 12),
        ([1, 3, 4, 8, 8, 9, 12], 4),
        ([1, 3, 4, 8, 8, 1], 2),
    ],
)
def test_a_budget(tokens: list[int], then: int | None) -> None:
    constraint = constraint_of(budget=3)
    for token in tokens:
        assert forced(constraint) in (None, token)
        constraint.accept(token)
    assert forced(constraint) == then


def test_a_budget_where_the_prompt_has_begun_the_reasoning() -> None:
    constraint = constraint_of(opened=True, budget=0)
    for token in (5, 6):
        assert forced(constraint) == token
        constraint.accept(token)
    assert forced(constraint) is None


def test_a_marker_that_cannot_be_spelled_from_where_it_stands_is_written_whole() -> None:
    marker = marker_of("</think>", [b"</thi", b"</", b"think>", b"x"])
    assert (marker.spelled[0], marker.spelled[5], marker.spelled[2]) == ([1, 2], [], [2])
    spec = OutputConstraint(reasoning_end="</think>", reasoning_stop_ids=[1, 2], reasoning_budget=1)
    reasoning = Reasoning(spec, [b"</thi", b"</", b"think>", b"x"], None, marker)
    reasoning.accept(0)
    assert reasoning.forced == 1


def test_control_tokens_are_ended_where_they_stand() -> None:
    """A channel that has begun to end is not ended twice."""
    spec = OutputConstraint(reasoning_end_ids=[3, 4], reasoning_stop_ids=[1, 2, 3, 4], reasoning_budget=2)
    reasoning = Reasoning(spec, (), None, None)
    for token in (9, 1):
        assert reasoning.forced is None
        reasoning.accept(token)
    for token in (2, 3, 4):
        assert reasoning.forced == token
        reasoning.accept(token)
    assert reasoning.phase is Phase.ANSWER


@pytest.mark.parametrize("opened", [True, False])
def test_a_grammar_begins_behind_markers_of_several_tokens(opened: bool) -> None:
    with compiler() as made:
        constraint = constraint_of(opened=opened, grammar='start: "yes"', compiler=made)
        if not opened:
            # The answer, or the beginning of the marker in every spelling.
            assert allowed(constraint) == {YES, 1, LESS_T}
            constraint.accept(1)
            assert allowed(constraint) == {3, 6}
            constraint.accept(6)
        for token in (8, 13, 9):  # whatever it thinks
            assert allowed(constraint) >= {1, 8, 13, 9}
            constraint.accept(token)
        assert OVERRUN not in allowed(constraint), "it would end the reasoning with a token that the grammar has not seen"
        assert INSIDE not in allowed(constraint)
        assert BLANK_END in allowed(constraint)
        constraint.accept(BLANK_END)
        assert allowed(constraint) == {YES}
        constraint.accept(YES)
        constraint.accept(0)
        assert constraint.finished


def test_an_answer_that_begins_like_the_marker() -> None:
    with compiler() as made:
        constraint = constraint_of(grammar='start: "<so" | "<tso"', compiler=made)
        assert allowed(constraint) == {1, LESS_T}
        constraint.accept(1)
        assert allowed(constraint) == {8, 3, 6}
        constraint.accept(8)
        assert allowed(constraint) == {0}
        constraint.accept(0)
        assert constraint.finished
        thinks = constraint_of(grammar='start: "<so" | "<tso"', compiler=made)
        for token in (LESS_T, HINK, 8, 5, 6):
            assert token in allowed(thinks)
            thinks.accept(token)
        assert allowed(thinks) == {1, LESS_T}, "the grammar has not been begun"


def test_a_reply_that_must_answer_does_not_end_in_its_reasoning() -> None:
    with compiler() as made:
        compiled = made.compile('start: "yes"')
        for must in (False, True):
            spec = OutputConstraint(grammar="g", reasoning_end="</think>", must_answer=must)
            reasoning = Reasoning(spec, WORDS, None, marker_of("</think>", WORDS))
            constraint = Constraint(spec, made.matcher(compiled), [0, 8], reasoning)
            assert ({0, 8} & allowed(constraint) == set()) == must
            assert 9 in allowed(constraint)


def test_a_grammar_and_a_budget() -> None:
    with compiler() as made:
        constraint = constraint_of(opened=True, budget=2, grammar='start: "yes"', compiler=made)
        for token in (8, 9):
            assert token in allowed(constraint)
            constraint.accept(token)
        for token in (12, 4):
            assert allowed(constraint) == {token}
            constraint.accept(token)
        assert allowed(constraint) == {YES}


def test_the_engine_and_the_reader_of_replies_agree() -> None:
    """Where the answer begins, for every output of up to four pieces: what the grammar holds is what comes out as content."""
    pieces = [1, 2, 4, 5, 6, 7, 8, 9, 12, 19]
    start, end = marker_of("<think>", WORDS), marker_of("</think>", WORDS)
    for opened in (True, False):
        for tokens in product(pieces, repeat=4):
            reasoning = Reasoning(BY_TEXT, WORDS, None if opened else start, end)
            splitter = ThinkingSplitter("<think>", "</think>", opened=opened)
            for at, token in enumerate(tokens):
                splitter.push(WORDS[token].decode())
                reasoning.accept(token)
                assert (reasoning.phase is Phase.ANSWER) == splitter.answers, (opened, [WORDS[t] for t in tokens[: at + 1]])
                if reasoning.phase is Phase.ANSWER:
                    break


def test_markers_know_their_tokens() -> None:
    marker: Marker = marker_of("<think>", WORDS)
    assert marker.continues[0] == [1, LESS_T]
    assert marker.continues[1] == [3, 6]
    assert marker.begun(b"a <think") == [6]
    assert marker.begun(b"<<") == [1]
