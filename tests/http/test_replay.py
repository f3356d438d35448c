"""Cases that took other engines down, against whole server processes. The rest of them stand with what they are about: prompts, echo,
stop strings and usage in test_completions, tools in test_tools, schemas in test_structured, ids out of range in test_errors."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.http_server import wait_until
from tests.support.server_process import ServerProcess, scripted_engine, server_process
from tests.support.tiny_checkpoint import write_tiny_checkpoint

SCRIPT = {"default": [40, 41], "rules": [{"tokens": [40, 41], "cycle": True}], "step_delay_ms": 20}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("replay")
    checkpoint = write_tiny_checkpoint(folder / "model", max_model_len=8192)
    engine = scripted_engine(checkpoint, folder, SCRIPT, max_num_seqs=2, max_num_batched_tokens=64, served_model_name=["tiny"])
    with server_process(folder, engine) as process:
        process.wait_ready()
        yield process


def send(server: ServerProcess, body: dict[str, object]) -> socket.socket:
    url = httpx.URL(server.url)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock = socket.create_connection((url.host, url.port or 80))
    sock.sendall(head.encode() + data)
    return sock


def idle(server: ServerProcess) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return all(server.metric(name) == 0 for name in names)


ENDLESS: dict[str, object] = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True}


@pytest.mark.parametrize("where", ["decoding", "in a long prefill", "queued"])
def test_a_killed_client_that_does_not_stream_costs_nothing_more(server: ServerProcess, where: str) -> None:
    assert wait_until(lambda: idle(server))
    # 64 tokens of prompt a step of 20 ms: 6,000 tokens take two seconds.
    bodies = {"decoding": ENDLESS, "in a long prefill": {**ENDLESS, "prompt": "a b" * 2000, "max_tokens": 100}, "queued": ENDLESS}
    sockets = [send(server, ENDLESS) for _ in range(2)] if where == "queued" else []
    if sockets:
        assert wait_until(lambda: server.metric("vllm:num_requests_running") == 2)
    sockets.append(send(server, bodies[where]))
    state = "waiting" if where == "queued" else "running"
    assert wait_until(lambda: server.metric(f"vllm:num_requests_{state}") == 1)
    time.sleep(0.3)
    if where == "queued":  # it alone goes; those that run do not notice
        sockets.pop().close()
        assert wait_until(lambda: server.metric("vllm:num_requests_waiting") == 0, 1.5)
        assert server.metric("vllm:num_requests_running") == 2
    for sock in sockets:
        sock.close()
    began = time.monotonic()
    assert wait_until(lambda: idle(server)), "blocks are given back"
    assert time.monotonic() - began < 2.5
    reply = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert reply.status_code == 200


def test_a_server_goes_on_after_every_bad_request(server: ServerProcess, tmp_path: Path) -> None:
    good = {"prompt": "x", "max_tokens": 2}
    bad: list[dict[str, object]] = [
        {"prompt": []},
        {"prompt": ""},
        {"prompt": [""]},
        {"prompt": "x", "logit_bias": {"999999999": 1}},
        {"prompt": "x", "stop_token_ids": [10**9], "min_tokens": 1},
        {"prompt": "x", "stop_token_ids": [-1], "min_tokens": 1},
        {"prompt": "x", "structured_outputs": {"json": {"type": "objekt"}}},
        {"prompt": "x", "structured_outputs": {"regex": "(((("}},
        {"prompt": "x", "structured_outputs": {"grammar": 'start: start "a"'}},
        {"prompt": "x", "max_tokens": 10**6, "truncate_prompt_tokens": 0},
    ]
    pids = server.children()
    for body in bad:
        reply = server.http.post("/v1/completions", json=body)
        assert reply.status_code == 400, (body, reply.text)
        assert reply.json()["error"]["param"]
        assert server.http.post("/v1/completions", json=good).status_code == 200
    dead_end = {"grammar": "start: W X\nW: /[a-z]{5}/\nX: /[^\\s\\S]/"}
    reply = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 20, "structured_outputs": dead_end})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "structured_outputs"), reply.text
    assert set(pids) <= set(server.children()), "the engine was restarted"
