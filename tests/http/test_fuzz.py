"""Random bodies never make a 500, and never harm the server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.frontend.http.messages.request import MessagesRequest
from octavo.frontend.http.responses.request import ResponsesRequest
from octavo.frontend.http.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.support.http_server import RunningServer, wait_until

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


schemas = st.recursive(
    st.one_of(
        scalars, st.fixed_dictionaries({"type": st.sampled_from(["object", "string", "integer", "array", "objekt", ["null", "string"], 3])})
    ),
    lambda inner: st.dictionaries(
        st.sampled_from(
            ["type", "properties", "items", "anyOf", "enum", "$ref", "$defs", "format", "pattern", "required", "minLength", "not"]
        ),
        st.one_of(inner, st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2)),
        max_size=3,
    ),
    max_leaves=8,
)
functions = st.fixed_dictionaries({"name": st.one_of(st.just("f"), values)}, optional={"parameters": schemas, "strict": values})
tools = st.lists(st.one_of(st.fixed_dictionaries({"type": st.just("function"), "function": functions}), values), min_size=1, max_size=2)
choices = st.one_of(st.sampled_from(["auto", "required", "none"]), st.just({"type": "function", "function": {"name": "f"}}), values)
formats = st.one_of(
    st.fixed_dictionaries({"type": st.just("json_schema"), "json_schema": st.fixed_dictionaries({"schema": schemas})}),
    st.fixed_dictionaries(
        {
            "type": st.just("structural_tag"),
            "format": st.fixed_dictionaries(
                {"type": st.sampled_from(["tag", "or", "regex"])},
                optional={"elements": values, "begin": values, "content": values, "pattern": values},
            ),
        }
    ),
    values,
)
flat_tools = st.lists(st.one_of(st.builds(lambda f: {"type": "function", **f}, functions), values), min_size=1, max_size=2)
claude_tools = st.lists(
    st.one_of(st.fixed_dictionaries({"name": st.just("f")}, optional={"input_schema": schemas}), values), min_size=1, max_size=2
)
items = st.one_of(
    st.just("hello"),
    st.lists(
        st.one_of(
            values,
            st.fixed_dictionaries(
                {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "x"])},
                optional={
                    "role": st.just("user"),
                    "content": values,
                    "call_id": values,
                    "name": values,
                    "output": values,
                    "arguments": values,
                },
            ),
        ),
        max_size=3,
    ),
    values,
)
blocks = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "x"]),
            "content": st.one_of(
                values,
                st.lists(
                    st.one_of(
                        values,
                        st.fixed_dictionaries(
                            {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])},
                            optional={
                                "text": values,
                                "id": values,
                                "name": values,
                                "input": values,
                                "tool_use_id": values,
                                "content": values,
                                "thinking": values,
                            },
                        ),
                    ),
                    max_size=2,
                ),
            ),
        }
    ),
    max_size=2,
)
user = st.just([{"role": "user", "content": "hi"}])

CASES = {
    "/v1/chat/completions#": st.fixed_dictionaries(
        {"messages": user},
        optional={"tools": tools, "tool_choice": choices, "response_format": formats, "guided_json": schemas, "stream": st.booleans()},
    ),
    "/v1/responses": bodies(list(ResponsesRequest.model_fields), {"input": items}),
    "/v1/responses#": st.fixed_dictionaries(
        {"input": items}, optional={"tools": flat_tools, "tool_choice": choices, "stream": st.booleans(), "background": st.booleans()}
    ),
    "/v1/messages": bodies(list(MessagesRequest.model_fields), {"messages": st.one_of(user, blocks, values), "max_tokens": st.just(5)}),
    "/v1/messages#": st.fixed_dictionaries(
        {"messages": user, "max_tokens": st.just(5)},
        optional={
            "tools": claude_tools,
            "tool_choice": st.one_of(st.just({"type": "any"}), values),
            "stream": st.booleans(),
            "output_format": formats,
        },
    ),
    "/v1/messages/count_tokens": bodies(["messages", "system", "tools", "thinking"], {"messages": st.one_of(user, blocks)}),
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
        reply = server.http.post(path.rstrip("#"), content=raw, headers={"Content-Type": "application/json"})
        assert reply.status_code in (200, 400, 404), (reply.status_code, reply.text[:300], body)
        if reply.status_code == 200:
            accepted += 1
            if reply.headers["content-type"].startswith("text/event-stream"):
                assert reply.text.endswith("data: [DONE]\n\n") or "event: " in reply.text
                assert '"code":500' not in reply.text, (reply.text, body)
                assert "event: error" not in reply.text, (reply.text, body)
            else:
                reply.json()
        else:
            error = reply.json()["error"]
            assert error["message"]
            assert len(reply.content) < 8000

    check()
    assert accepted > 0
    assert wait_until(lambda: not server.llm.live_requests())
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
    assert server.metric("vllm:num_requests_running") == 0


@LENIENT
@given(raw=st.binary(max_size=200))
def test_random_bytes(server: RunningServer, raw: bytes) -> None:
    reply = server.http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] in ("Bad Request", "BadRequestError")
