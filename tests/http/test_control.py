"""Rendering without generating, and aborting."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from octavo.frontend.http.schemas import ChatRequest, CompletionRequest
from tests.support.http_server import RunningServer, wait_until
from tests.support.scripts import token_ids

HI = [{"role": "user", "content": "hi"}]


def test_render_chat_is_what_chat_sends(server: RunningServer) -> None:
    before = len(server.fake.seen)
    body = {"messages": HI, "temperature": 0.25, "max_tokens": 7, "return_token_ids": True}
    rendered = server.post("/v1/chat/completions/render", body).json()
    assert len(server.fake.seen) == before
    reply = server.post("/v1/chat/completions", body).json()
    assert rendered["prompt_token_ids"] == reply["prompt_token_ids"]
    assert rendered["prompt_tokens"] == len(reply["prompt_token_ids"])
    assert rendered["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (rendered["sampling_params"]["temperature"], rendered["sampling_params"]["max_tokens"]) == (0.25, 7)
    filled = server.post("/v1/chat/completions/render", {"messages": HI}).json()
    assert filled["sampling_params"]["max_tokens"] == 512 - filled["prompt_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/v1/completions/render"])
def test_render_shows_all_sampling_parameters_by_the_names_of_requests(server: RunningServer, path: str) -> None:
    chat = "chat" in path
    prompt: dict[str, Any] = {"messages": HI} if chat else {"prompt": "a"}
    fields = ChatRequest.model_fields if chat else CompletionRequest.model_fields

    def shown(**body: Any) -> dict[str, Any]:
        reply = server.post(path, {**prompt, **body}).json()
        return (reply if chat else reply["data"][0])["sampling_params"]

    plain = shown()
    assert plain.keys() <= fields.keys()
    assert (plain["temperature"], plain["top_p"], plain["top_k"], plain["n"], plain["stop"], plain["seed"]) == (1.0, 1.0, 0, 1, None, None)
    given = {"temperature": 0.5, "top_p": 0.25, "min_p": 0.1, "seed": 3, "logit_bias": {"3": 1.0}, "stop": ["x"], "ignore_eos": True}
    assert given.items() <= shown(**given).items()


def test_render_completions(server: RunningServer) -> None:
    data = server.post("/v1/completions/render", {"prompt": ["a", "b"]}).json()["data"]
    assert [d["prompt"] for d in data] == ["a", "b"]
    assert data[0]["sampling_params"]["max_tokens"] == 16


def test_render_refuses_what_chat_refuses(server: RunningServer) -> None:
    assert server.post("/v1/chat/completions/render", {"messages": HI, "temperature": -1}).status_code == 400
    assert server.post("/v1/chat/completions/render", {"messages": []}).status_code == 400


def test_abort_ends_a_request_with_what_there_is(server: RunningServer) -> None:
    server.script("forever", token_ids("z") * 400, delay=0.01)
    replies: list[dict[str, Any]] = []
    body = {"prompt": "forever", "max_tokens": 400, "request_id": "mine"}
    thread = threading.Thread(target=lambda: replies.append(server.post("/v1/completions", body).json()))
    thread.start()
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
    assert server.post("/abort", {"request_ids": ["cmpl-mine", "cmpl-other"]}).json() == {"aborted": ["cmpl-mine"]}
    thread.join(5)
    assert not thread.is_alive()
    assert replies[0]["choices"][0]["finish_reason"] == "abort"
    assert len(replies[0]["choices"][0]["text"]) < 400
    assert server.metric("vllm:num_requests_running") == 0
    assert server.post("/abort", {"request_id": "cmpl-mine"}).json() == {"aborted": []}


def test_abort_ends_a_stream(server: RunningServer) -> None:
    server.script("forever", token_ids("z") * 400, delay=0.01)
    body = {"messages": [{"role": "user", "content": "forever"}], "request_id": "chat", "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert server.post("/abort_requests", {"request_ids": ["chatcmpl-chat"]}).json() == {"aborted": ["chatcmpl-chat"]}
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"abort"' in rest[-2]


def test_abort_of_many_prompts(server: RunningServer) -> None:
    server.script("forever", token_ids("z") * 400, delay=0.01)
    replies: list[dict[str, Any]] = []
    body = {"prompt": ["forever"] * 3, "n": 100, "max_tokens": 400, "request_id": "many"}
    thread = threading.Thread(target=lambda: replies.append(server.post("/v1/completions", body).json()))
    thread.start()
    assert wait_until(lambda: server.metric("vllm:num_requests_running") >= 200)
    assert server.post("/abort", {"request_id": "cmpl-many"}).json() == {"aborted": ["cmpl-many"]}
    thread.join(5)
    assert not thread.is_alive()
    assert "aborted" in replies[0]["error"]["message"]
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 0)


def test_abort_needs_ids(server: RunningServer) -> None:
    assert server.post("/abort", {}).status_code == 400
    assert server.post("/abort", {"request_ids": [3]}).status_code == 400
