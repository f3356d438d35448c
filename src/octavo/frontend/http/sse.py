"""Server-sent events, and noticing that a client has gone: for streams and for replies that come in one piece.

Whoever waits for the engine waits for the client's end of the connection too. When it closes, the wait is cancelled, which
closes the engine's output stream, which aborts the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.frontend.http.errors import ClientGone, describe, is_expected

logger = logging.getLogger("octavo.server")

T = TypeVar("T")

encode = msgspec.json.Encoder().encode

CANCEL_AGAIN = 5.0
"""Seconds after which the work of a request that has been cancelled and still runs is cancelled again: longer than cleaning up takes."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, proxies see that the connection is in use."""


def event(value: Any) -> bytes:
    """One `data:` event. JSON has no raw newlines, so one line holds it."""
    return b"data: %b\n\n" % encode(value)


def named_event(name: str, value: Any) -> bytes:
    """An event with a name in front of its data, for protocols whose clients read that."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(value))


@dataclass(frozen=True)
class StreamStyle:
    """How the streams of a protocol end."""

    failure: Callable[[BaseException], bytes]
    """The event that tells of an error: the status has been sent."""
    end: bytes
    """The last bytes of every stream."""


OPENAI_STYLE = StreamStyle(failure=lambda error: b"data: %b\n\n" % describe(error).body(), end=b"data: [DONE]\n\n")


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
        await cancel(task, gone, again=CANCEL_AGAIN)


class EventStream(Response):
    """Sends events until they end or the client goes, then calls `close`, which must end what feeds them.

    Args:
        keep_alive: seconds of silence after which a comment is sent; 0 is never.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        *,
        style: StreamStyle = OPENAI_STYLE,
        keep_alive: float = 0.0,
    ) -> None:
        # X-Accel-Buffering: a proxy that collects the whole reply first defeats streaming.
        super().__init__(None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._style = style
        self._keep_alive = keep_alive
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(scope, send))
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await cancel(pump, gone, again=CANCEL_AGAIN)
            await self._close()

    async def _pump(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._keep_alive <= 0:
            await self._send_all(scope, send)
            return
        heart = asyncio.ensure_future(self._beat(send))
        try:
            await self._send_all(scope, send)
        finally:
            await cancel(heart)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        now = asyncio.get_running_loop().time
        self._last_sent = now()
        async for chunk in guarded(self._events, scope, self._style):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._last_sent = now()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _beat(self, send: Send) -> None:
        """Beside the stream, so that no chunk pays for a timer. Every `send` is one whole event or comment."""
        now = asyncio.get_running_loop().time
        self._last_sent = now()
        while True:
            silent = now() - self._last_sent
            if silent >= self._keep_alive:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                self._last_sent = now()
                silent = 0.0
            await asyncio.sleep(self._keep_alive - silent)


async def guarded(events: AsyncIterator[bytes], scope: Scope, style: StreamStyle) -> AsyncIterator[bytes]:
    """`events`, then the style's end; a failure on the way is sent as an event."""
    try:
        async for chunk in events:
            yield chunk
    except Exception as error:
        if not is_expected(error):
            logger.exception("Stream %s failed", scope.get("state", {}).get("request_id"))
        yield style.failure(error)
    if style.end:
        yield style.end


async def cancel(*tasks: asyncio.Future[Any], again: float | None = None) -> None:
    """Cancels tasks and waits for their end.

    Args:
        again: seconds after which one that still runs is cancelled again. A task may lose a cancellation that comes just as what it waits for
            is done (`asyncio.wait_for` of Python 3.11 does), and would go on for nobody.
    """
    rest = {task for task in tasks if not task.done()}
    while rest:
        for task in rest:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            _, rest = await asyncio.wait(rest, timeout=again)
        rest = {task for task in rest if not task.done()}
    for task in tasks:
        if not task.cancelled():
            task.exception()  # so that nobody reports it as never looked at
