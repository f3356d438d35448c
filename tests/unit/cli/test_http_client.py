"""The HTTP client against a server that behaves, and against one that does not."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from octavo.cli.http_client import HttpClient, HttpError, error_text
from octavo.errors import ConfigError
from tests.support.openai_stub import MODELS, StubServer, completion_events


def serve_bytes(reply: bytes) -> Iterator[int]:
    """A server that answers one connection with these bytes and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(reply)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    thread.join(5)
    listener.close()


async def test_replies_streams_and_kept_alive_connections() -> None:
    def answer(path: str, body: object) -> object:
        return (
            MODELS
            if path == "/v1/models"
            else completion_events("héy")
            if isinstance(body, dict) and body.get("stream")
            else (404, {"a": 1})
        )

    with StubServer(answer) as server:
        client = HttpClient(server.url + "/v1/", api_key="secret")
        assert await client.model_name() == "stub-model"
        assert await client.post("/v1/nothing", {"x": 1}) == (404, {"a": 1})
        events = [json.loads(e) async for e in client.stream("/v1/completions", {"stream": True, "prompt": "é"})]
        await client.close()
    assert [e["choices"][0]["text"] for e in events[:-1]] == ["h", "é", "y"]
    assert server.connections == 1
    assert server.bodies == [None, {"x": 1}, {"stream": True, "prompt": "é"}]
    assert server.headers[0]["authorization"] == "Bearer secret"


async def test_an_error_status_of_a_stream_is_raised_with_its_message() -> None:
    answer = (429, {"error": {"message": "Too many.", "code": 429}})
    with StubServer(lambda path, body: answer) as server, pytest.raises(HttpError, match="answered 429: Too many") as raised:
        await anext(HttpClient(server.url).stream("/v1/completions", {}))
    assert raised.value.status == 429


async def test_a_connection_that_ends_within_a_stream_is_an_error() -> None:
    with StubServer(lambda path, body: [{"choices": []}, "break"]) as server:
        stream = HttpClient(server.url).stream("/v1/completions", {})
        assert json.loads(await anext(stream)) == {"choices": []}
        with pytest.raises(HttpError, match="closed the connection in the middle"):
            await anext(stream)


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n[1]", (200, [1])),  # the body ends with the connection
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[1]", "closed the connection"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is not HTTP"),
        (b"", "closed the connection"),
    ],
)
async def test_odd_servers(reply: bytes, outcome: object) -> None:
    for port in serve_bytes(reply):
        client = HttpClient(f"127.0.0.1:{port}")
        if isinstance(outcome, str):
            with pytest.raises(HttpError, match=outcome):
                await client.post("/", {})
        else:
            assert await client.post("/", {}) == outcome


async def test_nobody_there() -> None:
    with pytest.raises(HttpError, match=r"Cannot reach http://127\.0\.0\.1:9: .*Is the server running there\?"):
        await HttpClient("http://127.0.0.1:9").get("/")


async def test_leaving_a_stream_early_closes_its_connection() -> None:
    """The server must notice, or it would go on generating for nobody."""
    with StubServer(lambda path, body: [{"n": 1}, 0.05] * 100) as server:
        client = HttpClient(server.url)
        stream = client.stream("/", {})
        await anext(stream)
        await stream.aclose()
        for _ in range(200):
            if server._open == 0:
                break
            await asyncio.sleep(0.05)
        assert server._open == 0


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://host:port", ""])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError):
        HttpClient(url)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"error": {"message": "m"}}, "m"),
        ({"error": "Unauthorized"}, "Unauthorized"),
        ({"object": "error", "message": "flat"}, "flat"),
        ("plain", "plain"),
    ],
)
def test_error_bodies_of_all_shapes(content: object, text: str) -> None:
    assert error_text(content) == text
