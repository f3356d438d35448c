"""Lists that forbid tokens: what they leave of a mask, and requests that have nothing left end alone, with an error of their own."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.restriction import BadWords, Restriction, Spellings
from octavo.protocol.engine import FinishReason, Vocabulary
from octavo.protocol.params import OutputConstraint, SamplingParams
from tests.support.core_engine import EOS, Engine

SIZE = 64


def bits(words: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


@given(
    allowed=st.none() | st.lists(st.integers(0, SIZE - 1), min_size=1),
    bad=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=6),
    outputs=st.lists(st.integers(0, 5), max_size=6),
    mask=st.sets(st.integers(0, SIZE - 1)),
    ends=st.frozensets(st.integers(0, SIZE + 40), max_size=3),
)
def test_what_is_left(allowed: list[int] | None, bad: list[list[int]], outputs: list[int], mask: set[int], ends: frozenset[int]) -> None:
    texts = [bytes([token]) for token in range(SIZE)]
    restriction = Restriction.of(SamplingParams(allowed_token_ids=allowed), SIZE // 32, BadWords(bad, Spellings(texts)) if bad else None)
    if restriction is None:
        assert allowed is None
        assert not bad
        return
    words = np.packbits(np.isin(np.arange(SIZE), list(mask)), bitorder="little").view(np.int32).copy()
    for token in outputs:
        restriction.accept(token)
    restriction.narrow(words, ends)
    banned = {word[-1] for word in bad if len(word) == 1 or outputs[-(len(word) - 1) :] == word[:-1]}
    assert bits(words) == (mask if allowed is None else mask & set(allowed) or mask & ends) - banned


TEXTS = [b"", b"a", b"b", b"aa", b"ab", b"ba", b"bb", b"aab", b" a", b"ab", b"abab"]


@given(
    bad=st.lists(st.lists(st.integers(1, len(TEXTS) - 1), min_size=1, max_size=3), min_size=1, max_size=4),
    outputs=st.lists(st.integers(0, len(TEXTS) - 1), max_size=7),
)
def test_words_are_found_in_whichever_tokens_they_are_written(bad: list[list[int]], outputs: list[int]) -> None:
    restriction = Restriction.of(SamplingParams(), SIZE // 32, BadWords(bad, Spellings(TEXTS)))
    assert restriction is not None
    for at, token in enumerate(outputs):
        if at == 2:
            restriction = restriction.fork()
        restriction.accept(token)
    words = np.full(SIZE // 32, -1, np.int32)
    restriction.narrow(words)
    told = {b"".join(TEXTS[token] for token in ids) for ids in bad}

    def completes(token: int) -> bool:
        """Some of the last tokens and this one, all of them with a text, are a bad word."""
        last = next((at + 1 for at in range(len(outputs) - 1, -1, -1) if not TEXTS[outputs[at]]), 0)
        return any(b"".join(TEXTS[t] for t in [*outputs[at:], token]) in told for at in range(last, len(outputs) + 1))

    assert bits(words) == {token for token in range(SIZE) if not (0 < token < len(TEXTS) and completes(token))}


def test_words_of_tokens_without_a_text_are_these_tokens() -> None:
    restriction = Restriction.of(SamplingParams(), SIZE // 32, BadWords([[3, 0, 5], [0], [0, 4]], Spellings(TEXTS)))
    assert restriction is not None

    def forbidden() -> set[int]:
        words = np.full(SIZE // 32, -1, np.int32)
        restriction.narrow(words)
        return set(range(SIZE)) - bits(words)

    assert forbidden() == {0}
    for token, then in ((3, {0}), (0, {0, 4, 5}), (0, {0, 4}), (3, {0}), (5, {0})):
        restriction.accept(token)
        assert forbidden() == then


def test_many_long_words_that_begin_alike_cost_little() -> None:
    tokens = [b"", *(bytes([i]) for i in range(97, 123))]
    bad = BadWords([[1] * size for size in range(30, 350)] + [[1, *([2 + i % 20] * 60)] for i in range(700)], Spellings(tokens))
    restriction = Restriction(SamplingParams(), 1, bad)
    begun = time.process_time()
    for _ in range(500):
        restriction.accept(1)
        restriction.narrow(np.full(1, -1, np.int32))
    assert time.process_time() - begun < 2.5  # 2,000 times as much where each word is looked at by itself


VOCABULARY = Vocabulary([b""] * 2 + [bytes([ord("a") + i]) for i in range(26)] + [b""] * 36, [EOS], [EOS])


def ends(**params: object) -> tuple[FinishReason | None, str, int]:
    """How a request with `params` ends beside another one, which is not to notice."""
    engine = Engine()
    engine.core.set_vocabulary(VOCABULARY)
    engine.add("good", [3] * 5, max_tokens=9, ignore_eos=True)
    engine.add("bad", [3] * 5, max_tokens=9, ignore_eos=True, **params)
    engine.run()
    assert len(engine.tokens("good")) == 9
    assert engine.seen["good", 0].error is None
    engine.check_idle()
    bad = engine.seen["bad", 0]
    return bad.reason, bad.error or "", len(bad.tokens)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"allowed_token_ids": [2, 3]}, "allowed_token_ids"),  # a and b, where the grammar wants x
        ({"bad_words_token_ids": [[25]]}, "bad_words"),
        ({"allowed_token_ids": [2, 25], "bad_words_token_ids": [[25]]}, "allowed_token_ids and bad_words"),
    ],
)
def test_lists_that_leave_nothing_of_a_grammar(params: dict[str, object], field: str) -> None:
    reason, error, count = ends(constraint=OutputConstraint(grammar='start: "xyz"'), **params)
    assert reason is FinishReason.ERROR
    assert error.startswith(f"structured_outputs: the output came to a place where {field} forbid")
    assert count == 0
