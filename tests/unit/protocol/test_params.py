"""The parameters by themselves: what is refused with its name, and what is moved into a range that can be computed with."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.protocol.params import MAX_N, BeamSearchParams, SamplingParams

HUGE = 10**400
"""Larger than any float."""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", MAX_N + 1),
        ("n", 10**40),
        ("n", "2"),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", HUGE),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2.5),
        ("min_p", -0.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", HUGE),
        ("seed", 2**63),
        ("seed", 1.0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", ""),
        ("stop", [""]),
        ("stop", 5),
        ("stop", b"x"),
        ("stop", [5]),
        ("stop", {"x": 1}),
        ("bad_words", "abc"),
        ("bad_words", 5),
        ("bad_words", [""]),
        ("bad_words", [None]),
        ("bad_words", ["x"] * 1025),
        ("bad_words", ["x" * 65_537]),
        ("stop", ["x"] * 1025),
        ("stop_token_ids", [1] * (2**20 + 1)),
        ("logprob_token_ids", [1] * (2**20 + 1)),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["5"]),
        ("allowed_token_ids", []),
        ("logit_bias", [1]),
        ("logit_bias", {5: HUGE}),
        ("logit_bias", {5: None}),
        ("logit_bias", {"x": 1}),
        ("logprobs", -2),
        ("logprobs", 1.5),
        ("stream_interval", 0),
        ("detokenize", "no"),
        ("ignore_eos", 1),
        ("skip_reading_prefix_cache", "x"),
        ("extra_args", 5),
        ("skip_special_tokens", None),
    ],
)
def test_what_cannot_be_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(str(caught.value)) < 300


def test_stop_strings_in_any_collection() -> None:
    assert SamplingParams(stop="a").stops == ["a"]
    assert SamplingParams(stop=("a", "b")).stops == ["a", "b"]  # type: ignore[arg-type]
    assert SamplingParams(stop=[]).stops == []


def test_greedy_ignores_the_rest_and_gives_one_answer() -> None:
    params = SamplingParams(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.1)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)
    with pytest.raises(InvalidRequest, match="n must be 1"):
        SamplingParams(temperature=0.0, n=2)


def test_what_is_too_extreme_to_compute_with_is_moved() -> None:
    assert SamplingParams(temperature=1e-4).temperature == 0.01
    assert SamplingParams(temperature=1e308).temperature == BeamSearchParams(1, 1, temperature=1e308).temperature == 1e30
    assert SamplingParams(repetition_penalty=1e-300).repetition_penalty == pytest.approx(1e-30)
    assert SamplingParams(repetition_penalty=1e300).repetition_penalty == 1e30
    assert SamplingParams(top_k=10**40).top_k == 2**31 - 1
    assert SamplingParams(stream_interval=10**40).stream_interval == 2**31 - 1
    assert SamplingParams(logit_bias={5: 1e9, 6: -1e9}).logit_bias == {5: 100.0, 6: -100.0}
    assert SamplingParams(seed=-1).seed is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0),
        ("beam_width", "x"),
        ("beam_width", 2.5),
        ("beam_width", 10**9),
        ("max_tokens", 0),
        ("max_tokens", None),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("length_penalty", "x"),
        ("length_penalty", float("inf")),
        ("length_penalty", 1e308),
        ("length_penalty", -1e308),
        ("length_penalty", HUGE),
    ],
)
def test_beam_search_parameters_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, name: value})
    assert caught.value.param == name
