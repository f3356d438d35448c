"""A client that goes away stops costing anything: streaming or not, queued, in prefill or decoding. And malformed HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time

import pytest

from octavo.frontend.http.sse import cancel
from tests.support.http_server import RunningServer, wait_until

CHAT = "/v1/chat/completions"


def raw_post(server: RunningServer, path: str, body: dict[str, object]) -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.sendall(head.encode() + data)
    return sock


def reset(sock: socket.socket) -> None:
    """Close with a RST, as a killed client with unread data does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("abrupt", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
@pytest.mark.parametrize("where", ["decode", "before the first token"])
def test_disconnect_aborts(server: RunningServer, path: str, stream: bool, abrupt: bool, where: str) -> None:
    # A rule with a long delay is a request that still waits in the queue or computes its prompt.
    server.script("forever", [30] * 400, delay=0.02 if where == "decode" else 60)
    aborted = len(server.fake.aborted)
    body: dict[str, object] = {"max_tokens": 400, "ignore_eos": True, "stream": stream, "n": 2}
    body |= {"prompt": "forever"} if path != CHAT else {"messages": [{"role": "user", "content": "forever"}]}
    sock = raw_post(server, path, body)
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 2)
    if stream and where == "decode":
        assert b"200 OK" in sock.recv(100)
    reset(sock) if abrupt else sock.close()
    began = time.monotonic()
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert time.monotonic() - began < 1.5
    assert len(server.fake.aborted) > aborted
    assert server.llm.live_requests() == 0
    assert wait_until(lambda: server.http.get("/load").json()["server_load"] == 0)


async def test_work_that_misses_its_cancellation_is_cancelled_again() -> None:
    """As `asyncio.wait_for` makes it miss one that comes while what it waits for is being done."""
    ends: list[str] = []

    async def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        try:
            await asyncio.sleep(10)
        finally:
            ends.append("cancelled")

    async def fails() -> None:
        raise ValueError("never looked at")

    tasks = [asyncio.ensure_future(work()), asyncio.ensure_future(fails())]
    await asyncio.sleep(0)
    began = time.monotonic()
    await cancel(*tasks, again=0.1)
    assert ends == ["cancelled"]
    assert 0.05 < time.monotonic() - began < 5


def test_disconnect_of_a_batch_aborts_every_prompt(server: RunningServer) -> None:
    server.script("forever", [30] * 400, delay=0.02)
    sock = raw_post(server, "/v1/completions", {"prompt": ["forever"] * 5, "max_tokens": 400})
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 5)
    sock.close()
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 0)


def test_disconnect_counts_as_abort_and_is_logged(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="octavo.request")
    before = server.metric("vllm:request_success_total", finished_reason="abort")
    server.script("forever", [30] * 400, delay=0.02)
    sock = raw_post(server, "/v1/completions", {"prompt": "forever", "max_tokens": 400, "request_id": "gone"})
    assert wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
    sock.close()
    assert wait_until(lambda: server.metric("vllm:request_success_total", finished_reason="abort") == before + 1)
    assert wait_until(lambda: any(r.__dict__.get("id") == "cmpl-gone" and r.__dict__.get("reason") == "disconnect" for r in caplog.records))


def test_disconnect_in_the_middle_of_a_body(server: RunningServer) -> None:
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")
    time.sleep(0.05)
    sock.close()
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%ff%fe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET //v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models/%0a%0d HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xff\xfe\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xff\r\nContent-Length: 15\r\n\r\n" + b'{"prompt": "x"}',
    ],
)
def test_malformed_http(server: RunningServer, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(raw)
        sock.settimeout(2)
        try:
            reply = sock.recv(65536)
        except (TimeoutError, ConnectionResetError):
            reply = b""
    assert b" 500 " not in reply.split(b"\r\n", 1)[0]
    assert b"Traceback" not in reply
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    get = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(get + get + last)
        reply = b""
        while part := sock.recv(65536):
            reply += part
    assert reply.count(b"200 OK") == 3


def test_a_slow_reader_gets_everything(server: RunningServer) -> None:
    server.script("flood", [30] * 200)
    sock = raw_post(server, "/v1/completions", {"prompt": "flood", "max_tokens": 200, "stream": True, "logprobs": 5})
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    received = b""
    while b"[DONE]" not in received:
        part = sock.recv(2048)
        assert part
        received += part
    sock.close()
    assert received.count(b"token_logprobs") >= 1
    assert b'"finish_reason":"length"' in received
