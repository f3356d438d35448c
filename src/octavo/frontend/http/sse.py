"""Server-sent events, and noticing that a client has gone: for streams and for replies that come in one piece.

Whoever waits for the engine waits for the client's end of the connection too. When it closes, the wait is cancelled, which
closes the engine's output stream, which aborts the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.frontend.http.errors import ClientGone, ErrorReply, describe, is_expected

logger = logging.getLogger("octavo.server")

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_SECONDS = 15.0

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Framing:
    """How a protocol ends a stream, and reports an error inside one."""

    error: Callable[[ErrorReply], bytes]
    end: bytes


OPENAI = Framing(lambda reply: b"data: %b\n\n" % reply.body(), DONE)


def named_event(name: str, value: Any) -> bytes:
    """An event with a name, as clients that dispatch by it expect."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(value))


def event(value: Any) -> bytes:
    """One `data:` event. JSON has no raw newlines, so one line holds it."""
    return b"data: %b\n\n" % encode(value)


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client closes its connection.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await cancel(task, gone)


class EventStream(Response):
    """Sends events until they end or the client goes, then calls `close`, which must end what feeds them.

    An error in the source becomes an event of its own: the status has been sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[None]], framing: Framing = OPENAI) -> None:
        # X-Accel-Buffering: a proxy that collects the whole reply first defeats streaming.
        super().__init__(None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._framing = framing
        self._sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(scope, send))
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await cancel(pump, gone)
            await self._close()

    async def _pump(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        keeping = asyncio.ensure_future(self._keep_alive(send))
        try:
            async for chunk in guarded(self._events, scope, self._framing):
                self._sent = time.monotonic()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            await cancel(keeping)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        """A comment, which clients pass over, whenever nothing was sent for a while: proxies cut connections that look idle."""
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if time.monotonic() - self._sent >= KEEP_ALIVE_SECONDS:
                await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})


async def guarded(events: AsyncIterator[bytes], scope: Scope, framing: Framing = OPENAI) -> AsyncIterator[bytes]:
    """`events`, then the end; a failure on the way is sent as an error event."""
    try:
        async for chunk in events:
            yield chunk
    except Exception as error:
        if not is_expected(error):
            logger.exception("Stream %s failed", scope.get("state", {}).get("request_id"))
        yield framing.error(describe(error))
    if framing.end:
        yield framing.end


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and waits for their end."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
