"""Clients that are slow, silent, greedy or many: none of them holds anything for long, or keeps others from being served."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.http.test_server import FOREVER, is_idle
from tests.support.http_server import wait_until
from tests.support.server_process import ServerProcess, scripted_engine, server_process
from tests.support.tiny_checkpoint import write_tiny_checkpoint

TIMEOUT = 1.0
SCRIPT = {
    "rules": [
        {"prompt_contains_ids": [3, 3], "tokens": [30], "cycle": True, "delay_ms": 10},
        {"prompt_contains_ids": [4, 4], "tokens": [30, 31, 32], "cycle": True},
    ],
    "default": [40, 41],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tmp_path = tmp_path_factory.mktemp("hostile")
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", max_model_len=1 << 16)
    engine = scripted_engine(checkpoint, tmp_path, SCRIPT, max_num_seqs=16)
    with server_process(tmp_path, engine, client_timeout=TIMEOUT, max_body_bytes=1 << 20) as running:
        running.wait_ready()
        yield running


@contextlib.contextmanager
def connected(server: ServerProcess, receive_buffer: int = 0) -> Iterator[socket.socket]:
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(10)
    sock.connect(("127.0.0.1", httpx.URL(server.url).port or 0))
    with sock:
        yield sock


def post(path: str, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n".encode() + body


def read_all(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data


def serves(server: ServerProcess) -> bool:
    return server.http.post("/v1/completions", json={"prompt": "hello"}).status_code == 200


def test_a_silent_connection_is_closed(server: ServerProcess) -> None:
    with connected(server) as sock:
        started = time.monotonic()
        assert read_all(sock) == b""
        assert TIMEOUT * 0.9 < time.monotonic() - started < TIMEOUT + 3


def test_a_head_that_drips_is_cut_off(server: ServerProcess) -> None:
    with connected(server) as sock:
        started = time.monotonic()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        with contextlib.suppress(OSError):
            while time.monotonic() < started + TIMEOUT + 3:
                sock.sendall(b"X-A: b\r\n")
                time.sleep(0.1)
        assert read_all(sock).startswith(b"HTTP/1.1 408 ")
    assert serves(server)


def test_a_body_that_stops_is_cut_off(server: ServerProcess) -> None:
    with connected(server) as sock:
        sock.sendall(post("/v1/completions", b'{"prompt": "he', length=1000))
        reply = read_all(sock)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert json.loads(reply.split(b"\r\n\r\n", 1)[1])["error"]["code"] == 408


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("abrupt", [False, True])
def test_who_sends_several_requests_at_once_and_leaves_takes_all_of_them_along(server: ServerProcess, stream: bool, abrupt: bool) -> None:
    """The one in work is not the one that came last."""
    logged = len(server.log)
    with connected(server) as sock:
        sock.sendall(post("/v1/completions", json.dumps({**FOREVER, "max_tokens": 60_000, "stream": stream}).encode()) * 4)
        assert wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
        if abrupt:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert wait_until(lambda: is_idle(server), 3)
    time.sleep(0.3)
    assert is_idle(server), "those behind it were not begun"
    assert "Traceback" not in server.log[logged:]
    assert serves(server)


def test_several_requests_at_once_are_answered_in_their_order(server: ServerProcess) -> None:
    with connected(server) as sock:
        sock.sendall(
            b"".join(post("/v1/completions", json.dumps({"prompt": [40 + i], "echo": True, "max_tokens": 1}).encode()) for i in range(5))
        )
        data = b""
        while data.count(b'"finish_reason"') < 5:
            data += sock.recv(1 << 16)
    texts = re.findall(rb'"text":"(.)', data)
    assert texts == sorted(texts)
    assert len(set(texts)) == 5


def test_a_slow_body_that_keeps_coming_is_read(server: ServerProcess) -> None:
    body = b'{"prompt": "hello"' + b" " * 30 + b"}"
    with connected(server) as sock:
        sock.sendall(post("/v1/completions", b"", length=len(body)))
        for at in range(0, len(body), 10):
            time.sleep(TIMEOUT * 0.4)
            sock.sendall(body[at : at + 10])
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_long_reply_is_no_timeout_of_ours(server: ServerProcess) -> None:
    body = {"prompt": [3, 3], "max_tokens": int(TIMEOUT * 250), "ignore_eos": True}
    with connected(server) as sock:
        # The stray line end is what some clients send after a body.
        sock.sendall(post("/v1/completions", json.dumps(body).encode()) + b"\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("part", [b"GET /health HTTP/1.1\r\nX-Long: %b", b"GET /health?%b"])
def test_an_endless_head_is_refused(server: ServerProcess, part: bytes) -> None:
    with connected(server) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(part % (b"a" * (1 << 20)))
        reply = read_all(sock)
    assert reply == b"" or reply.startswith(b"HTTP/1.1 431 ")  # the reply may be lost with what was still being sent
    assert serves(server)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health?" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
    ],
    ids=["line", "header", "headers", "trailers"],
)
@pytest.mark.parametrize("pieces", [1, 7])
def test_a_head_over_the_limit_is_refused_even_if_it_comes_whole(server: ServerProcess, head: bytes, pieces: int) -> None:
    size = -(-len(head) // pieces)
    with connected(server) as sock:
        with contextlib.suppress(OSError):
            for at in range(0, len(head), size):
                sock.sendall(head[at : at + size])
        reply = read_all(sock)
    # The reply may be lost with what was still being sent.
    assert reply == b"" or reply.startswith(b"HTTP/1.1 431 "), reply[:300]
    assert serves(server)


def test_what_is_no_http_is_answered_in_json(server: ServerProcess) -> None:
    with connected(server) as sock:
        sock.sendall(b"GET / NONSENSE\r\n\r\n")
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json")
    assert json.loads(body)["error"]["code"] == 400


def test_a_large_head_within_the_limit_is_fine(server: ServerProcess) -> None:
    assert server.http.get("/health", headers={"x-large": "a" * 30_000}).status_code == 200


def test_a_huge_body_is_refused_unread(server: ServerProcess) -> None:
    with connected(server) as sock:
        sock.sendall(post("/v1/completions", b"{", length=1 << 40))
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
    assert serves(server)


def test_a_client_that_half_closes_frees_its_request(server: ServerProcess) -> None:
    with connected(server) as sock:
        sock.sendall(post("/v1/completions", json.dumps({**FOREVER, "stream": True}).encode()))
        assert sock.recv(100)
        sock.shutdown(socket.SHUT_WR)
        assert wait_until(lambda: is_idle(server), 5)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no such option")
def test_a_client_that_never_reads_is_given_up(server: ServerProcess) -> None:
    """What is sent fills its buffers and ours; then nothing moves, and after the timeout the request ends."""
    body = {"prompt": [4, 4], "max_tokens": 60_000, "ignore_eos": True, "stream": True, "return_token_ids": True, "user": "u"}
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(server, receive_buffer=4096)) for _ in range(8)]
        for sock in socks:
            sock.sendall(post("/v1/completions", json.dumps(body).encode()))
        assert wait_until(lambda: server.metric("vllm:num_requests_running") == 8)
        grown = 0
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and server.http.get("/load").json()["server_load"]:
            grown = max(grown, process.memory_info().rss - before)
            time.sleep(0.1)
        assert server.http.get("/load").json()["server_load"] == 0
        assert wait_until(lambda: is_idle(server), 5)
    ended = [line for line in server.log.splitlines() if "reason=disconnect" in line]
    assert len(ended) >= 8, "the streams must have been given up, not finished"
    assert grown < 8 * 16 * 1024 * 1024
    assert serves(server)


def test_over_a_unix_socket_too(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", max_model_len=1 << 16)
    path = tmp_path / "sock"
    body = {"prompt": [4, 4], "max_tokens": 60_000, "ignore_eos": True, "stream": True, "return_token_ids": True}
    engine = scripted_engine(checkpoint, tmp_path, SCRIPT, max_num_seqs=16)
    with server_process(tmp_path, engine, client_timeout=TIMEOUT, uds=str(path)) as server:
        server.wait_ready()
        with socket.socket(socket.AF_UNIX) as idle, socket.socket(socket.AF_UNIX) as slow:
            for sock in (idle, slow):
                sock.connect(str(path))
                sock.sendall(post("/v1/completions", json.dumps(body).encode()))

            def read_slowly() -> None:
                for _ in range(40):
                    assert slow.recv(16_384)
                    time.sleep(0.1)

            reader = threading.Thread(target=read_slowly)
            reader.start()
            assert wait_until(lambda: server.http.get("/load").json()["server_load"] == 2)
            assert wait_until(lambda: server.http.get("/load").json()["server_load"] == 1, 20), "one of them does not read"
            reader.join(20)
            assert server.http.get("/load").json()["server_load"] == 1, "the other one is only slow"
        assert wait_until(lambda: is_idle(server), 5)


def test_a_thousand_connections_at_once(server: ServerProcess) -> None:
    count = 1000
    request = post("/v1/completions", b'{"prompt": "hello"}').replace(b"Host: x", b"Host: x\r\nConnection: close")
    replies: list[bytes] = []
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(server)) for _ in range(count)]
        for sock in socks:
            sock.sendall(request)

        def collect(part: list[socket.socket]) -> None:
            for one in part:
                one.settimeout(60)
                replies.append(read_all(one))

        threads = [threading.Thread(target=collect, args=(socks[i::8],)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert len(replies) == count
    statuses = {reply.split(b" ", 2)[1] for reply in replies}
    assert statuses <= {b"200", b"429"}
    assert b"200" in statuses
    assert serves(server)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"prompt": "\xff\xfe"}', "UTF-8"),
        (b'{"prompt": "a", "prompt": "b"}', "given twice"),
        (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "at most 50000"),
        (b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}", "nested too deeply"),
        (b'{"metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}", "nested too deeply"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"max_tokens": ' + b"9" * 100_000 + b"}", "digits"),
        (b'{"temperature": 1e999}', "out of range"),
        (b"\x00" * 1000, "JSON"),
    ],
)
def test_bodies_that_are_no_requests(server: ServerProcess, raw: bytes, words: str) -> None:
    reply = server.http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]
    assert len(reply.content) < 2000


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused(server: ServerProcess, garbage: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(garbage)
        reply = read_all(sock)
    assert reply == b"" or reply.startswith(b"HTTP/1.1 400 ")
    assert serves(server)
