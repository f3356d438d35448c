"""/v1/messages: blocks in and out, events, stop reasons, errors in Anthropic's shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.frontend.http.settings import ServerSettings
from tests.support.http_server import RunningServer, running_server, wait_until
from tests.support.scripts import token_ids
from tests.support.tiny_checkpoint import write_tiny_checkpoint

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "now", "description": "The time.", "input_schema": {"type": "object", "properties": {}}}


def prompt_of(server: RunningServer) -> str:
    return server.llm.tokenizer.decode(server.fake.seen[-1].prompt_token_ids, skip_special_tokens=False)


def create(server: RunningServer, **body: Any) -> dict[str, Any]:
    reply = server.post(PATH, {"model": "tiny", "max_tokens": 20, "messages": HI, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def events_of(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    with server.http.stream("POST", PATH, json={"max_tokens": 20, "messages": HI, **body, "stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        raw = reply.read().decode()
    events = []
    for block in raw.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_a_message(server: RunningServer) -> None:
    reply = create(server, system="be short")
    assert (reply["type"], reply["role"], reply["model"]) == ("message", "assistant", "tiny")
    assert reply["id"].startswith("msg-")
    assert reply["content"] == [{"type": "text", "text": "hello world"}]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("end_turn", None)
    counted = reply["usage"]
    assert counted["output_tokens"] == 3
    assert counted["input_tokens"] + counted["cache_read_input_tokens"] == len(server.fake.seen[-1].prompt_token_ids)
    assert prompt_of(server) == "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_blocks(server: RunningServer) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "what time?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "let me look"},
                {"type": "tool_use", "id": "t1", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "12:00"}]},
                {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
            ],
        },
    ]
    create(server, messages=messages, system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], tools=[TOOL])
    blocks = [b.removesuffix("<|im_end|>\n") for b in prompt_of(server).split("<|im_start|>")[1:-1]]
    assert blocks[:-1] == ["system\na\nb", "user\nwhat time?", "assistant\nlet me look", "tool\n12:00", "user\nT\nD"]
    assert '"name": "now"' in blocks[-1]


def test_an_answer_that_was_begun_is_continued(server: RunningServer) -> None:
    create(server, messages=[*HI, {"role": "assistant", "content": "The answer is"}])
    assert prompt_of(server).endswith("<|im_start|>assistant\nThe answer is")


@pytest.mark.parametrize(
    ("body", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "hello world"),
        ({"max_tokens": 1}, "max_tokens", None, "hello"),
        ({"stop_sequences": ["x", " w"]}, "stop_sequence", " w", "hello"),
    ],
)
def test_stop_reasons_streamed_and_whole(server: RunningServer, body: dict[str, Any], reason: str, sequence: str | None, text: str) -> None:
    whole = create(server, **body)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert whole["content"][0]["text"] == text
    events = events_of(server, **body)
    assert [e["type"] for e in events if e["type"] != "content_block_delta"] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == text
    delta = events[-2]
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert delta["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_the_context_ran_out(server: RunningServer) -> None:
    server.script("forever", token_ids("z") * 600)
    reply = create(server, messages=[{"role": "user", "content": "forever"}], max_tokens=10_000)
    assert reply["stop_reason"] == "model_context_window_exceeded"


def test_an_empty_answer_has_no_blocks(server: RunningServer) -> None:
    server.script("silence", [])
    messages = [{"role": "user", "content": "silence"}]
    assert create(server, messages=messages)["content"] == []
    assert [e["type"] for e in events_of(server, messages=messages)] == ["message_start", "ping", "message_delta", "message_stop"]


def test_sampling_fields_reach_the_engine(server: RunningServer) -> None:
    create(server, temperature=0.3, top_k=7, top_p=0.9, metadata={"user_id": "u"})
    sampling = server.fake.seen[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.3, 7, 0.9, 20)
    assert server.fake.seen[-1].fair_key == "u"


def test_count_tokens(server: RunningServer) -> None:
    counted = server.post(f"{PATH}/count_tokens", {"messages": HI, "system": "be short", "tools": [TOOL]}).json()
    create(server, system="be short", tools=[TOOL])
    assert counted == {"input_tokens": len(server.fake.seen[-1].prompt_token_ids)}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "user, assistant or system"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]}, "content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}, "tool_use"),
        ({"system": 3}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "x"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "deep"}}, "thinking"),
        ({"temperature": -1}, "temperature"),
        ({"mcp_servers": "x"}, "mcp_servers"),
        ({"mcp_servers": [{"type": "url", "url": "https://example.com", "name": "x"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config"),
    ],
)
def test_bad_requests(server: RunningServer, body: dict[str, Any], word: str) -> None:
    reply = server.post(PATH, {"max_tokens": 5, "messages": HI, **body})
    assert reply.status_code == 400, reply.text
    answer = reply.json()
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert answer["request_id"].startswith("req_")
    assert word in answer["error"]["message"]


def test_other_errors_have_the_shape_too(server: RunningServer) -> None:
    missing = server.post(PATH, {"model": "other", "max_tokens": 5, "messages": HI})
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    broken = server.http.post(PATH, content=b"{", headers={"Content-Type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
    server.script("breaks", "hello world", fail_at=1)
    messages = [{"role": "user", "content": "breaks"}]
    failed = server.post(PATH, {"max_tokens": 5, "messages": messages})
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "api_error")
    last = events_of(server, messages=messages)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


def test_leaving_ends_the_request(server: RunningServer) -> None:
    server.script("forever", token_ids("z") * 400, delay=0.02)
    messages = [{"role": "user", "content": "forever"}]
    with server.http.stream("POST", PATH, json={"max_tokens": 400, "messages": messages, "stream": True}) as reply:
        next(reply.iter_bytes())
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 0)


def test_the_key_may_come_as_x_api_key(checkpoint: Any) -> None:
    with running_server(checkpoint, ServerSettings(api_key=["secret"])) as server:
        body = {"max_tokens": 5, "messages": HI}
        assert server.post(PATH, body).status_code == 401
        assert server.post(PATH, body, headers={"x-api-key": "wrong"}).status_code == 401
        assert server.post(PATH, body, headers={"x-api-key": "secret"}).status_code == 200


def test_a_thinking_budget_holds_where_the_model_reasons(checkpoint: Path, tmp_path: Path) -> None:
    def constraint(server: RunningServer, **thinking: Any) -> Any:
        create(server, thinking=thinking)
        return server.fake.seen[-1].sampling.constraint

    enabled = {"type": "enabled", "budget_tokens": 7}
    with running_server(checkpoint, ServerSettings(reasoning_parser="think")) as server:
        held = constraint(server, **enabled)  # no tokens mark the reasoning, but its text does
        assert (held.reasoning_end, held.reasoning_budget) == ("</think>", 7)
        form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
        assert server.post(PATH, {"max_tokens": 5, "messages": HI, "thinking": enabled, "output_config": form}).status_code == 200
        held = server.fake.seen[-1].sampling.constraint
        assert (held.reasoning_end, held.reasoning_budget, bool(held.grammar)) == ("</think>", 7, True)
    marked = write_tiny_checkpoint(tmp_path, more=("<think>", "</think>"))
    with running_server(marked, ServerSettings(reasoning_parser="think")) as server:
        held = constraint(server, **enabled)
        assert held.reasoning_budget == 7
        assert held.reasoning_stop_ids == server.tokens("</think>")
        assert constraint(server, type="adaptive") is None
        assert constraint(server, type="disabled") is None


def test_replies_have_the_id_of_their_request(server: RunningServer) -> None:
    fine = server.post(PATH, {"max_tokens": 5, "messages": HI})
    assert fine.headers["request-id"].startswith("req_")
    refused = server.post(PATH, {"max_tokens": 0, "messages": HI})
    assert refused.headers["request-id"] == refused.json()["request_id"]
    assert "request-id" not in server.http.get("/v1/models").headers


@pytest.mark.parametrize("given", ["[1, 2]", "5", '"x"', "true", '{"a": 1}', '{"a": ', "null", '""'])
def test_arguments_that_are_no_object_are_one_in_streams_too(server: RunningServer, given: str) -> None:
    server.script("", f'<tool_call>{{"name": "f", "arguments": {given}}}</tool_call>')
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 200,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    }
    whole = [block["input"] for block in server.post("/v1/messages", body).json()["content"] if block["type"] == "tool_use"]
    with server.http.stream("POST", "/v1/messages", json={**body, "stream": True}) as reply:
        blocks = reply.read().decode().removesuffix("\n\n").split("\n\n")
    events = [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in blocks]
    text = "".join(event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta")
    if given == '{"a": ':  # begun as an object: it has been sent before anybody could know
        assert (text, whole) == ('{"a": }', [{"arguments": '{"a": }'}])
    else:
        assert [json.loads(text or "{}")] == whole
