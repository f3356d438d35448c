"""/invocations is each of the routes, by what the body holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http_server import RunningServer, wait_until

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "kind"),
    [({"messages": HI}, "chat.completion"), ({"prompt": "hi"}, "text_completion"), ({"input": "hi"}, "response")],
)
def test_the_body_says_which_route_is_meant(server: RunningServer, body: dict[str, Any], kind: str) -> None:
    server.script("", "hello world")
    reply = server.post("/invocations", body)
    assert (reply.status_code, reply.json()["object"]) == (200, kind)


def test_streams(server: RunningServer) -> None:
    server.script("", "hello world")
    said = [event["choices"][0]["delta"].get("content") or "" for event in server.events("/invocations", {"messages": HI})]
    assert "".join(said) == "hello world"


@pytest.mark.parametrize(
    ("content", "param"),
    [({"query": "x"}, "messages"), ({"messages": HI, "temperature": -1}, "temperature"), ({}, "messages"), ("{", None)],
)
def test_errors_are_those_of_the_route(server: RunningServer, content: Any, param: str | None) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    reply = server.http.post("/invocations", content=text, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_leaving_ends_the_request(server: RunningServer) -> None:
    server.script("forever", [40] * 400, delay=0.02)
    with server.http.stream("POST", "/invocations", json={"prompt": "forever", "max_tokens": 400, "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
