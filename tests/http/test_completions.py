"""/v1/completions: prompts in every form, n, echo, logprobs, stop strings, streaming, usage."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http_server import RunningServer

PATH = "/v1/completions"


def test_a_stream_that_is_silent_for_long_is_kept_alive(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.http.sse.KEEP_ALIVE_SECONDS", 0.05)
    server.script("", "hello world", delay=0.3)
    with server.http.stream("POST", PATH, json={"prompt": "x", "stream": True, "max_tokens": 2}) as response:
        raw = response.read().decode()
    assert raw.startswith(": keep-alive\n\n")
    assert raw.endswith("data: [DONE]\n\n")
    events = [block for block in raw.split("\n\n") if block.startswith("data: {")]
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events) == "hello world"


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)


def test_reply_has_every_field(server: RunningServer) -> None:
    reply = server.post(PATH, {"model": "tiny", "prompt": "say it"}).json()
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["model"] == "tiny"
    assert reply["choices"] == [{"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    prompt_tokens = len(server.tokens("say it"))
    assert reply["usage"]["prompt_tokens"] == prompt_tokens
    # "hello", " world" and the EOS.
    assert reply["usage"]["completion_tokens"] == 3
    assert reply["usage"]["total_tokens"] == prompt_tokens + 3
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


@pytest.mark.parametrize("model", [None, "", "tiny"])
def test_no_model_means_the_base_model(server: RunningServer, model: str | None) -> None:
    assert server.post(PATH, {"model": model, "prompt": "x"}).json()["model"] == "tiny"


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("hello", 1), (["hello"], 1), (["hello", "the world"], 2), ([20, 21, 22], 1), ([[20, 21], [22]], 2), (["hello", [20]], 2)],
)
def test_prompt_forms(server: RunningServer, prompt: Any, count: int) -> None:
    reply = server.post(PATH, {"prompt": prompt}).json()
    assert [c["index"] for c in reply["choices"]] == list(range(count))


def test_several_prompts_times_n_are_numbered_by_prompt(server: RunningServer) -> None:
    server.script("one", "DE")
    server.script("two", "FG")
    body = {"prompt": ["one", "two"], "n": 2}
    reply = server.post(PATH, body).json()
    assert [(c["index"], c["text"]) for c in reply["choices"]] == [(0, "DE"), (1, "DE"), (2, "FG"), (3, "FG")]
    events = server.events(PATH, body)
    assert [joined(events, i) for i in range(4)] == ["DE", "DE", "FG", "FG"]


def test_more_prompts_than_run_at_once(server: RunningServer) -> None:
    prompts = [f"prompt number {i}" for i in range(300)]
    server.script("number 299", "HI")
    reply = server.post(PATH, {"prompt": prompts, "max_tokens": 2}).json()
    assert [c["index"] for c in reply["choices"]] == list(range(300))
    assert reply["choices"][299]["text"] == "HI"
    assert reply["usage"]["prompt_tokens"] == sum(len(server.tokens(p)) for p in prompts)


@pytest.mark.parametrize("prompt", [[""], "", [], [[]], ["a", ""], None])
def test_empty_prompt_is_refused_and_the_server_goes_on(server: RunningServer, prompt: Any) -> None:
    reply = server.post(PATH, {"prompt": prompt})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompt"
    assert server.post(PATH, {"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("max_tokens", [16, None])
def test_max_tokens_is_16_unless_given(server: RunningServer, max_tokens: int | None) -> None:
    server.script("long", [30] * 100)
    reply = server.post(PATH, {"prompt": "long", "max_tokens": max_tokens}).json()
    assert reply["usage"]["completion_tokens"] == 16
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_echo_with_no_new_tokens_scores_the_prompt(server: RunningServer, logprobs: int | None, stream: bool) -> None:
    prompt = "hello world 42"
    ids = server.tokens(prompt)
    before = len(server.fake.seen)
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": logprobs}
    if stream:
        events = server.events(PATH, {**body, "stream_options": {"include_usage": True}})
        assert len(events) == 2
        choice, usage = events[0]["choices"][0], events[1]["usage"]
    else:
        reply = server.post(PATH, body).json()
        choice, usage = reply["choices"][0], reply["usage"]
    assert choice["text"] == prompt
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens"] == len(ids)
    if logprobs is None:
        assert choice["logprobs"] is None
        assert len(server.fake.seen) == before, "no logprobs: nothing for the engine to do"
    else:
        scores = choice["logprobs"]
        assert "".join(scores["tokens"]) == prompt
        assert len(scores["tokens"]) == len(ids)
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
        assert all(isinstance(p, float) for p in scores["token_logprobs"][1:])


def test_max_tokens_zero_needs_echo(server: RunningServer) -> None:
    reply = server.post(PATH, {"prompt": "x", "max_tokens": 0})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "max_tokens"


def test_echo_of_token_ids_is_their_text(server: RunningServer) -> None:
    ids = server.tokens("hello world")
    assert server.post(PATH, {"prompt": ids, "echo": True}).json()["choices"][0]["text"] == "hello worldhello world"


def test_echo_logprobs_texts_and_offsets(server: RunningServer) -> None:
    prompt = "line one\n\nline 2\t3\n"
    reply = server.post(PATH, {"prompt": prompt, "echo": True, "logprobs": 1}).json()
    text, scores = reply["choices"][0]["text"], reply["choices"][0]["logprobs"]
    assert text == prompt + "hello world"
    for i, (token, offset) in enumerate(zip(scores["tokens"], scores["text_offset"], strict=True)):
        if token != "<|im_end|>":
            assert text[offset : offset + len(token)] == token, i
    lengths = {len(scores[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert lengths == {len(server.tokens(prompt)) + 3}


def test_streamed_echo_with_logprobs(server: RunningServer) -> None:
    server.script("", "hello world", delay=0.01)
    events = server.events(PATH, {"prompt": "the hello", "echo": True, "logprobs": 1})
    first = events[0]["choices"][0]
    assert first["text"] == "the hellohello"
    tokens: list[str] = []
    offsets: list[int] = []
    for event in events:
        scores = event["choices"][0]["logprobs"]
        assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["text_offset"]) == len(scores["top_logprobs"])
        tokens += scores["tokens"]
        offsets += scores["text_offset"]
    whole = server.post(PATH, {"prompt": "the hello", "echo": True, "logprobs": 1}).json()["choices"][0]
    assert joined(events) == whole["text"]
    assert tokens == whole["logprobs"]["tokens"]
    assert offsets == whole["logprobs"]["text_offset"]


def test_logprobs_hold_the_token_and_the_top_k(server: RunningServer) -> None:
    scores = server.post(PATH, {"prompt": "x", "logprobs": 3}).json()["choices"][0]["logprobs"]
    assert scores["tokens"] == ["hello", " world", "<|im_end|>"]
    assert scores["text_offset"] == [0, 5, 11]
    assert all(len(top) == 3 and token in top for token, top in zip(scores["tokens"], scores["top_logprobs"], strict=True))


def test_half_characters_are_shown_as_bytes(server: RunningServer) -> None:
    server.script("smile", "\N{GRINNING FACE}!")
    choice = server.post(PATH, {"prompt": "smile", "logprobs": 0, "max_tokens": 20}).json()["choices"][0]
    assert choice["text"] == "\N{GRINNING FACE}!"
    assert choice["logprobs"]["tokens"][:5] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "!"]
    assert choice["logprobs"]["text_offset"][:5] == [0, 0, 0, 0, 1]


def test_tokens_as_token_ids(server: RunningServer) -> None:
    hello = server.tokens("hello")[0]
    scores = server.post(PATH, {"prompt": "x", "logprobs": 1, "return_tokens_as_token_ids": True}).json()["choices"][0]["logprobs"]
    assert scores["tokens"][0] == f"token_id:{hello}"
    assert f"token_id:{hello}" in scores["top_logprobs"][0]


def test_return_token_ids(server: RunningServer) -> None:
    ids = server.tokens("hello world")
    choice = server.post(PATH, {"prompt": "x", "return_token_ids": True}).json()["choices"][0]
    assert choice["token_ids"][:2] == ids
    assert choice["prompt_token_ids"] == server.tokens("x")
    events = server.events(PATH, {"prompt": "x", "return_token_ids": True})
    assert [t for e in events for t in e["choices"][0]["token_ids"]] == choice["token_ids"]


def test_prompt_logprobs_extension(server: RunningServer) -> None:
    prompt = "hello world"
    rows = server.post(PATH, {"prompt": prompt, "prompt_logprobs": 1}).json()["choices"][0]["prompt_logprobs"]
    ids = server.tokens(prompt)
    assert rows[0] is None
    assert rows[1][str(ids[1])]["decoded_token"] == " world"
    assert rows[1][str(ids[1])]["rank"] == 1
    assert len(rows) == len(ids)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("delay", [0.0, 0.005])
def test_stop_string_over_several_tokens(server: RunningServer, include: bool, delay: float) -> None:
    assert len(server.tokens("DEFGHIJ")) == 4
    server.script("hit", "ABC DEFGHIJ more", delay=delay)
    server.script("miss", "ABC DEFGHIX more", delay=delay)
    for prompt, text in (("hit", "ABC " + ("DEFGHIJ" if include else "")), ("miss", "ABC DEFGHIX more")):
        body = {"prompt": prompt, "stop": "DEFGHIJ", "max_tokens": 100, "include_stop_str_in_output": include}
        choice = server.post(PATH, body).json()["choices"][0]
        events = server.events(PATH, body)
        last = events[-1]["choices"][0]
        assert choice["text"] == joined(events) == text
        assert choice["finish_reason"] == last["finish_reason"] == "stop"
        assert choice["stop_reason"] == last["stop_reason"] == ("DEFGHIJ" if prompt == "hit" else None)
        if prompt == "hit" and not include:
            assert not any("D" in c["text"] for e in events for c in e["choices"])


def test_no_stop_string_before_min_tokens(server: RunningServer) -> None:
    server.script("poem", "a\nb" + "x" * 18 + "\nend")
    body = {"prompt": "poem", "stop": "\n", "min_tokens": 20, "max_tokens": 60}
    assert server.post(PATH, body).json()["choices"][0]["text"] == "a\nb" + "x" * 18
    assert joined(server.events(PATH, body)) == "a\nb" + "x" * 18


def test_stop_token_ids(server: RunningServer) -> None:
    world = server.tokens(" world")[0]
    choice = server.post(PATH, {"prompt": "x", "stop_token_ids": [world]}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello", "stop", world)


@pytest.mark.parametrize(
    ("options", "with_usage"), [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)]
)
@pytest.mark.parametrize(("prompts", "n"), [(["hello"], 1), (["hello", "the hello world"], 2)])
def test_usage_in_streams(server: RunningServer, options: dict[str, Any] | None, with_usage: bool, prompts: list[str], n: int) -> None:
    body: dict[str, Any] = {"prompt": prompts, "n": n}
    if options is not None:
        body["stream_options"] = options
    events = server.events(PATH, body)
    totals = [e for e in events if not e["choices"]]
    assert all("usage" not in e for e in events if e["choices"])
    if not with_usage:
        assert totals == []
        assert "system_fingerprint" in events[-1]
        return
    assert totals == [events[-1]]
    assert "system_fingerprint" in events[-1]
    assert all("system_fingerprint" not in e for e in events[:-1])
    prompt_tokens = sum(len(server.tokens(p)) for p in prompts)
    completion_tokens = 3 * n * len(prompts)
    usage = events[-1]["usage"]
    assert usage["prompt_tokens"] == prompt_tokens
    assert usage["completion_tokens"] == completion_tokens
    assert usage["total_tokens"] == prompt_tokens + completion_tokens


def test_continuous_usage(server: RunningServer) -> None:
    server.script("", "hello world", delay=0.01)
    events = server.events(PATH, {"prompt": "x", "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    assert [e["usage"]["completion_tokens"] for e in events] == [1, 2, 3, 3]


def test_finish_is_on_the_last_piece_of_each_choice(server: RunningServer) -> None:
    server.script("", "hello world", delay=0.01)
    events = server.events(PATH, {"prompt": "x", "n": 2})
    for index in (0, 1):
        pieces = [c for e in events for c in e["choices"] if c["index"] == index]
        assert [p["finish_reason"] for p in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == "stop"
        assert "stop_reason" not in pieces[0]


def test_sampling_fields_reach_the_engine(server: RunningServer) -> None:
    body = {
        "prompt": "x", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.3, "frequency_penalty": -0.2,
        "repetition_penalty": 1.1, "seed": 42, "logit_bias": {"10": 200, "11": -5}, "min_tokens": 2, "max_tokens": 9,
        "stop_token_ids": [5], "bad_words": ["hello"], "allowed_token_ids": [4, 5, 6], "ignore_eos": True, "skip_special_tokens": False,
        "priority": 3, "user": "ann", "cache_salt": "pepper",
    }  # fmt: skip
    assert server.post(PATH, body).status_code == 200
    request = server.fake.seen[-1]
    sampling = request.sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"):
        assert getattr(sampling, name) == pytest.approx(body[name]), name
    assert sampling.logit_bias == {10: 100.0, 11: -5.0}
    assert (sampling.min_tokens, sampling.max_tokens, sampling.stop_token_ids) == (2, 9, [5])
    assert sampling.allowed_token_ids == [4, 5, 6]
    assert sampling.bad_words_token_ids
    assert (sampling.ignore_eos, sampling.skip_special_tokens) == (True, False)
    assert (request.priority, request.extra_key, request.fair_key) == (3, "pepper", "ann")


def test_nulls_are_the_defaults(server: RunningServer) -> None:
    names = [
        "n",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "logit_bias",
        "stream",
        "echo",
        "logprobs",
        "stream_options",
        "min_tokens",
    ]
    assert server.post(PATH, {"prompt": "x", **dict.fromkeys(names)}).status_code == 200
    assert server.fake.seen[-1].sampling.temperature == 1.0


def test_huge_limits_mean_no_limit(server: RunningServer) -> None:
    assert server.post(PATH, {"prompt": "x", "max_tokens": 10**30, "top_k": 10**30}).status_code == 200
    assert server.fake.seen[-1].sampling.max_tokens == 511


@pytest.mark.parametrize(("side", "kept"), [(None, "world"), ("left", "world"), ("right", "hello")])
def test_truncation(server: RunningServer, side: str | None, kept: str) -> None:
    body = {"prompt": "hello world", "truncate_prompt_tokens": 1, "truncation_side": side, "echo": True, "max_tokens": 0}
    reply = server.post(PATH, body).json()
    assert reply["choices"][0]["text"].strip() == kept
    assert reply["usage"]["prompt_tokens"] == 1


def test_truncate_to_what_fits(server: RunningServer) -> None:
    body = {"prompt": "x" * 2000, "truncate_prompt_tokens": -1, "max_tokens": 10}
    reply = server.post(PATH, body).json()
    assert reply["usage"]["prompt_tokens"] == 502


def test_context_is_filled_not_overrun(server: RunningServer) -> None:
    server.script("z", [30] * 600)
    reply = server.post(PATH, {"prompt": "z" * 500, "max_tokens": 100}).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 12


def test_extra_arguments_of_any_size_are_accepted(server: RunningServer) -> None:
    assert server.post("/v1/completions", {"prompt": "x", "vllm_xargs": {"a": 10**40, "b": {"c": [None]}}}).status_code == 200


def test_request_fields_of_other_servers_are_accepted(server: RunningServer) -> None:
    assert server.post(PATH, {"prompt": "x", "no_such_field": {"a": [1]}, "best_of": 1, "service_tier": "auto"}).status_code == 200
