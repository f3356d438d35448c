"""Stop strings: nothing of a stop leaks, nothing else is lost, and the pieces the text came in do not matter."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.text.stops import StopStrings, StopUpdate

ALPHABET = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def by_hand(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule, written down plainly."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool = False, min_tokens: int = 0) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops, include, min_tokens)
    shown = []
    for piece in pieces:
        update = matcher.push(piece)
        shown.append(update.text)
        if update.stop is not None:
            return shown, update.stop
    return [*shown, matcher.flush()], None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(text=ALPHABET, stops=STOPS, cuts=st.lists(st.integers(0, 30)), include=st.booleans())
def test_any_split_gives_the_same_text_and_stop(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    shown, stop = run(pieces_of(text, cuts), stops, include)
    assert ("".join(shown), stop) == by_hand(text, stops, include)


@given(text=ALPHABET, stops=STOPS)
def test_no_more_is_held_back_than_could_be_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    shown = ""
    for n, char in enumerate(text, start=1):
        update = matcher.push(char)
        shown += update.text
        if update.stop is not None:
            return
        held = text[len(shown) : n]
        assert len(held) < max(map(len, stops))
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(text[:n].endswith(stop[: len(held) + 1]) for stop in stops if len(stop) > len(held) + 1)


def test_stop_over_several_tokens_and_a_near_miss() -> None:
    assert run(["ABC", "DE", "FG", "HI", "JKL"], ["DEFGHIJ"]) == (["ABC", "", "", "", ""], "DEFGHIJ")
    assert run(["ABC", "DE", "FG", "HI", "XKL"], ["DEFGHIJ"]) == (["ABC", "", "", "", "DEFGHIXKL", ""], None)
    assert run(["ABC", "DE", "FG", "HI", "JKL"], ["DEFGHIJ"], include=True) == (["ABC", "DE", "FG", "HI", "J"], "DEFGHIJ")


def test_text_held_back_comes_out_at_the_end() -> None:
    assert run(["hello wor"], ["world"]) == (["hello ", "wor"], None)


def test_first_to_be_complete_wins_and_the_longest_at_one_place() -> None:
    assert run(["abcd"], ["abcd", "bc"]) == (["a"], "bc")
    assert run(["xabc"], ["c", "bc"]) == (["xa"], "bc")


def test_nothing_comes_after_a_match() -> None:
    matcher = StopStrings(["."])
    assert matcher.push("a.b") == StopUpdate("a", ".")
    assert matcher.push("more") == StopUpdate("", ".")
    assert matcher.flush() == ""


def test_no_stops_hold_nothing() -> None:
    matcher = StopStrings([])
    assert [matcher.push("a"), matcher.push("b")] == [StopUpdate("a"), StopUpdate("b")]
    assert matcher.flush() == ""


def test_min_tokens_are_out_before_a_stop_counts() -> None:
    pieces = ["\n", "a", "\n", "b", "\n", "c"]
    assert run(pieces, ["\n"], min_tokens=3) == (["\n", "a", "\n", "b", ""], "\n")
    assert run(pieces, ["\n"], min_tokens=6) == ([*pieces, ""], None)


def test_the_text_of_several_tokens_that_pass_min_tokens_counts_as_before_them() -> None:
    matcher = StopStrings(["x"], min_tokens=2)
    assert matcher.push("axbx", num_tokens=3) == StopUpdate("axbx")
    assert matcher.push("cx", num_tokens=2) == StopUpdate("c", "x")


def test_text_without_new_tokens_belongs_to_those_before() -> None:
    matcher = StopStrings(["x"], min_tokens=1)
    assert matcher.push("x", num_tokens=0) == StopUpdate("x")
    assert matcher.push("x") == StopUpdate("x")
    assert matcher.push("x", num_tokens=0) == StopUpdate("", "x")


@pytest.mark.parametrize(("min_tokens", "stop"), [(0, "ab"), (1, None), (2, None)])
def test_a_stop_that_began_before_min_tokens_does_not_count(min_tokens: int, stop: str | None) -> None:
    assert run(["a", "b", "c"], ["ab"], min_tokens=min_tokens)[1] == stop


@given(pieces=st.lists(st.text("abc", max_size=3), max_size=12), stops=STOPS, include=st.booleans(), min_tokens=st.integers(0, 6))
def test_min_tokens_is_as_if_the_text_began_after_them(pieces: list[str], stops: list[str], include: bool, min_tokens: int) -> None:
    free, rest = "".join(pieces[:min_tokens]), "".join(pieces[min_tokens:])
    text, stop = by_hand(rest, stops, include)
    shown, found = run(pieces, stops, include, min_tokens)
    assert ("".join(shown), found) == (free + text, stop)


def test_long_repetitive_stops_cost_a_constant_a_character() -> None:
    """Trying every length of "aaa...ab" at every character would be billions of comparisons here."""
    matcher = StopStrings(["a" * 20_000 + "b", "a" * 10_000 + "c"])
    shown = "".join(matcher.push("a" * 100).text for _ in range(1000))
    assert len(shown) + len(matcher.flush()) == 100_000
