"""Error replies: their shape, their bounds, and a server that goes on after every one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import NO_MEMORY, EngineDead, InvalidRequest, Overloaded, RequestFailed
from octavo.frontend.http.settings import ServerSettings
from tests.support.fake_async_llm import overloaded
from tests.support.http_server import RunningServer, parse_events, running_server

PATHS = ("/v1/completions", "/v1/chat/completions")
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", "0.5"),
        ("temperature", True),
        ("stream", "yes"),
        ("stream", 1),
        ("ignore_eos", "true"),
        ("include_stop_str_in_output", 0),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("stop_token_ids", [True]),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 10**6),
        ("n", "many"),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("min_tokens", -1),
        ("seed", 2**63),
        ("seed", "x"),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", [10**9]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["x"]),
        ("logit_bias", {"100000": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"3": "much"}),
        ("logit_bias", {"3": None}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [10**9]),
        ("bad_words", [""]),
        ("logprob_token_ids", [10**9]),
        ("prompt_logprobs", -2),
        ("prompt_logprobs", 10**6),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncation_side", "up"),
        ("cache_salt", ""),
        ("cache_salt", "x" * 1025),
        ("stream_interval", 0),
        ("priority", 2**40),
        ("best_of", 3),
        ("stream_options", {"include_usage": True}),
        ("request_id", "a\nb"),
        ("request_id", "x" * 1000),
        ("user", 3),
    ],
)
def test_bad_parameters_are_named(server: RunningServer, path: str, field: str, value: Any) -> None:
    error = error_of(server.post(path, {**GOOD[path], field: value}), 400)
    assert error["code"] == 400
    assert error["param"] == field
    assert len(error["message"]) < 1000
    assert server.post(path, GOOD[path]).status_code == 200


def test_out_of_vocabulary_ids_with_min_tokens(server: RunningServer) -> None:
    for ids in ([10**9], [-1]):
        error = error_of(server.post("/v1/completions", {"prompt": "x", "stop_token_ids": ids, "min_tokens": 1}), 400)
        assert error["param"] == "stop_token_ids"
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": 3}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt"),
        ({"prompt": [True, False]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9], "echo": True, "max_tokens": 0}, "prompt"),
        ({"prompt": "x", "logprobs": 1.5}, "logprobs"),
        ({"prompt": "x", "logprobs": "all"}, "logprobs"),
        ({"prompt": "x", "logprobs": -2}, "logprobs"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": ["x"] * 100, "n": 200}, "n"),
        ({"prompt": "x", "temperature": 0, "n": 2}, "n"),
        ({"prompt": "x", "min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"prompt": "x", "allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2}, "min_tokens"),
        ({"prompt": "x", "use_beam_search": True, "n": 2, "length_penalty": 1e308}, "length_penalty"),
        ({"prompt": "x", "use_beam_search": True, "n": 2, "length_penalty": -1e308}, "length_penalty"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_completions(server: RunningServer, body: dict[str, Any], param: str, stream: bool) -> None:
    error = error_of(server.post("/v1/completions", {"stream": stream, **body}), 400)
    assert error["param"] == param


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_over_the_context(server: RunningServer, path: str, stream: bool) -> None:
    long = "z" * 600
    body = {"prompt": long} if path == "/v1/completions" else {"messages": [{"role": "user", "content": long}]}
    error = error_of(server.post(path, {**body, "max_tokens": 7, "stream": stream}), 400)
    assert error["type"] == "BadRequestError"
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == next(iter(body)), "the field that the client gave"
    prompt_tokens = 600 if path == "/v1/completions" else 600 + len(server.tokens("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"))
    for number in (512, prompt_tokens, 7):
        assert str(number) in error["message"]


def test_text_far_over_the_context_is_refused_before_it_is_tokenised(server: RunningServer) -> None:
    error = error_of(server.post("/v1/completions", {"prompt": "hello " * 1_000_000}), 400)
    assert error["code"] == "context_length_exceeded"
    assert server.post("/v1/completions", {"prompt": "hello " * 100_000, "truncate_prompt_tokens": 5}).status_code == 200


@pytest.mark.parametrize("field", [{}, {"max_completion_tokens": 3}])
@pytest.mark.parametrize("size", [9_000_000, 20_000_000])
def test_chats_far_over_the_context_are_not_the_templates_fault(server: RunningServer, size: int, field: dict[str, Any]) -> None:
    """Whether the template is stopped at the size or not: the messages are what is too long."""
    half = {"role": "user", "content": "z" * (size // 2)}
    error = error_of(server.post("/v1/chat/completions", {"messages": [half, half], **field}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "512 tokens" in error["message"]
    cut = server.post("/v1/chat/completions", {"messages": [half, half], "truncate_prompt_tokens": 5, **field})
    if size < 10_000_000:
        assert cut.status_code == 200, cut.text
    else:  # more than is ever rendered, so that nothing can be cut
        assert error_of(cut, 400)["code"] == "context_length_exceeded"
    for path, body in (("/v1/messages", {"max_tokens": 3, "messages": [half, half]}), ("/v1/responses", {"input": "z" * size})):
        reply = server.post(path, body)
        assert reply.status_code == 400
        assert "512 tokens" in reply.json()["error"]["message"], path


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"   ",
        b"{",
        b"nonsense",
        b"[1, 2]",
        b'"text"',
        b"null",
        b"3",
        b'{"prompt": "x",}',
        b'{"prompt": "x"} trailing',
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": -Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "n": 1, "n": 2}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "extra": {"\\udc00": 1}}',
        b'{"prompt": "x", "extra": ' + b"[" * 200 + b"]" * 200 + b"}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        '{"prompt": "x"}'.encode("utf-16"),
    ],
)
@pytest.mark.parametrize("path", [*PATHS, "/tokenize"])
def test_unreadable_bodies(server: RunningServer, path: str, raw: bytes) -> None:
    error = error_of(server.http.post(path, content=raw, headers={"Content-Type": "application/json"}), 400)
    assert error["type"] == "Bad Request"
    assert len(error["message"]) < 500
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_utf8_with_a_byte_order_mark_and_escapes_is_fine(server: RunningServer) -> None:
    raw = b"\xef\xbb\xbf" + json.dumps({"prompt": "smile \N{GRINNING FACE}", "echo": True, "max_tokens": 0}).encode()
    assert b"\\ud83d" in raw
    reply = server.http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json; charset=utf-8"})
    assert reply.json()["choices"][0]["text"] == "smile \N{GRINNING FACE}"


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"])
def test_other_content_types_are_refused(server: RunningServer, content_type: str) -> None:
    reply = server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": content_type})
    assert "application/json" in error_of(reply, 400)["message"]


def test_compressed_bodies_are_refused(server: RunningServer) -> None:
    for encoding in ("gzip", "br", "zork"):
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        reply = server.http.post("/v1/completions", content=b"\x1f\x8b\x08", headers=headers)
        assert "not compressed" in error_of(reply, 400)["message"]
    headers = {"Content-Type": "application/json", "Content-Encoding": "identity"}
    assert server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers).status_code == 200


def test_a_small_bad_body_gets_a_small_reply(server: RunningServer) -> None:
    bad = {
        "messages": "x" * 4000,
        "stop_token_ids": ["y" * 50] * 500,
        "tools": [1] * 500,
        "n": "z" * 4000,
        "temperature": {"a": ["b"] * 900},
    }
    bad |= dict.fromkeys(("top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "logprobs", "echo"), "w" * 500)
    reply = server.post("/v1/chat/completions", bad)
    error = error_of(reply, 400)
    assert error["type"] == "Bad Request"
    assert "more" in error["message"]
    assert len(reply.content) < 4000


def test_large_bodies_are_refused_with_the_limit(checkpoint: Path) -> None:
    with running_server(checkpoint, ServerSettings(max_body_bytes=10_000)) as server:
        big = json.dumps({"prompt": "x" * 20_000}).encode()
        headers = {"Content-Type": "application/json"}
        assert "10000 bytes" in error_of(server.http.post("/v1/completions", content=big, headers=headers), 413)["message"]

        def chunks() -> Any:
            for i in range(0, len(big), 1000):
                yield big[i : i + 1000]

        error_of(server.http.post("/v1/completions", content=chunks(), headers=headers), 413)
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize"])
def test_unknown_model(server: RunningServer, path: str) -> None:
    body = {**GOOD.get(path, {"prompt": "x"}), "tokens": [3], "model": "gpt-5"}
    error = error_of(server.post(path, body), 404)
    assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)
    assert "gpt-5" in error["message"]
    assert "tiny" in error["message"]
    error_of(server.http.get("/v1/models/gpt-5"), 404)


def test_unknown_routes_and_methods(server: RunningServer) -> None:
    assert error_of(server.http.get("/v1/nothing"), 404)["code"] == 404
    assert error_of(server.http.get("/v1/completions"), 405)["code"] == 405
    assert server.http.get("/v1/completions").headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/v1/moderations", "/v1/audio/speech"])
def test_routes_that_are_not_there_yet(server: RunningServer, path: str) -> None:
    error = error_of(server.post(path, {"input": "x", "model": "tiny"}), 501)
    assert (error["type"], error["code"]) == ("NotImplementedError", 501)


def test_full_queue_is_429_with_retry_after(server: RunningServer) -> None:
    server.fake.refuse = overloaded()
    try:
        for path in PATHS:
            for stream in (False, True):
                reply = server.post(path, {**GOOD[path], "stream": stream})
                error_of(reply, 429)
                assert reply.headers["retry-after"] == "3"
    finally:
        server.fake.refuse = None
    assert server.metric("vllm:admission_rejections_total") >= 4


def test_duplicate_live_request_id(server: RunningServer) -> None:
    server.script("slow", [30] * 50, delay=0.02)
    body = {"prompt": "slow", "request_id": "mine", "max_tokens": 50}
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as first:
        assert first.status_code == 200
        error = error_of(server.post("/v1/completions", body), 400)
        assert error["param"] == "request_id"
        assert "cmpl-mine" in first.read().decode()
    assert server.post("/v1/completions", {**body, "max_tokens": 1}).json()["id"] == "cmpl-mine"


def test_header_ids_may_repeat_and_may_be_odd(server: RunningServer) -> None:
    server.script("slow", [30] * 50, delay=0.02)
    body = {"prompt": "slow", "max_tokens": 50, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "trace"}) as first:
        second = server.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "trace"})
        assert second.json()["id"].startswith("cmpl-trace-")
        assert '"id":"cmpl-trace"' in first.read().decode()
    odd = server.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": b"\xff" * 10})
    assert odd.status_code == 200


def test_a_batch_waits_for_room_once_it_has_begun(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = server.llm.submit, 0

    async def submit(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (3, 4, 6):
            raise Overloaded("full", retry_after=0.01)
        return await real(*args, **kwargs)

    monkeypatch.setattr(server.llm, "submit", submit)
    reply = server.post("/v1/completions", {"prompt": ["a", "b", "c", "d"], "n": 2})
    assert [c["text"] for c in reply.json()["choices"]] == ["hello world"] * 8
    assert calls == 7


@pytest.mark.parametrize("path", PATHS)
def test_a_request_that_fails_in_the_engine(server: RunningServer, path: str) -> None:
    server.script("", "hello world", delay=0.005, fail_at=2)
    error = error_of(server.post(path, GOOD[path]), 500)
    assert error["type"] == "InternalServerError"
    assert "not finite" in error["message"]
    with server.http.stream("POST", path, json={**GOOD[path], "stream": True}) as response:
        assert response.status_code == 200
        events = parse_events(response.read().decode())
    assert "not finite" in events[-1]["error"]["message"]
    assert events[-1]["error"]["code"] == 500
    server.fake.rules.clear()
    assert server.post(path, GOOD[path]).status_code == 200


def test_unexpected_errors_hide_their_insides(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("secret detail /etc/passwd")

    monkeypatch.setattr(server.llm, "submit", explode)
    for path in PATHS:
        for stream in (False, True):
            reply = server.post(path, {**GOOD[path], "stream": stream})
            error = error_of(reply, 500)
            assert error["type"] == "InternalServerError"
            assert "secret" not in reply.text
            assert "Traceback" not in reply.text
    assert "secret detail" in caplog.text


def test_dead_engine(checkpoint: Path) -> None:
    with running_server(checkpoint) as server:
        assert server.http.get("/health").status_code == 200
        server.loop.call_soon_threadsafe(server.fake.die)
        for path in PATHS:
            error = error_of(server.post(path, GOOD[path]), 503)
            assert "engine" in error["message"].lower()
        health = server.http.get("/health")
        assert (health.status_code, health.content) == (503, b"")
        assert server.http.get("/live").status_code == 200
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/metrics").status_code == 200
        server.fake.state = "closed"


def test_hung_engine(server: RunningServer) -> None:
    server.fake.step_age = 301.0
    try:
        assert server.http.get("/health").status_code == 503
        reply = server.http.get("/ready")
        assert (reply.status_code, reply.json()["ready"]) == (503, False)
        assert "301 seconds" in reply.json()["reason"]
        assert server.http.get("/live").status_code == 200
    finally:
        server.fake.step_age = 0.0
    server.fake.state = "restarting"
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ready").status_code == 503
    server.fake.state = "running"
    assert server.http.get("/ready").status_code == 200


def test_error_classes_without_a_message_still_say_something() -> None:
    from octavo.frontend.http.errors import describe

    assert describe(EngineDead()).message
    for error in (RequestFailed(NO_MEMORY), MemoryError(), ImportError("x.so: failed to map segment from shared object")):
        reply = describe(error)
        assert (reply.status, reply.message, reply.headers) == (503, NO_MEMORY, {"Retry-After": "5"})
    assert describe(RequestFailed("something else")).status == 500
    assert describe(InvalidRequest("bad \ud800 text")).body()


@pytest.mark.parametrize(
    ("method", "path", "body", "word"),
    [
        ("POST", "/v1/completions", {"prompt": "x", "prompt_embeds": "AA=="}, "prompt_embeds"),
        ("POST", "/v1/completions/render", {"prompt": "x", "prompt_embeds": "AA=="}, "prompt_embeds"),
        (
            "POST",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "repetition_detection": {}},
            "repetition_detection",
        ),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": {}}, "kv_transfer_params"),
        ("POST", "/v1/responses", {"input": "x", "prompt": {"id": "y"}}, "prompt"),
    ],
)
def test_a_field_that_is_not_done_yet_is_no_fault_of_the_server(
    server: RunningServer, method: str, path: str, body: dict[str, Any], word: str
) -> None:
    error = error_of(server.http.request(method, path, json=body), 400)
    assert (error["type"], error["code"]) == ("NotImplementedError", 400)
    assert word in error["message"]
    assert error["param"] in (word, "input")


@pytest.mark.parametrize(
    "item", [5, {"type": "x"}, {"role": "x"}, {"role": "user", "content": 5}, {"type": "function_call"}, {"type": "item_reference"}]
)
def test_errors_about_items_name_the_field_that_holds_them(server: RunningServer, item: Any) -> None:
    assert error_of(server.post("/v1/responses", {"input": [item]}), 400)["param"] == "input"
    assert error_of(server.post("/v1/conversations", {"items": [item]}), 400)["param"] == "items"
    kept = server.post("/v1/conversations", {}).json()["id"]
    assert error_of(server.post(f"/v1/conversations/{kept}/items", {"items": [item]}), 400)["param"] == "items"
    error = error_of(server.post("/v1/responses", {"input": "x", "conversation": "nope"}), 404)
    assert error["param"] == "conversation"


def test_a_kept_response_cannot_be_streamed(server: RunningServer) -> None:
    kept = server.post("/v1/responses", {"input": "x"}).json()["id"]
    assert error_of(server.http.get(f"/v1/responses/{kept}?stream=true"), 400)["type"] == "NotImplementedError"
    assert error_of(server.http.get("/v1/responses/resp_none?stream=true"), 404)["param"] == "response_id"


def test_several_slashes_before_a_path_are_one(server: RunningServer) -> None:
    body = {"prompt": "hi", "max_tokens": 1}
    assert server.http.post(f"{server.http.base_url}".rstrip("/") + "//v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/responses/compact"), ("GET", "/v1/chat/completions")])
def test_known_routes_that_are_not_here_say_so(server: RunningServer, method: str, path: str) -> None:
    reply = server.http.request(method, path)
    assert reply.status_code == 501
    assert f"{method} {path}" in reply.json()["error"]["message"]
