"""Random bodies never make a 500, and never harm the server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.frontend.http.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.support.http_server import RunningServer

LENIENT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(2**70), max_value=2**70),
    st.integers(min_value=-3, max_value=30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["user", "assistant", "text", "", "auto", "none", "json_schema", "hello world"]),
)
values = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)), max_leaves=12
)
messages = st.lists(
    st.one_of(values, st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool", "x"]), "content": values})), max_size=3
)


def bodies(fields: list[str], required: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    some = st.dictionaries(st.sampled_from(fields), values, max_size=3)
    return st.builds(lambda a, b: {**b, **a}, some, st.fixed_dictionaries(required))


CASES = {
    "/v1/completions": bodies(list(CompletionRequest.model_fields), {"prompt": st.one_of(st.just("hello"), st.just([20, 21]), values)}),
    "/v1/chat/completions": bodies(
        list(ChatRequest.model_fields), {"messages": st.one_of(st.just([{"role": "user", "content": "hi"}]), messages, values)}
    ),
    "/tokenize": bodies(list(TokenizeRequest.model_fields), {"prompt": st.one_of(st.just("hello"), st.text(max_size=20), values)}),
    "/detokenize": bodies(list(DetokenizeRequest.model_fields), {"tokens": st.one_of(st.lists(st.integers(-2, 300), max_size=5), values)}),
}


@pytest.mark.parametrize("path", list(CASES))
def test_random_bodies(server: RunningServer, path: str) -> None:
    accepted = 0

    @LENIENT
    @given(body=CASES[path])
    def check(body: dict[str, Any]) -> None:
        nonlocal accepted
        raw = json.dumps(body).encode()
        reply = server.http.post(path, content=raw, headers={"Content-Type": "application/json"})
        assert reply.status_code in (200, 400, 404, 501), (reply.status_code, reply.text[:300], body)
        if reply.status_code == 200:
            accepted += 1
            if reply.headers["content-type"].startswith("text/event-stream"):
                assert reply.text.endswith("data: [DONE]\n\n")
                assert '"code":500' not in reply.text, (reply.text, body)
            else:
                reply.json()
        else:
            error = reply.json()["error"]
            assert error["message"]
            assert len(reply.content) < 8000

    check()
    assert accepted > 0
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
    assert server.metric("vllm:num_requests_running") == 0


@LENIENT
@given(raw=st.binary(max_size=200))
def test_random_bytes(server: RunningServer, raw: bytes) -> None:
    reply = server.http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] in ("Bad Request", "BadRequestError")
