"""`ModelReplica`: one replica of a fleet, in a process that Ray Serve starts: an engine, and the server's application without its socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from octavo.config.args import EngineArgs
from octavo.errors import OctavoError
from octavo.executor.ray_cluster import take_usual_priority
from octavo.fleet.call import Call, ReplyHead
from octavo.fleet.watch import watched
from octavo.frontend.http.settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from octavo.frontend.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

FAILURE_MARK = "octavo cannot start this replica: "
"""Before the words for the user in what Ray says of a replica that did not start."""


class ModelReplica:
    """Made by Ray Serve, which calls `check_health` before the first request and now and then, `answer` for each request, and `__del__`
    when it takes the replica away and its requests have ended.

    Args:
        args, settings: of the engine and the server.
    """

    def __init__(self, args: EngineArgs, settings: ServerSettings) -> None:
        take_usual_priority()
        self._watcher = watched()
        self._args = args
        # What is kept on one replica would not be found on the next request's.
        self._settings = dataclasses.replace(settings, response_store_bytes=0)
        self._started: asyncio.Task[tuple[AsyncLLM, FastAPI]] | None = None

    async def _ready(self) -> tuple[AsyncLLM, FastAPI]:
        if self._started is None:
            self._started = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._started)

    async def _start(self) -> tuple[AsyncLLM, FastAPI]:
        from octavo.frontend.async_llm import AsyncLLM
        from octavo.frontend.http.app import build_app
        from octavo.observe.logs import configure_logging

        configure_logging(self._settings.log_format, self._settings.uvicorn_log_level, self._settings.log_config_file)
        try:
            llm = await AsyncLLM.start(self._args)
        except OctavoError as e:
            raise RuntimeError(f"{FAILURE_MARK}{e}") from None
        return llm, build_app(llm, self._settings, served_model_names=self._args.served_model_name)

    async def check_health(self) -> None:
        """Raises when there is no engine and will be none: Ray Serve replaces the replica.

        Raises:
            RuntimeError: it cannot start; the message has `FAILURE_MARK` and words for the user.
            EngineDead: it has ended for good.
        """
        llm, _ = await self._ready()
        llm.check_health()

    async def __del__(self) -> None:
        if self._started is not None:
            llm, app = await self._started
            await app.state.context.close()
            await llm.shutdown()

    async def metrics(self) -> tuple[str, bytes]:
        """This replica's name, and the text of its /metrics."""
        from ray import serve

        _, app = await self._ready()
        return serve.get_replica_context().replica_id.unique_id, await app.state.context.render_metrics()

    async def answer_whole(self, call: Call) -> tuple[int, bytes]:
        """The reply to a request in one piece: status and body."""
        parts = [part async for part in self.answer(call)]
        head = parts.pop(0)
        assert isinstance(head, ReplyHead)
        return head.status, b"".join(part for part in parts if isinstance(part, bytes))

    async def answer(self, call: Call) -> AsyncIterator[ReplyHead | bytes]:
        """The reply to a request: its head, then its body as it is made. Closing it ends the request."""
        _, app = await self._ready()
        exchange = _Exchange(call)
        running = asyncio.ensure_future(exchange.run(app))
        try:
            async for part in exchange.parts():
                yield part
            await running
        finally:
            exchange.disconnect()
            if not running.done():
                # The application has to notice by itself: what it cleans up must not be cut short.
                with contextlib.suppress(Exception):
                    await asyncio.shield(running)


class _Exchange:
    """One request to an ASGI application, without a socket."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._request = [{"type": "http.request", "body": call.body, "more_body": False}]
        self._gone = asyncio.Event()
        self._news = asyncio.Event()
        self._head: ReplyHead | None = None
        self._body: list[bytes] = []
        self._done = False

    def disconnect(self) -> None:
        """The client is gone, or has all."""
        self._gone.set()

    async def run(self, app: Any) -> None:
        call = self._call
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": call.method,
            "scheme": "http",
            "path": call.path,
            "raw_path": call.path.encode(),
            "query_string": call.query,
            "root_path": "",
            "headers": list(call.headers),
            "client": call.client,
            "server": None,
            "state": {},
        }
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._done = True
            self._news.set()

    async def _receive(self) -> dict[str, Any]:
        if self._request:
            return self._request.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._head = ReplyHead(message["status"], list(message.get("headers", ())))
        elif message["type"] == "http.response.body":
            self._body.append(message.get("body", b""))
        self._news.set()

    async def parts(self) -> AsyncIterator[ReplyHead | bytes]:
        """What there is, whenever there is something: what came together goes together, because each part has its price on the way."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._head is not None:
                head, self._head = self._head, None
                yield head
            body, self._body = b"".join(self._body), []
            if body:
                yield body
            if self._done and not self._body:
                return
