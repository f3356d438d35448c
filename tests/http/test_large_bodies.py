"""Large bodies: what is beyond any use is refused before it is walked through, and the rest does not hold up other clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from octavo.frontend.http.limits import MAX_MESSAGES, is_large
from octavo.frontend.json_shape import MAX_CONTAINERS, MAX_FIELDS, MAX_TEXTS
from tests.support.http_server import RunningServer

USER = {"role": "user", "content": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ITEM = {"type": "message", "role": "user", "content": "x"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
MANY_LISTS: list[Any] = [[]] * 3_000_000
EMPTY_LISTS = (
    ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {"a": MANY_LISTS}}),
    ("/v1/chat/completions", {"messages": [USER], "metadata": {"a": MANY_LISTS}}),
    ("/v1/chat/completions", {"messages": [USER], "tools": MANY_LISTS}),
    ("/v1/chat/completions", {"messages": [USER], "stop": MANY_LISTS}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": MANY_LISTS}]}),
    ("/v1/chat/completions", {"messages": MANY_LISTS}),
    ("/v1/completions", {"prompt": MANY_LISTS}),
    ("/v1/responses", {"input": MANY_LISTS}),
    ("/v1/messages", {"messages": MANY_LISTS, "max_tokens": 1}),
    ("/v1/embeddings", {"input": MANY_LISTS}),
    ("/tokenize", {"prompt": "x", "zork": MANY_LISTS}),
)
CALLER = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": json.dumps([[]] * 10_000)}}]}
"""Each within the limit."""
STALL_SECONDS = 5.0
"""What is done on the loop took longer by far; how long the loop waits for its turn on a busy machine is not what this is about."""
MANY = MAX_MESSAGES + 1


@contextmanager
def loop_lag(server: RunningServer) -> Iterator[list[float]]:
    """The longest times that the server's event loop was away."""
    gaps: list[float] = []
    done = False

    async def watch() -> None:
        last = time.monotonic()
        while not done:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    watching = asyncio.run_coroutine_threadsafe(watch(), server.loop)
    try:
        yield gaps
    finally:
        done = True
        watching.result(10)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {"messages": [USER] * MANY}, "messages has 10001 entries"),
        ("/v1/chat/completions/render", {"messages": [USER] * MANY}, "messages has 10001 entries"),
        ("/tokenize", {"messages": [USER] * MANY}, "messages has 10001 entries"),
        ("/v1/messages", {"messages": [USER] * MANY, "max_tokens": 1}, "messages has 10001 entries"),
        ("/v1/messages/count_tokens", {"messages": [USER] * MANY}, "messages has 10001 entries"),
        (
            "/v1/messages",
            {"messages": [USER, {"role": "user", "content": [RESULT] * MANY}], "max_tokens": 1},
            "messages[1].content: each tool_",
        ),
        ("/v1/responses", {"input": [ITEM] * MANY}, "input has 10001 entries"),
        ("/v1/responses", {"input": [OUTPUT] * MANY}, "input has 10001 entries"),
        ("/v1/responses/input_tokens", {"input": [ITEM] * MANY}, "input has 10001 entries"),
        ("/v1/conversations", {"items": [ITEM] * MANY}, "items has 10001 entries"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALL] * MAX_CONTAINERS}]}, "at most 50000"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [RESULT] * MAX_CONTAINERS}], "max_tokens": 1}, "at most 50000"),
        ("/v1/responses", {"input": [{**ITEM, "content": [{}] * MAX_CONTAINERS}]}, "at most 50000"),
        ("/v1/completions", {"prompt": "x", "nothing": [{}] * MAX_CONTAINERS}, "at most 50000"),
        ("/v1/completions", {"prompt": "x", **{f"x{i}": 1 for i in range(MAX_FIELDS)}}, "at most 300000"),
        *((path, body, "objects and lists; at most 50000") for path, body in EMPTY_LISTS),
        ("/v1/chat/completions", {"messages": [USER], "metadata": {"a": [""] * MAX_TEXTS}}, "texts; at most 1000000"),
        ("/v1/chat/completions", {"messages": [CALLER] * 10}, "arguments of tool calls hold 100010"),
        ("/tokenize", {"prompt": "hello " * 200_000}, "1000000 can be tokenized"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_request_needs_is_refused_without_a_stall(server: RunningServer, path: str, body: dict[str, Any], message: str) -> None:
    with loop_lag(server) as gaps:
        reply = server.http.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert message in reply.json()["error"]["message"]
    assert max(gaps) < STALL_SECONDS


def test_a_conversation_may_not_grow_beyond_it_by_its_history(server: RunningServer) -> None:
    half = [ITEM] * (MAX_MESSAGES // 2 + 1)
    kept = server.post("/v1/conversations", {"items": half}).json()["id"]
    error = server.post("/v1/responses", {"input": half, "conversation": kept}).json()["error"]
    assert "10002 entries" in error["message"]
    assert error["param"] == "input"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hello world " * 80_000}),
        ("/tokenize", {"messages": [USER] * MAX_MESSAGES}),
        ("/v1/chat/completions", {"messages": [USER] * MAX_MESSAGES}),
        ("/v1/chat/completions", {"messages": [USER, {"role": "assistant", "tool_calls": [CALL] * 20_000}, {**USER, "content": "y"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [RESULT] * 40_000}]}),
        ("/v1/responses/input_tokens", {"input": [ITEM] * MAX_MESSAGES}),
        ("/v1/completions", {"prompt": [1] * 2_000_000}),
        ("/v1/completions/render", {"prompt": ["hello world " * 1600] * 100, "truncate_prompt_tokens": 5}),
        ("/v1/completions/render", {"prompt": ["hello"] * 16_000}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(250_000)}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_large_request_does_not_hold_up_others(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    with loop_lag(server) as gaps:
        begun = time.monotonic()
        reply = server.http.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
        took = time.monotonic() - begun
    assert reply.status_code in (200, 400)
    print(path, reply.status_code, reply.text[:150], f"took {took:.2f} s, the loop was away for at most {max(gaps):.2f} s")
    assert max(gaps) < STALL_SECONDS


def test_a_prompt_that_is_cut_costs_what_is_left_of_it(server: RunningServer) -> None:
    text = "hello world " * 1_000_000
    begun = time.monotonic()
    reply = server.post("/v1/completions", {"prompt": text, "truncate_prompt_tokens": 10, "max_tokens": 1})
    assert reply.status_code == 200
    assert reply.json()["usage"]["prompt_tokens"] == 10
    last = server.fake.seen[-1].prompt_token_ids
    assert time.monotonic() - begun < 2.0
    assert (
        server.post("/v1/completions", {"prompt": "hello world " * 1000, "truncate_prompt_tokens": 10, "max_tokens": 1}).status_code == 200
    )
    assert server.fake.seen[-1].prompt_token_ids == last
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "truncate_prompt_tokens": 10, "max_tokens": 1}),
        ("/v1/responses", {"input": text, "truncation": "auto", "max_output_tokens": 1}),
        ("/v1/responses/input_tokens", {"input": text, "truncation": "auto"}),
    ):
        begun = time.monotonic()
        assert server.post(path, body).status_code == 200
        assert time.monotonic() - begun < 4.0, path
    error = server.post("/tokenize", {"messages": [{"role": "user", "content": text}]}).json()["error"]
    assert "characters" in error["message"]


def test_what_is_large() -> None:
    assert not is_large([USER] * 20)
    assert not is_large([1] * 9_000)
    assert is_large([1] * 20_000)
    assert is_large([USER] * 1000)
    assert is_large([{"role": "user", "content": "x" * 70_000}])
    assert is_large([{"role": "user", "content": [{"type": "text", "text": "x"}] * 500}])
    assert is_large("x" * 70_000)
    assert not is_large(None)
