"""A tiny OpenAI-like HTTP server on a socket, for tests of clients. It knows nothing of Octavo."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

Answer = tuple[int, Any] | list[Any]
"""(status, JSON body), or the events of a stream; an event may be a number of seconds to wait, or "break" to hang up."""


@dataclass
class StubServer:
    """Answers with `answer(path, body)`. Records the bodies, and how many requests were open at once.

    Use as a context manager; it runs on a thread of its own.
    """

    answer: Callable[[str, Any], Answer]
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_open: int = 0
    connections: int = 0
    _open: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        started = threading.Event()
        self._loop = asyncio.new_event_loop()

        async def start() -> None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.port = self._server.sockets[0].getsockname()[1]
            started.set()

        def run() -> None:
            self._loop.run_until_complete(start())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        async def stop() -> None:
            self._server.close()
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while line := await reader.readline():
                _, path, _ = line.decode().split()
                headers = {}
                while (header := (await reader.readline()).decode().strip()) != "":
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                length = int(headers.get("content-length", 0))
                body = json.loads(await reader.readexactly(length)) if length else None
                self.headers.append(headers)
                self.bodies.append(body)
                self._open += 1
                self.most_open = max(self.most_open, self._open)
                try:
                    if not await self._reply(writer, self.answer(path, body)):
                        return
                finally:
                    self._open -= 1
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _reply(self, writer: asyncio.StreamWriter, answer: Answer) -> bool:
        if isinstance(answer, tuple):
            status, content = answer
            payload = json.dumps(content).encode()
            writer.write(
                f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload
            )
            await writer.drain()
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in [*answer, "[DONE]"]:
            if isinstance(event, float):
                await writer.drain()
                await asyncio.sleep(event)
                continue
            if event == "break":
                return False
            data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def completion_events(text: str, *, chat: bool = False, usage: dict[str, int] | None = None) -> list[Any]:
    """A streamed reply of one chunk a character."""
    events: list[Any] = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}] if chat else []
    for i, c in enumerate(text):
        reason = "stop" if i == len(text) - 1 else None
        events.append({"choices": [{"index": 0, **({"delta": {"content": c}} if chat else {"text": c}), "finish_reason": reason}]})
    return [*events, {"choices": [], "usage": usage or {"prompt_tokens": 5, "completion_tokens": len(text)}}]


MODELS = (200, {"object": "list", "data": [{"id": "stub-model", "object": "model"}]})
