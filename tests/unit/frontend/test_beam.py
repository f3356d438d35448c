"""Beam search against exhaustive search and a plain re-implementation, over a made-up language model."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache

import pytest

from octavo.errors import EngineDead, InvalidRequest, RequestFailed
from octavo.frontend.beam import BeamSearch, beam_request_output, beam_search_output
from octavo.frontend.processor import InputProcessor
from octavo.protocol.engine import FinishReason, LogprobRow, NewRequest, TokenDelta
from octavo.protocol.params import BeamSearchParams, SamplingParams
from tests.support.engine_config import tiny_config

PROMPT = [3, 4]
WORDS = 5
"""Tokens 0 .. 4 of the vocabulary have a probability."""
END = 2


@cache
def log_probs(tokens: tuple[int, ...]) -> tuple[float, ...]:
    """A language model: of `WORDS` tokens, a random distribution for each context."""
    rng = random.Random(str(tokens))
    weights = [rng.gammavariate(0.7, 1.0) + 1e-6 for _ in range(WORDS)]
    return tuple(math.log(w / sum(weights)) for w in weights)


def answer(request: NewRequest) -> TokenDelta:
    """What an engine says to a one-token request with logprobs."""
    assert request.sampling.max_tokens == 1
    k = request.sampling.logprobs
    assert k is not None
    row = log_probs(tuple(request.prompt_token_ids))
    top = sorted(range(WORDS), key=lambda token: -row[token])[:k]
    rows = [LogprobRow(top[0], row[top[0]], 1, top, [row[token] for token in top])]
    return TokenDelta(request.request_id, 0, [top[0]], FinishReason.LENGTH, logprobs=rows)


def begin(params: BeamSearchParams, eos: tuple[int, ...] = (END,)) -> BeamSearch:
    return BeamSearch.begin(InputProcessor(tiny_config(eos=eos), None), PROMPT, params, "beam")


def run(search: BeamSearch) -> tuple[list[NewRequest], list[str]]:
    """Drive a search to its end; returns every request and every release."""
    requests, released = [], []
    while not search.done:
        turn, collector = search.start_turn()
        requests += turn
        for request in reversed(turn):  # the order of answers must not matter
            collector.on_delta(answer(request))
        assert collector.complete
        released += search.finish_turn(collector)
    return requests, released + search.held_requests()


def score(tokens: tuple[int, ...], penalty: float) -> tuple[float, float]:
    """(summed logprob, score) of generated tokens."""
    total = sum(log_probs((*PROMPT, *tokens[:i]))[token] for i, token in enumerate(tokens))
    return total, total / len(tokens) ** penalty


def plain_beam_search(width: int, length: int, penalty: float, ends: tuple[int, ...]) -> list[tuple[float, tuple[int, ...]]]:
    """The same rules, written without any engine: (score, tokens), best first."""
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: list[tuple[float, tuple[int, ...]]] = []
    for n in range(1, length + 1):
        options = sorted(
            ((total + log_probs((*PROMPT, *tokens))[t], (*tokens, t)) for total, tokens in running for t in range(WORDS)), reverse=True
        )[: max(2, 1 + len(ends)) * width]
        done += [(total / n**penalty, tokens) for total, tokens in options[:width] if tokens[-1] in ends or n == length]
        done = sorted(done, reverse=True)[:width]
        running = [(total, tokens) for total, tokens in options if tokens[-1] not in ends][:width]
        if len(done) == width and running[0][0] / n**penalty <= done[-1][0]:
            break
    return done


def all_sequences(length: int) -> list[tuple[int, ...]]:
    """Every sequence that ends with END, or has `length` tokens."""
    found = []
    for n in range(1, length + 1):
        for head in itertools.product([t for t in range(WORDS) if t != END], repeat=n - 1):
            found += [(*head, t) for t in range(WORDS) if t == END or n == length]
    return found


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
def test_a_beam_as_wide_as_the_tree_is_exhaustive_search(penalty: float) -> None:
    search = begin(BeamSearchParams(beam_width=150, max_tokens=3, length_penalty=penalty, include_stop_str_in_output=True))
    run(search)
    best = sorted(all_sequences(3), key=lambda tokens: -score(tokens, penalty)[1])
    assert [done.beam.tokens for done in search.results()] == best
    for done in search.results():
        assert done.beam.logprob == pytest.approx(score(done.beam.tokens, penalty)[0])
        assert done.finish_reason == ("stop" if done.beam.tokens[-1] == END else "length")


@pytest.mark.parametrize("eos", [(), (END,), (END, 4)])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 1.7])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_every_width_follows_the_rules(width: int, penalty: float, eos: tuple[int, ...]) -> None:
    for length in (1, 2, 6, 12):
        search = begin(BeamSearchParams(beam_width=width, max_tokens=length, length_penalty=penalty), eos)
        run(search)
        expected = plain_beam_search(width, length, penalty, eos)
        assert [done.beam.tokens for done in search.results()] == [tokens for _, tokens in expected]
        assert [done.score for done in search.results()] == pytest.approx([value for value, _ in expected])


def test_ignoring_eos_goes_to_the_limit() -> None:
    search = begin(BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
    run(search)
    assert {len(done.beam.tokens) for done in search.results()} == {5}
    assert {done.finish_reason for done in search.results()} == {"length"}


def test_beams_fork_from_held_parents_and_every_hold_is_released() -> None:
    requests, released = run(begin(BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)))
    by_id = {request.request_id: request for request in requests}
    assert len(by_id) == len(requests) == 1 + 5 * 3
    assert all(request.hold for request in requests)
    assert requests[0].parent_id == ""
    for child in requests[1:]:
        parent = by_id[child.parent_id]
        assert child.prompt_token_ids[:-1] == parent.prompt_token_ids
    assert sorted(released) == sorted(by_id)


def test_outputs() -> None:
    search = begin(BeamSearchParams(beam_width=4, max_tokens=6))
    run(search)
    output = beam_search_output(search, None)
    for sequence, done in zip(output, search.results(), strict=True):
        shown = [token for token in done.beam.tokens if token != END]
        assert sequence.tokens == PROMPT + shown
        assert len(sequence.logprobs) == len(shown)
        assert sequence.cum_logprob == done.beam.logprob
        if done.finish_reason == "stop":
            assert sequence.stop_reason == END
            assert len(done.beam.tokens) == len(shown) + 1
    best_two = beam_request_output(search, None, n=2)
    assert [o.index for o in best_two.outputs] == [0, 1]
    assert [list(o.token_ids) for o in best_two.outputs] == [s.tokens[len(PROMPT) :] for s in output.sequences[:2]]


def test_each_position_says_what_was_chosen_and_what_was_likely() -> None:
    search = begin(BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    run(search)
    for done in search.results():
        for i, (token, row) in enumerate(zip(done.beam.tokens, done.beam.rows, strict=True)):
            model = log_probs((*PROMPT, *done.beam.tokens[:i]))
            assert (row.token_id, row.logprob) == (token, model[token])
            assert row.rank == 1 + sum(p > model[token] for p in model)


def test_a_failed_beam_fails_the_search() -> None:
    search = begin(BeamSearchParams(beam_width=2, max_tokens=4))
    [request], collector = search.start_turn()
    collector.on_delta(TokenDelta(request.request_id, 0, [], FinishReason.ERROR, error="NaN in the logits."))
    assert collector.complete
    with pytest.raises(RequestFailed, match="NaN"):
        search.finish_turn(collector)
    assert search.open_requests() == [request.request_id]
    assert search.held_requests() == [request.request_id]


def test_the_end_of_the_engine_ends_the_search() -> None:
    search = begin(BeamSearchParams(beam_width=2, max_tokens=4))
    woken = []
    _, collector = search.start_turn(lambda: woken.append(1))
    collector.on_error(EngineDead("gone"))
    assert woken
    with pytest.raises(EngineDead):
        search.finish_turn(collector)


def test_the_prompt_passes_the_same_door() -> None:
    processor = InputProcessor(tiny_config(), None)
    with pytest.raises(InvalidRequest):
        BeamSearch.begin(processor, [], BeamSearchParams(beam_width=2, max_tokens=4), "r")
    for other in (None, SamplingParams(), {"beam_width": 2}):
        with pytest.raises(InvalidRequest, match="must be BeamSearchParams"):
            BeamSearch.begin(processor, [1], other, "r")  # type: ignore[arg-type]
    search = BeamSearch.begin(processor, [1] * 510, BeamSearchParams(beam_width=1, max_tokens=40, ignore_eos=True), "r")
    requests, _ = run(search)
    assert [len(request.prompt_token_ids) for request in requests] == [510, 511]
