"""Every field of every route that takes JSON, with every kind of value: an answer or a bounded 400, soon, and never a 5xx."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.frontend.http.settings import ServerSettings
from tests.support.http_server import RunningServer, running_server, wait_until
from tests.support.server_process import ServerProcess

HI = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/completions/render": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 3},
    "/v1/chat/completions/render": {"messages": HI},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/conversations": {},
    "/v1/conversations/{conversation_id}": {"metadata": {}},
    "/v1/conversations/{conversation_id}/items": {"items": [{"type": "message", "role": "user", "content": "hi"}]},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions"},
    "/v1/embeddings": {"input": "hi"},
    "/pooling": {"input": "hi"},
    "/classify": {"input": "hi"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/abort": {"request_ids": ["x"]},
}
"""A body that each route takes. One of a route with a place in its path is sent to one that is not there, too."""

DEEP: Any = 1
for _ in range(60):
    DEEP = {"a": [DEEP]}
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    7,
    2**31,
    -(2**63),
    10**300,
    0.5,
    -1e308,
    5e-324,
    "",
    "x",
    "auto",
    "\0",
    "\U0001f600\u202e",
    "9" * 5000,
    "{{ x",
    "x" * 20_000,
    [],
    [None],
    [0, -1, 10**300],
    ["", "x", "\0"],
    [[]],
    [{}],
    [True] * 2000,
    {},
    {"": ""},
    {"type": "x"},
    {"type": "object"},
    {"type": {}, "name": [], "id": 5, "content": {}, "function": 3},
    {"1": 1, "2": None},
    {"9" * 5000: 1},
    DEEP,
]


def fields_of(schema: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the fields that an OpenAPI schema names, those of objects in it too."""
    for name, part in schema.get("properties", {}).items():
        yield (*before, name)
        for inner in (part, part.get("items", {}), *part.get("anyOf", ())):
            yield from fields_of(inner, (*before, name))


def with_field(body: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    name, *rest = path
    inner = body.get(name)
    return {**body, name: with_field(inner if isinstance(inner, dict) else {}, tuple(rest), value) if rest else value}


def bodies_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Route -> schema of its JSON body."""
    found = {}
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content:
            found[path] = content["application/json"]["schema"]
    return found


@pytest.fixture(scope="module")
def trusting(checkpoint: Path) -> Iterator[RunningServer]:
    """With everything switched on that makes more fields mean something."""
    with running_server(checkpoint, ServerSettings(trust_request_chat_template=True, reasoning_parser="think")) as server:
        yield server


def sent(server: RunningServer | ServerProcess, path: str, body: Any) -> httpx.Response:
    """One request; what holds for all of them is checked."""
    began = time.monotonic()
    raw = json.dumps(body).encode()
    reply = server.http.post(path, content=raw, headers={"Content-Type": "application/json"})
    shown = (path, raw[:300], reply.status_code, reply.text[:300])
    assert reply.status_code in (200, 400, 404), shown
    assert time.monotonic() - began < 10, shown
    if reply.status_code != 200:
        assert reply.json()["error"]["message"], shown
        assert len(reply.content) < 4000, shown
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert "event: error" not in reply.text, shown
        assert '"code":500' not in reply.text, shown
    else:
        reply.json()
    return reply


def test_no_route_is_forgotten(trusting: RunningServer) -> None:
    assert set(bodies_of(trusting.http.get("/openapi.json").json())) == set(GOOD)


@pytest.mark.parametrize("path", list(GOOD))
def test_every_field_with_every_kind_of_value(trusting: RunningServer, path: str) -> None:
    server = trusting
    schema = bodies_of(server.http.get("/openapi.json").json())[path]
    where = [path]
    if "{conversation_id}" in path:
        where = [path.replace("{conversation_id}", server.post("/v1/conversations", {}).json()["id"]), path]
    statuses = {}
    for place in where:
        statuses[place] = sent(server, place, GOOD[path]).status_code
        for field in (*fields_of(schema), ("no_such_field",)):
            for value in VALUES:
                sent(server, place, with_field(GOOD[path], field, value))
    pools = path in ("/v1/embeddings", "/pooling", "/classify", "/v1/score", "/v1/rerank")
    assert statuses[where[0]] == (400 if pools or path == "/v1/batches" else 200)
    for value in VALUES:
        if not isinstance(value, dict):
            assert sent(server, where[0], value).status_code == 400
    assert wait_until(lambda: not server.llm.live_requests())
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
RICH: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                {"role": "user", "content": [{"type": "text", "text": "u"}, {"type": "text", "text": "v"}], "name": "n"},
                {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "x"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "stream_options": {"include_usage": True},
            "stream": True,
            "max_tokens": 2,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
                {"role": "function", "name": "f", "content": "x"},
            ],
            "functions": [{"name": "f", "parameters": SCHEMA}],
            "function_call": {"name": "f"},
            "logit_bias": {"5": 1.0},
            "max_tokens": 2,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [*HI, {"role": "assistant", "content": "begun"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            "documents": [{"title": "t", "text": "x"}],
            "chat_template_kwargs": {"k": {"v": 1}},
            "max_tokens": 2,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": HI,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
            "max_tokens": 2,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": HI,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            "max_tokens": 2,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": HI,
            "structured_outputs": {
                "structural_tag": {
                    "type": "structural_tag",
                    "format": {
                        "type": "triggered_tags",
                        "triggers": ["<a"],
                        "tags": [{"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"}],
                    },
                }
            },
            "max_tokens": 2,
        },
    ),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "structured_outputs": {"choice": ["a", "b"]}, "stop": ["x"], "max_tokens": 2}),
    (
        "/v1/completions",
        {"prompt": ["a", "b"], "stream": True, "stream_options": {"continuous_usage_stats": True}, "n": 2, "max_tokens": 2},
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}], "content": []},
                {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "o"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "t", "annotations": []}]},
                {"role": "developer", "content": "d"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
            "stream": True,
            "max_output_tokens": 2,
        },
    ),
    (
        "/v1/messages",
        {
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "u"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": ""},
                        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "x"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "r"}]},
                        {"type": "document", "title": "d", "source": {"type": "text", "data": "x"}},
                    ],
                },
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "metadata": {"user_id": "u"},
            "stream": True,
            "max_tokens": 2,
        },
    ),
    (
        "/v1/conversations",
        {"items": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]}], "metadata": {"k": "v"}},
    ),
    ("/tokenize", {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}], "chat_template_kwargs": {"k": 1}}),
]
FEW: list[Any] = [None, True, -1, 10**300, 0.5, "", "x", "\0", "9" * 5000, [], [None], ["x"], [[]], [{}], {}, {"": ""}, {"type": "x"}, DEEP]


def places_in(node: Any, before: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    for key, inner in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*before, key)
        yield from places_in(inner, (*before, key))


def put(node: Any, place: tuple[str | int, ...], value: Any) -> Any:
    """`node` with something else at `place`."""
    if not place:
        return value
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[place[0]] = put(node[place[0]], place[1:], value)
    return copy


@pytest.mark.parametrize("number", range(len(RICH)))
def test_every_part_of_a_body_with_every_kind_of_value(trusting: RunningServer, number: int) -> None:
    path, body = RICH[number]
    assert sent(trusting, path, body).status_code == 200
    for place in places_in(body):
        for value in FEW:
            sent(trusting, path, put(body, place, value))
    assert wait_until(lambda: not trusting.llm.live_requests())
    assert trusting.post("/v1/completions", {"prompt": "x"}).status_code == 200
