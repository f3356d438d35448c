"""A call cut by max_tokens at every token, through every endpoint: streamed is whole, and nothing of a demanded call is text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http_server import RunningServer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
HI = [{"role": "user", "content": "hi"}]


def chat(server: RunningServer, stream: bool, limit: int, choice: str) -> tuple[str, list[tuple[str, str]], str]:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    body = {"messages": HI, "tools": tools, "max_tokens": limit, "tool_choice": choice}
    if not stream:
        found = server.post("/v1/chat/completions", body).json()["choices"][0]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in found["message"].get("tool_calls", [])]
        return found["message"]["content"] or "", calls, found["finish_reason"]
    text, calls, finish = "", list[tuple[str, str]](), ""
    for event in server.events("/v1/chat/completions", body):
        delta = event["choices"][0]["delta"]
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            name, given = call["function"].get("name"), call["function"].get("arguments", "")
            calls = [*calls, (name, given)] if name else [*calls[:-1], (calls[-1][0], calls[-1][1] + given)]
        finish = event["choices"][0]["finish_reason"] or finish
    return text, calls, finish


def responses(server: RunningServer, stream: bool, limit: int, choice: str) -> tuple[str, list[tuple[str, str]], str]:
    tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
    body: dict[str, Any] = {"input": "hi", "tools": tools, "max_output_tokens": limit, "tool_choice": choice, "store": False}
    if not stream:
        response = server.post("/v1/responses", body).json()
    else:
        with server.http.stream("POST", "/v1/responses", json={**body, "stream": True}) as reply:
            blocks = reply.read().decode().removesuffix("\n\n").split("\n\n")
        events = [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in blocks]
        response = events[-1]["response"]
        pieces = "".join(e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta")
        assert pieces == "".join(item["arguments"] for item in response["output"] if item["type"] == "function_call")
    text = "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    finish = {"completed": "tool_calls", "incomplete": "length"}[response["status"]]
    assert all(item["status"] == ("completed" if item["arguments"] == ARGUMENTS else "incomplete") for item in calls) or finish == "length"
    return text, [(item["name"], item["arguments"]) for item in calls], finish


def messages(server: RunningServer, stream: bool, limit: int, choice: str) -> tuple[str, list[tuple[str, str]], str]:
    body: dict[str, Any] = {
        "messages": HI,
        "tools": [{"name": "weather", "input_schema": PARAMETERS}],
        "max_tokens": limit,
        "tool_choice": {"type": "any" if choice == "required" else "auto"},
    }
    finishes = {"tool_use": "tool_calls", "max_tokens": "length"}
    if not stream:
        found = server.post("/v1/messages", body).json()
        text = "".join(block["text"] for block in found["content"] if block["type"] == "text")
        calls = [(b["name"], json.dumps(b["input"])) for b in found["content"] if b["type"] == "tool_use"]
        return text, calls, finishes[found["stop_reason"]]
    with server.http.stream("POST", "/v1/messages", json={**body, "stream": True}) as reply:
        blocks = reply.read().decode().removesuffix("\n\n").split("\n\n")
    text, parts, finish = "", list[tuple[str, str]](), ""
    for block in blocks:
        event = json.loads(block.split("\n")[1].removeprefix("data: "))
        delta = event.get("delta", {})
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            parts.append((event["content_block"]["name"], ""))
        text += delta.get("text", "")
        if "partial_json" in delta:
            parts[-1] = (parts[-1][0], parts[-1][1] + delta["partial_json"])
        finish = delta.get("stop_reason", finish)
    return text, [(name, json.dumps(read_input(given))) for name, given in parts], finishes[finish]


def read_input(given: str) -> Any:
    """What a client makes of partial JSON, and what the whole message says of it."""
    try:
        return json.loads(given or "{}")
    except ValueError:
        return {"arguments": given}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("ask", [chat, responses, messages])
def test_cut_at_every_token(server: RunningServer, ask: Any, choice: str) -> None:
    server.script("", CALL)
    total = len(server.tokens(CALL))
    known = False
    for limit in range(1, total + 1, 1 if ask is chat else 3):
        text, calls, finish = ask(server, False, limit, choice)
        assert ask(server, True, limit, choice) == (text, calls, finish), limit
        assert finish == "length"
        assert not (text and calls)
        assert not text or choice == "auto"
        assert calls or not known, "a longer beginning knows no less"
        known = bool(calls)
        if ask is not messages and calls:
            assert calls[0][0] == "weather"
            assert ARGUMENTS.startswith(calls[0][1])
    assert known
    text, calls, finish = ask(server, False, total + 1, choice)
    assert (text, calls, finish) == ("", [("weather", ARGUMENTS)], "tool_calls")
