"""/v1/chat/completions: messages, roles, logprobs, tools that are only shown, streaming."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.http_server import RunningServer, running_server

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}}


def prompt_of(server: RunningServer) -> str:
    return server.llm.tokenizer.decode(server.fake.seen[-1].prompt_token_ids, skip_special_tokens=False)


def test_reply_has_every_field(server: RunningServer) -> None:
    reply = server.post(PATH, {"model": "tiny", "messages": HI}).json()
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    choice = reply["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "hello world"
    assert "tool_calls" not in choice["message"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    assert reply["usage"]["completion_tokens"] == 3
    assert prompt_of(server) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a b", "a b"),
        ([{"type": "text", "text": "a"}], "a"),
    ],
)
def test_content_forms(server: RunningServer, content: Any, text: str) -> None:
    assert server.post(PATH, {"messages": [{"role": "user", "content": content}]}).status_code == 200
    assert f"<|im_start|>user\n{text}<|im_end|>" in prompt_of(server)


def test_conversation_with_tool_calls_and_null_content(server: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "be short"},
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    assert server.post(PATH, {"messages": messages}).status_code == 200
    assert "<|im_start|>tool\n12:00" in prompt_of(server)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{}],
        ["hi"],
        [{"role": "user"}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "content": None, "tool_calls": "nope"}],
    ],
)
def test_bad_messages_are_refused(server: RunningServer, messages: Any) -> None:
    reply = server.post(PATH, {"messages": messages})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages"


def test_max_tokens_defaults_to_the_context(server: RunningServer) -> None:
    server.post(PATH, {"messages": HI})
    request = server.fake.seen[-1]
    assert request.sampling.max_tokens == 512 - len(request.prompt_token_ids)
    server.post(PATH, {"messages": HI, "max_tokens": 50, "max_completion_tokens": 7})
    assert server.fake.seen[-1].sampling.max_tokens == 7


def test_logprobs(server: RunningServer) -> None:
    choice = server.post(PATH, {"messages": HI, "logprobs": True, "top_logprobs": 2}).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["hello", " world", "<|im_end|>"]
    assert bytes(content[1]["bytes"]) == b" world"
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["top_logprobs"][0]["token"] == "hello"
    assert [t["logprob"] for t in content[0]["top_logprobs"]] == sorted((t["logprob"] for t in content[0]["top_logprobs"]), reverse=True)


@pytest.mark.parametrize("top", [None, 0])
def test_logprobs_without_alternatives(server: RunningServer, top: int | None) -> None:
    content = server.post(PATH, {"messages": HI, "logprobs": True, "top_logprobs": top}).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []
    assert content[0]["logprob"] == -0.5


def test_stream_opens_with_the_role_and_joins_to_the_reply(server: RunningServer) -> None:
    server.script("", "hello world", delay=0.005)
    body = {"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 1}
    events = server.events(PATH, body)
    whole = server.post(PATH, body).json()
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    assert len({e["id"] for e in events}) == 1
    for index in (0, 1):
        pieces = [c for e in events for c in e["choices"] if c["index"] == index]
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        assert pieces[0]["finish_reason"] is None
        assert "".join(p["delta"].get("content", "") for p in pieces) == whole["choices"][index]["message"]["content"]
        logprobs = [entry for p in pieces[1:] for entry in p["logprobs"]["content"]]
        assert logprobs == whole["choices"][index]["logprobs"]["content"]
        assert pieces[-1]["finish_reason"] == "stop"
        assert pieces[-1]["stop_reason"] is None


@pytest.mark.parametrize("options", [None, {}, {"include_usage": True}])
def test_stream_usage(server: RunningServer, options: dict[str, Any] | None) -> None:
    events = server.events(PATH, {"messages": HI, "n": 2, "stream_options": options})
    totals = [e for e in events if not e["choices"]]
    if options != {"include_usage": True}:
        assert totals == []
        return
    assert totals == [events[-1]]
    assert totals[0]["usage"]["completion_tokens"] == 6
    assert totals[0]["usage"]["prompt_tokens"] == len(server.fake.seen[-1].prompt_token_ids)


def test_echo_and_continue_final_message(server: RunningServer) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "echo": True}
    assert server.post(PATH, body).json()["choices"][0]["message"]["content"] == "Well, hello world"
    assert prompt_of(server).rstrip().endswith("<|im_start|>assistant\nWell,")
    events = server.events(PATH, body)
    assert "".join(c["delta"].get("content", "") for e in events for c in e["choices"]) == "Well, hello world"


def test_continue_and_generation_prompt_exclude_each_other(server: RunningServer) -> None:
    reply = server.post(PATH, {"messages": HI, "continue_final_message": True})
    assert reply.status_code == 400
    assert "add_generation_prompt" in reply.json()["error"]["message"]


def test_prompt_extensions(server: RunningServer) -> None:
    body = {"messages": HI, "return_token_ids": True, "return_prompt_text": True, "prompt_logprobs": 0}
    reply = server.post(PATH, body).json()
    assert reply["prompt_token_ids"] == server.fake.seen[-1].prompt_token_ids
    assert reply["prompt_text"] == prompt_of(server)
    assert reply["choices"][0]["token_ids"][:2] == server.tokens("hello world")
    assert reply["prompt_logprobs"][0] is None
    assert len(reply["prompt_logprobs"]) == len(reply["prompt_token_ids"])
    events = server.events(PATH, {"messages": HI, "return_token_ids": True})
    assert events[0]["prompt_token_ids"] == reply["prompt_token_ids"]


def test_tools_are_shown_to_the_model(server: RunningServer) -> None:
    for extra in ({}, {"tool_choice": "none"}, {"tool_choice": None}):
        reply = server.post(PATH, {"messages": HI, "tools": [TOOL], **extra})
        assert reply.status_code == 200
        assert reply.json()["choices"][0]["message"]["content"] == "hello world"
        assert '"name": "now"' in prompt_of(server)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 3}}}}]}, "tools"),
        ({"thinking_token_budget": 10}, "thinking_token_budget"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": 3}}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -2, "logprobs": True}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"metadata": 5}, "metadata"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"service_tier": 5}, "service_tier"),
        ({"store": "x"}, "store"),
        ({"verbosity": {}}, "verbosity"),
        ({"verbosity": "endless"}, "verbosity"),
        ({"prediction": 3}, "prediction"),
        ({"prompt_cache_key": 3}, "prompt_cache_key"),
        ({"safety_identifier": []}, "safety_identifier"),
        ({"modalities": 5}, "modalities"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
def test_bad_relations_between_fields(server: RunningServer, extra: dict[str, Any], param: str) -> None:
    reply = server.post(PATH, {"messages": HI, **extra})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_fields_of_openais_without_an_effect_are_taken(server: RunningServer) -> None:
    extra = {
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "store": True,
        "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
        "modalities": ["text"],
        "prompt_cache_key": "k",
        "safety_identifier": "u",
    }
    assert server.post(PATH, {"messages": HI, **extra}).status_code == 200
    assert server.post(PATH, {"messages": HI, **dict.fromkeys(extra)}).status_code == 200


@pytest.mark.parametrize("more", [(), ("<think>", "</think>")], ids=["several tokens", "one token"])
def test_what_the_engine_is_told_of_reasoning(tmp_path: Any, more: tuple[str, ...]) -> None:
    """The same, however many tokens its markers are: a budget, and a form of the answer, hold behind them."""
    from octavo.frontend.http.settings import ServerSettings
    from tests.support.tiny_checkpoint import write_tiny_checkpoint

    form = {"response_format": {"type": "json_object"}}
    with running_server(write_tiny_checkpoint(tmp_path, more=more), ServerSettings(reasoning_parser="think")) as server:

        def told(**extra: Any) -> Any:
            reply = server.post(PATH, {"messages": HI, **extra})
            assert reply.status_code == 200, reply.text
            return server.fake.seen[-1].sampling.constraint

        for extra in ({}, form):
            held = told(thinking_token_budget=5, **extra)
            assert (held.reasoning_start, held.reasoning_end, held.reasoning_budget) == ("<think>", "</think>", 5)
            assert held.reasoning_stop_ids == server.tokens("</think>")
            assert bool(held.grammar) == bool(extra)
        going_on = {"add_generation_prompt": False, "continue_final_message": True, "thinking_token_budget": 5}

        def gone_on(text: str, **extra: Any) -> Any:
            return told(messages=[*HI, {"role": "assistant", "content": text}], **going_on, **extra)

        # Within the reasoning that the message has begun.
        held = gone_on("<think>First I")
        assert (held.reasoning_start, held.reasoning_end, held.reasoning_budget) == ("", "</think>", 5)
        # What it has closed already, or never had, needs no limit; the form of the answer begins at once.
        for text in ("<think></think>", "<think>x</think>It is", "It is"):
            assert gone_on(text) is None
            held = gone_on(text, **form)
            assert (held.reasoning_start, held.reasoning_end) == ("", "")
            assert held.grammar
        refused = server.post(PATH, {"messages": HI, "thinking_token_budget": 5, "use_beam_search": True}).json()["error"]
        assert (refused["param"], "thinking_token_budget" in refused["message"]) == ("use_beam_search", True)
        reply = server.post("/v1/responses", {"input": "hi", "thinking_token_budget": 6})
        assert reply.status_code == 200
        assert server.fake.seen[-1].sampling.constraint.reasoning_budget == 6


def test_template_from_a_request_when_trusted(checkpoint: Any) -> None:
    from octavo.frontend.http.settings import ServerSettings

    with running_server(checkpoint, ServerSettings(trust_request_chat_template=True)) as server:
        body = {"messages": HI, "chat_template": "T:{{ messages[0].content }}{{ mood }}", "chat_template_kwargs": {"mood": "!"}}
        assert server.post(PATH, body).status_code == 200
        assert prompt_of(server) == "T:hi!"
        assert server.post(PATH, {"messages": HI, "chat_template": "{{ x"}).status_code == 400
        assert server.post(PATH, {"messages": HI, "chat_template": "{% for a in range(10**9) %}x{% endfor %}"}).status_code == 400


def test_a_template_from_a_request_cannot_hold_up_the_server(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.frontend.http.settings import ServerSettings
    from octavo.frontend.text import template_process

    monkeypatch.setattr(template_process, "ROOM", dataclasses.replace(template_process.ROOM, seconds=2.0))
    bomb = "{% set x=namespace(v=[1]) %}{% for i in range(60) %}{% set x.v = [x.v,x.v] %}{% endfor %}{{ x.v|tojson|length }}"
    with running_server(checkpoint, ServerSettings(trust_request_chat_template=True)) as server:
        for path, wrapped in (
            (PATH, {"messages": HI, "chat_template": bomb}),
            ("/tokenize", {"messages": HI, "chat_template_kwargs": {"chat_template": bomb}}),
        ):
            with ThreadPoolExecutor(1) as pool:
                bombed = pool.submit(server.post, path, wrapped)
                slowest = 0.0
                while not bombed.done():
                    begun = time.monotonic()
                    assert server.http.get("/health").status_code == 200
                    slowest = max(slowest, time.monotonic() - begun)
                    time.sleep(0.05)
            assert bombed.result().status_code == 400
            assert "stopped" in bombed.result().json()["error"]["message"]
            assert slowest < 3.0
        error = server.post(PATH, {"messages": HI, "chat_template": "x" * 10_000}).json()["error"]
        assert error["param"] == "chat_template"
        assert len(error["message"]) < 300


def test_model_without_a_template(tmp_path: Any) -> None:
    from tests.support.tiny_checkpoint import write_tiny_checkpoint

    with running_server(write_tiny_checkpoint(tmp_path, chat=False)) as server:
        reply = server.post(PATH, {"messages": HI})
        assert reply.status_code == 400
        assert "chat template" in reply.json()["error"]["message"].lower()
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
