"""`return_progress`: streams that say how far a long prompt is, through a real engine core with small steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http_server import parse_events
from tests.support.server_process import ServerProcess, scripted_engine, server_process
from tests.support.tiny_checkpoint import write_tiny_checkpoint

STEP = 64
LENGTH = 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tmp_path = tmp_path_factory.mktemp("progress")
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", max_model_len=4096)
    engine = scripted_engine(checkpoint, tmp_path, {"default": [40, 41], "step_delay_ms": 2}, max_num_batched_tokens=STEP)
    with server_process(tmp_path, engine) as running:
        running.wait_ready()
        yield running


def events(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        raw = response.read().decode()
    return parse_events(raw)


def check(progress: list[dict[str, Any]], total: int, cached: int = 0) -> None:
    assert [p["total"] for p in progress] == [total] * len(progress)
    assert [p["cache"] for p in progress] == [cached] * len(progress)
    processed = [p["processed"] for p in progress]
    assert processed == sorted(set(processed))
    assert processed[-1] == total
    assert all((p - cached) % STEP == 0 for p in processed[:-1])
    times = [p["time_ms"] for p in progress]
    assert times == sorted(times)
    assert times[0] >= 0


def test_completions(server: ServerProcess) -> None:
    prompt = [n % 200 + 10 for n in range(LENGTH)]
    body = {"prompt": prompt, "return_progress": True, "stream_options": {"include_usage": True}}
    chunks = events(server, "/v1/completions", body)
    progress = [c["prompt_progress"] for c in chunks if "prompt_progress" in c]
    assert len(progress) > 5, "steps that are read together are one chunk, but not all of them"
    check(progress, LENGTH)
    kinds = ["prompt_progress" in c for c in chunks]
    assert kinds == sorted(kinds, reverse=True), "progress comes before text"
    assert all(c["choices"][0]["text"] == "" for c in chunks if "prompt_progress" in c)
    plain = events(server, "/v1/completions", {**body, "return_progress": False})
    assert not any("prompt_progress" in c for c in plain)
    text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"])
    assert text == "".join(c["choices"][0]["text"] for c in plain if c["choices"])
    assert chunks[-1]["usage"]["prompt_tokens"] == LENGTH
    assert chunks[-1]["usage"]["completion_tokens"] == plain[-1]["usage"]["completion_tokens"] > 0
    # The cache has most of it now.
    again = events(server, "/v1/completions", body)
    cached = again[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= LENGTH - STEP
    check([c["prompt_progress"] for c in again if "prompt_progress" in c], LENGTH, cached)


def test_chat(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "hello " * 300}], "return_progress": True, "n": 2, "seed": 1}
    chunks = events(server, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    progress = [c["prompt_progress"] for c in chunks if "prompt_progress" in c]
    check(progress, chunks[-1]["usage"]["prompt_tokens"])
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all(c["choices"][0]["delta"] == {} for c in chunks if "prompt_progress" in c)
    texts = [
        "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"] and c["choices"][0]["index"] == i)
        for i in (0, 1)
    ]
    assert texts[0]
    assert texts[1]


def test_responses(server: ServerProcess) -> None:
    body = {"input": "hello " * 200, "return_progress": True, "stream": True}
    with server.http.stream("POST", "/v1/responses", json=body) as response:
        raw = response.read().decode()
    assert raw.count("event: response.prompt_progress\n") >= 1
    assert raw.index("response.prompt_progress") < raw.index("response.output_text.delta")
    assert "event: response.completed" in raw


def test_nothing_without_a_stream(server: ServerProcess) -> None:
    reply = server.http.post("/v1/completions", json={"prompt": list(range(10, 200)), "return_progress": True})
    assert reply.status_code == 200
    assert "prompt_progress" not in reply.text
