"""Tokens become outputs: text, stop strings, output kinds, siblings, logprobs; the same however the tokens arrive."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.checkpoint.resolve import resolve_checkpoint
from octavo.config.args import EngineArgs
from octavo.errors import EngineDead, RequestFailed
from octavo.frontend.outputs import FinishedRequest, RequestOutput
from octavo.frontend.processor import InputProcessor
from octavo.frontend.request_state import RequestState
from octavo.frontend.text.tokenizer import Tokenizer, load_tokenizer
from octavo.protocol.engine import FinishReason, LogprobRow, RequestTimes, TokenDelta
from octavo.protocol.params import RequestOutputKind, SamplingParams
from tests.support.engine_config import EOS, tiny_config
from tests.support.scripts import token_ids
from tests.support.tiny_checkpoint import write_tiny_checkpoint

DELTA, FINAL, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    return load_tokenizer(resolve_checkpoint(str(folder), load_format="dummy"), EngineArgs(model=str(folder)))


@dataclass
class Run:
    """One request, fed by hand."""

    tokenizer: Tokenizer | None
    params: SamplingParams
    aborted: list[int] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)
    wakes: int = 0

    def __post_init__(self) -> None:
        prepared = InputProcessor(tiny_config(max_logprobs=-1), self.tokenizer).prepare([5, 6], self.params, "r")
        self.state = RequestState(
            prepared,
            self.tokenizer,
            abort_sibling=lambda engine_id, index: self.aborted.append(index),
            wake=self.wake,
            on_finish=self.finished.append,
        )

    def wake(self) -> None:
        self.wakes += 1

    def feed(self, ids: list[int], finish: FinishReason | None = None, index: int = 0, **fields: Any) -> None:
        self.state.on_delta(TokenDelta("r#0", index, ids, finish, **fields))

    def all(self, ids: list[int], sizes: list[int], finish: FinishReason) -> list[RequestOutput]:
        """Feed `ids` in pieces of `sizes` (cycled), taking outputs after each; stops when a stop string ended it."""
        outputs, at, turn = [], 0, 0
        while at < len(ids) and not self.state.finished:
            size = max(1, sizes[turn % len(sizes)])
            last = at + size >= len(ids)
            self.feed(ids[at : at + size], finish if last else None)
            at, turn = at + size, turn + 1
            while (output := self.state.take()) is not None:
                outputs.append(output)
        return outputs


def joined(outputs: list[RequestOutput]) -> tuple[str, list[int]]:
    return "".join(o.outputs[0].text for o in outputs), [t for o in outputs for t in o.outputs[0].token_ids]


TEXT = "Grüße, 日本 🎉! DEFGHIX then DEFGHIJ and more"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", [["DEFGHIJ"], ["J", "FGHIJ"], ["never"], [" and", "more"], ["🎉"], ["X t", "DEFGHIJ a"]])
def test_stop_strings_are_the_same_at_every_split(tokenizer: Tokenizer, stop: list[str], include: bool) -> None:
    ids = token_ids(TEXT)
    one = Run(tokenizer, SamplingParams(stop=stop, include_stop_str_in_output=include, output_kind=FINAL, max_tokens=200))
    [final] = one.all(ids, [len(ids)], FinishReason.LENGTH)
    first = min((TEXT.find(s) + len(s) for s in stop if s in TEXT), default=None)
    if first is None:
        assert (final.outputs[0].text, final.outputs[0].finish_reason) == (TEXT, "length")
    else:
        hit = max((s for s in stop if TEXT[:first].endswith(s)), key=len)
        assert final.outputs[0].text == TEXT[: first if include else first - len(hit)]
        assert (final.outputs[0].finish_reason, final.outputs[0].stop_reason) == ("stop", hit)
    for size in range(1, 12):
        for sizes in ([size], [1, size], [size, 3]):
            run = Run(tokenizer, SamplingParams(stop=stop, include_stop_str_in_output=include, output_kind=DELTA, max_tokens=200))
            outputs = run.all(ids, sizes, FinishReason.LENGTH)
            assert joined(outputs) == (final.outputs[0].text, final.outputs[0].token_ids)
            assert outputs[-1].finished
            assert outputs[-1].outputs[0].finish_reason == final.outputs[0].finish_reason
            assert outputs[-1].outputs[0].stop_reason == final.outputs[0].stop_reason


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.sampled_from("abAB é日🎉 "), min_size=1, max_size=40),
    stops=st.lists(st.text(st.sampled_from("abAB é"), min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    include=st.booleans(),
)
def test_joined_stream_equals_the_whole(tokenizer: Tokenizer, text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    ids = token_ids(text)
    params = {"stop": stops or None, "include_stop_str_in_output": include, "max_tokens": 400}
    [final] = Run(tokenizer, SamplingParams(output_kind=FINAL, **params)).all(ids, [len(ids)], FinishReason.LENGTH)
    deltas = Run(tokenizer, SamplingParams(output_kind=DELTA, **params)).all(ids, sizes, FinishReason.LENGTH)
    cumulative = Run(tokenizer, SamplingParams(output_kind=CUMULATIVE, **params)).all(ids, sizes, FinishReason.LENGTH)
    assert joined(deltas) == (final.outputs[0].text, final.outputs[0].token_ids)
    assert (cumulative[-1].outputs[0].text, cumulative[-1].outputs[0].token_ids) == (final.outputs[0].text, final.outputs[0].token_ids)
    texts = [o.outputs[0].text for o in cumulative]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_a_stop_string_aborts_the_sibling_and_later_tokens_are_dropped(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, SamplingParams(stop="b", n=2, max_tokens=20))
    run.feed(token_ids("abc"))
    assert run.aborted == [0]
    run.feed(token_ids("later"))
    run.feed([], FinishReason.ABORT)
    run.feed(token_ids("x"), FinishReason.LENGTH, index=1)
    output = run.state.take()
    assert output is not None
    assert output.finished
    assert [(o.text, o.finish_reason, o.stop_reason) for o in output.outputs] == [("a", "stop", "b"), ("x", "length", None)]
    assert output.outputs[0].token_ids == token_ids("ab")
    assert [f.finish_reasons for f in run.finished] == [("stop", "length")]


def test_a_stop_string_wins_over_the_length_limit_and_needs_no_abort(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, SamplingParams(stop="b"))
    run.feed(token_ids("ab"), FinishReason.LENGTH)
    output = run.state.take()
    assert output is not None
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "b")
    assert run.aborted == []


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi!")])
def test_a_stop_token_is_a_token_but_no_text(tokenizer: Tokenizer, include: bool, text: str) -> None:
    run = Run(tokenizer, SamplingParams(stop_token_ids=token_ids("!"), include_stop_str_in_output=include))
    run.feed(token_ids("hi!"), FinishReason.STOP, stop_reason=token_ids("!")[0])
    output = run.state.take()
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].token_ids) == (text, token_ids("hi!"))
    assert output.outputs[0].stop_reason == token_ids("!")[0]


@pytest.mark.parametrize("skip", [True, False])
def test_eos_is_a_token_but_no_text(tokenizer: Tokenizer, skip: bool) -> None:
    run = Run(tokenizer, SamplingParams(skip_special_tokens=skip))
    run.feed([*token_ids("hi"), EOS], FinishReason.STOP)
    output = run.state.take()
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].token_ids[-1]) == ("hi", EOS)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_min_tokens_holds_stop_strings_off(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, SamplingParams(stop="a", min_tokens=3))
    for token in token_ids("abca"):
        run.feed([token])
    assert run.state.finished
    output = run.state.take()
    assert output is not None
    assert output.outputs[0].text == "abc"


def test_an_incomplete_character_is_kept_until_it_is_whole(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, SamplingParams(output_kind=DELTA, max_tokens=20))
    texts = []
    for token in token_ids("é🎉")[:-1]:
        run.feed([token])
        output = run.state.take()
        assert output is not None
        texts.append(output.outputs[0].text)
    assert texts == ["", "é", "", "", ""]
    run.feed([], FinishReason.LENGTH)
    output = run.state.take()
    assert output is not None
    assert output.outputs[0].text == ""


def test_no_detokenizing(tokenizer: Tokenizer) -> None:
    for run in (Run(tokenizer, SamplingParams(detokenize=False)), Run(None, SamplingParams())):
        run.feed([9, 10], FinishReason.LENGTH)
        output = run.state.take()
        assert output is not None
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [9, 10])


# Output kinds


def test_final_only_says_nothing_before_the_end(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, SamplingParams(output_kind=FINAL, n=2, max_tokens=9))
    run.feed(token_ids("a"))
    run.feed(token_ids("b"), FinishReason.LENGTH)
    assert run.state.take() is None
    run.feed(token_ids("c"), FinishReason.LENGTH, index=1)
    output = run.state.take()
    assert output is not None
    assert [o.text for o in output.outputs] == ["ab", "c"]
    assert run.state.take() is None


def test_cumulative_shows_every_sibling_so_far(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, SamplingParams(n=2, max_tokens=9))
    run.feed(token_ids("a"))
    first = run.state.take()
    run.feed(token_ids("x"), index=1)
    second = run.state.take()
    assert first is not None
    assert second is not None
    assert [o.text for o in first.outputs] == ["a", ""]
    assert [o.text for o in second.outputs] == ["a", "x"]
    assert not second.finished
    assert run.state.take() is None


def test_deltas_hold_only_what_is_new(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, SamplingParams(n=2, output_kind=DELTA, max_tokens=9, logprobs=0))
    row = [LogprobRow(5, -1.0, 1, [], [])]
    run.feed(token_ids("a"), logprobs=row)
    run.feed(token_ids("b"), logprobs=row)  # nobody looked in between
    first = run.state.take()
    run.feed(token_ids("x"), FinishReason.LENGTH, index=1, logprobs=row)
    second = run.state.take()
    run.feed(token_ids("c"), FinishReason.LENGTH, logprobs=row)
    third = run.state.take()
    assert first is not None
    assert second is not None
    assert third is not None
    shape = [
        [(o.index, o.text, len(o.token_ids), len(o.logprobs or []), o.finish_reason) for o in x.outputs] for x in (first, second, third)
    ]
    assert shape == [[(0, "ab", 2, 2, None)], [(1, "x", 1, 1, "length")], [(0, "c", 1, 1, "length")]]
    assert [first.finished, second.finished, third.finished] == [False, False, True]


def test_stream_interval(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, SamplingParams(output_kind=DELTA, stream_interval=3, max_tokens=20))
    sizes = []
    for i, token in enumerate(token_ids("abcdefgh")):
        run.feed([token], FinishReason.LENGTH if i == 7 else None)
        output = run.state.take()
        sizes.append(0 if output is None else len(output.outputs[0].token_ids))
    assert sizes == [1, 0, 0, 3, 0, 0, 3, 1]


# Logprobs


def test_logprobs_have_the_token_first_then_the_likeliest(tokenizer: Tokenizer) -> None:
    a, b, c = token_ids("abc")
    run = Run(tokenizer, SamplingParams(logprobs=2))
    run.feed([c], logprobs=[LogprobRow(c, -3.0, 7, [a, b], [-0.5, -1.0])])
    run.feed([a], FinishReason.LENGTH, logprobs=[LogprobRow(a, -0.25, 1, [a, b], [-0.25, -2.0])])
    output = run.state.take()
    assert output is not None
    [completion] = output.outputs
    assert completion.logprobs is not None
    shape = [[(i, p.logprob, p.rank, p.decoded_token) for i, p in position.items()] for position in completion.logprobs]
    assert shape == [[(c, -3.0, 7, "c"), (a, -0.5, 1, "a"), (b, -1.0, 2, "b")], [(a, -0.25, 1, "a"), (b, -2.0, 2, "b")]]
    assert completion.cumulative_logprob == -3.25


def test_logprobs_end_where_the_tokens_end(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, SamplingParams(logprobs=0, stop="b"))
    run.feed(token_ids("abc"), logprobs=[LogprobRow(i, -1.0, 1, [], []) for i in token_ids("abc")])
    output = run.state.take()
    assert output is not None
    assert output.outputs[0].logprobs is not None
    assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids) == 2
    assert output.outputs[0].cumulative_logprob == -2.0


def test_prompt_logprobs_come_once_in_a_stream_and_always_otherwise(tokenizer: Tokenizer) -> None:
    rows = [None, LogprobRow(6, -1.5, 2, [5], [-0.5])]
    for kind, expected in ((DELTA, [True, False]), (CUMULATIVE, [True, True])):
        run = Run(tokenizer, SamplingParams(prompt_logprobs=1, output_kind=kind))
        seen = []
        for ids, finish, prompt_rows in (([9], None, rows), ([10], FinishReason.LENGTH, None)):
            run.feed(ids, finish, prompt_logprobs=prompt_rows)
            output = run.state.take()
            assert output is not None
            seen.append(output.prompt_logprobs is not None)
            if output.prompt_logprobs is not None:
                assert output.prompt_logprobs[0] is None
                assert output.prompt_logprobs[1] is not None
                assert {i: p.logprob for i, p in output.prompt_logprobs[1].items()} == {6: -1.5, 5: -0.5}
        assert seen == expected


# Ends


def test_a_failed_sibling_is_a_failed_request_with_its_tokens(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, SamplingParams())
    run.feed(token_ids("hi"))
    run.feed([], FinishReason.ERROR, error="NaN in the logits.")
    assert isinstance(run.state.failure(), RequestFailed)
    output = run.state.take()
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.outputs[0].error) == ("hi", "error", "NaN in the logits.")
    assert [f.finish_reasons for f in run.finished] == [("error",)]
    assert run.finished[0].error == "NaN in the logits."


def test_the_end_of_the_engine_is_the_end_of_every_sibling(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, SamplingParams(n=2))
    run.feed(token_ids("a"), FinishReason.LENGTH)
    run.state.on_error(EngineDead("gone"))
    run.state.on_error(EngineDead("twice"))
    assert isinstance(run.state.failure(), EngineDead)
    assert [f.finish_reasons for f in run.finished] == [("length", "error")]


def test_abort_gives_out_what_was_held_back(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, SamplingParams(stop="xyz", output_kind=DELTA))
    run.feed(token_ids("axy"))
    first = run.state.take()
    run.state.abort()
    run.state.abort()
    last = run.state.take()
    assert first is not None
    assert last is not None
    assert (first.outputs[0].text, last.outputs[0].text, last.outputs[0].finish_reason) == ("a", "xy", "abort")
    assert last.finished
    assert len(run.finished) == 1


def test_times_of_siblings_add_up_to_the_requests(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, SamplingParams(n=2))
    run.feed([9], FinishReason.LENGTH, times=RequestTimes(1.0, 2.0, 3.0, 4.0, 1))
    run.feed([9], FinishReason.LENGTH, index=1, times=RequestTimes(1.0, 2.5, 3.5, 5.0, 2))
    output = run.state.take()
    assert output is not None
    assert output.metrics == RequestTimes(1.0, 2.0, 3.0, 5.0, 3)


def test_what_the_finished_request_says(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, SamplingParams(n=2, max_tokens=7))
    run.feed([9], num_cached_tokens=1)
    run.feed([9], FinishReason.LENGTH)
    run.feed([9], FinishReason.LENGTH, index=1, num_cached_tokens=2)
    [finished] = run.finished
    assert (finished.num_prompt_tokens, finished.num_cached_tokens, finished.num_output_tokens) == (2, 1, 3)
    assert (finished.n, finished.max_tokens, finished.finish_reasons) == (2, 7, ("length", "length"))
    assert len(finished.token_gaps) == 1
    assert finished.times.first_token > 0
    assert finished.end_time >= finished.arrival_time
