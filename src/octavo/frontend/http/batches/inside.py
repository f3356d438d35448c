"""Requests to an application from within its own process: no socket, the same code, the same replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

OWNER = "octavo.owner"
"""Key of an ASGI scope made here: on whose behalf the request runs. It needs no API key; no scope of a socket has it."""


async def post_to_app(app: Any, path: str, body: Any, *, owner: str = "") -> tuple[int, Any]:
    """One POST to an ASGI application: (status, decoded reply)."""
    payload = json.dumps(body).encode()
    messages: Iterator[dict[str, Any]] = iter([{"type": "http.request", "body": payload, "more_body": False}])
    status, parts = 500, []

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            await asyncio.Event().wait()  # the client never disconnects
            raise AssertionError
        return message

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())],
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 80),
        "state": {},
        OWNER: owner,
    }
    await app(scope, receive, send)
    content = b"".join(parts)
    try:
        return status, json.loads(content)
    except ValueError:
        return status, content.decode("utf-8", "replace")
