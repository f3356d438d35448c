"""One connection of a client, with the limits that uvicorn's has not: a head of bounded size, that comes in bounded time.

A client may be slow, but not for ever: who sends no head, or nothing more of a body, for `client_timeout` seconds is answered 408. Who
reads nothing of a reply for so long is cut off; until then uvicorn's flow control holds the stream back, so that it costs the tokens of
one request and no more. (What has left our buffers for the kernel's is the kernel's to time: `TCP_USER_TIMEOUT`, see server.py.)
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Of the request line and the headers together."""


class _HeadTooLarge(Exception):
    """Raised in a callback of the parser, which hands it on as an error of its own."""


class Connection(HttpToolsProtocol):
    """See the module. `client_timeout` is set by a subclass (`connection_class`); 0 is no limit."""

    client_timeout: float = 0.0

    def connection_made(self, transport: Any) -> None:
        self._in_head = True
        self._begun = False
        self._head_bytes = 0
        """Of what has come while a head was incomplete."""
        self._parsed_bytes = 0
        """Of the request line and the headers that the parser has read: a head may come whole, and in one piece with its body."""
        self._heard = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        """Set while the client has more to read than we keep for it."""
        self._unread = 0
        self._cycles: list[Any] = []
        """Requests that have not been answered: a client may send several at once, of which all but the first wait."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._stop_reading_watch()
        super().connection_lost(exc)
        # uvicorn tells the request that came last, and that is not the one in work where others were sent behind it.
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        if self._in_head:
            self._head_bytes += len(data)
            self._watch()
        super().data_received(data)
        # A body may follow in the same piece, but where it did not, all of this was head.
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        """What the parser could not read, or a callback of it refused."""
        if self._parsed_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            self._refuse(400, b"Bad Request", msg)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also of trailers, after a body."""
        self._count_head(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._parsed_bytes += size
        if self._parsed_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLarge

    def _refuse_head(self) -> None:
        self._refuse(431, b"Request Header Fields Too Large", f"The request line and headers are over {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        if self.cycle is not None:
            self._cycles.append(self.cycle)

    def on_message_complete(self) -> None:
        self._in_head, self._begun = True, False
        self._head_bytes = self._parsed_bytes = 0
        self._unwatch()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reading is None and self.client_timeout > 0:
            self._unread = self.transport.get_write_buffer_size()
            self._reading = self.loop.call_later(self.client_timeout, self._look_at_reader)

    def resume_writing(self) -> None:
        self._stop_reading_watch()
        super().resume_writing()

    def _look_at_reader(self) -> None:
        """Nothing is written meanwhile: what is left shrinks, or nobody reads."""
        left = self.transport.get_write_buffer_size()
        if left < self._unread:
            self._unread = left
            self._reading = self.loop.call_later(self.client_timeout, self._look_at_reader)
        else:
            self._reading = None
            self.transport.abort()

    def _stop_reading_watch(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    @property
    def _replying(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        if self._timer is None and self.client_timeout > 0:
            self._timer = self.loop.call_later(self.client_timeout, self._look)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """A head counts from its beginning, or from the end of the reply before; a body from the last of it that came."""
        self._timer = None
        if self.transport is None or self.transport.is_closing():
            return
        left = 0.0 if self._in_head else self._heard + self.client_timeout - self.loop.time()
        if self._replying if self._in_head else self.flow.read_paused:
            left = self.client_timeout  # it is us who are slow
        if left > 0:
            self._timer = self.loop.call_later(left, self._look)
        elif self._in_head and not self._begun:
            self.transport.close()  # nothing was asked
        else:
            self._refuse(408, b"Request Timeout", f"The request was not complete after {self.client_timeout:g} seconds without news.")

    def _refuse(self, status: int, reason: bytes, message: str) -> None:
        """Answers what was not answered yet, and closes."""
        unanswered = not self._replying if self._in_head else not self.cycle.response_started
        if unanswered and not self.transport.is_closing():
            error = {"error": {"message": message, "type": "Bad Request", "param": None, "code": status}}
            body = json.dumps(error).encode()
            head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, reason, len(body)) + body)
        self.transport.close()


def connection_class(client_timeout: float) -> type[Connection]:
    """What uvicorn makes of each connection."""
    return type("Connection", (Connection,), {"client_timeout": client_timeout})
