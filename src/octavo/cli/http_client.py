"""A small asynchronous HTTP/1.1 client for OpenAI-compatible servers: JSON requests, event streams, kept-alive connections.

It exists because a load generator shares the machine with the server that it measures: a general client costs more time a
chunk than the server does. Parsing is httptools', the parser of the server itself.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httptools

from octavo._version import __version__
from octavo.errors import ConfigError, OctavoError

_READ = 1 << 16


class HttpError(OctavoError):
    """The server could not be reached, broke off, or answered with an error. `status` is 0 when there was no answer."""

    def __init__(self, message: str, *, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class _Message:
    """Collects what httptools' parser calls back with."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.body: list[bytes] = []
        self.headers_done = False
        self.done = False
        self.keep_alive = False
        self.parser: Any = None

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.headers_done = True

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        self.done = True
        self.keep_alive = bool(self.parser.should_keep_alive())  # the parser forgets it after this


class Response:
    """One answer, read as it comes."""

    def __init__(self, url: str, reader: asyncio.StreamReader) -> None:
        self._url = url
        self._reader = reader
        self._message = _Message()
        self._parser = self._message.parser = httptools.HttpResponseParser(self._message)

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    @property
    def headers(self) -> dict[str, str]:
        """Names in lower case."""
        return self._message.headers

    @property
    def reusable(self) -> bool:
        return self._message.done and self._message.keep_alive

    async def _receive(self) -> None:
        data = await self._reader.read(_READ)
        if not data:
            if self._message.headers_done and "content-length" not in self.headers and "transfer-encoding" not in self.headers:
                self._message.done = True  # the body ends with the connection
                return
            raise HttpError(f"{self._url}: the server closed the connection in the middle of an answer.")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            raise HttpError(f"{self._url}: the answer is not HTTP ({e}).") from None

    async def read_headers(self) -> None:
        while not self._message.headers_done:
            await self._receive()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, piece by piece as it arrives."""
        while True:
            for piece in self._message.body:
                yield piece
            self._message.body.clear()
            if self._message.done:
                return
            await self._receive()

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.chunks()])

    async def events(self) -> AsyncIterator[bytes]:
        """The payloads of `data:` lines, without the closing [DONE]."""
        rest = b""
        async for piece in self.chunks():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    payload = line[5:].strip()
                    if payload != b"[DONE]":
                        yield payload


class HttpClient:
    """Connections to one server.

    Args:
        base_url: http://host:port, with or without a trailing /v1.
        api_key: sent as a bearer token.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        url = base_url if "://" in base_url else "http://" + base_url
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"{base_url!r}: the port is not a number.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{base_url!r} is not the address of a server. Give one like http://localhost:8000.")
        self.base_url = f"{parts.scheme}://{parts.netloc}{parts.path}"
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path
        self._head = f"Host: {parts.netloc}\r\nUser-Agent: octavo/{__version__}\r\nAccept: */*\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        try:
            return await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=1 << 20)
        except OSError as e:
            reason = e.strerror or str(e)
            raise HttpError(f"Cannot reach {self.base_url}: {reason}. Is the server running there?") from None

    @asynccontextmanager
    async def open(self, method: str, path: str, body: Any = None) -> AsyncIterator[Response]:
        """Send a request; the response's headers have arrived when this enters.

        Raises:
            HttpError: no connection, or one that breaks.
        """
        reader, writer = await self._connection()
        response = Response(self.base_url, reader)
        try:
            payload = b"" if body is None else json.dumps(body).encode()
            head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}"
            if body is not None:
                head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
            writer.write(head.encode("latin-1") + b"\r\n" + payload)
            await writer.drain()
            await response.read_headers()
            yield response
        except ConnectionError as e:
            raise HttpError(f"{self.base_url}: the connection broke ({e.strerror or type(e).__name__}).") from None
        finally:
            if response.reusable:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self.open("GET", path) as response:
            return response.status, await response.read()

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and decoded JSON (or text) of a reply, whatever the status."""
        async with self.open("POST", path, body) as response:
            return response.status, decode_body(await response.read())

    async def stream(self, path: str, body: Any) -> AsyncIterator[bytes]:
        """The events of a streamed reply.

        Raises:
            HttpError: any status but 200.
        """
        async with self.open("POST", path, body) as response:
            if response.status != 200:
                content = decode_body(await response.read())
                raise status_error(self.base_url + path, response.status, content, response.headers.get("retry-after"))
            async for payload in response.events():
                yield payload

    async def model_name(self) -> str:
        """The first model that the server offers.

        Raises:
            HttpError: the server has no list of models.
        """
        status, body = await self.get("/v1/models")
        content = decode_body(body)
        if status != 200:
            raise status_error(self.base_url + "/v1/models", status, content, None)
        try:
            return str(content["data"][0]["id"])
        except (TypeError, KeyError, IndexError):
            raise HttpError(f"{self.base_url}/v1/models does not list a model. Name one with --model.") from None

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


def decode_body(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")


def error_text(content: Any) -> str:
    """The message in an error body, in any of the shapes that servers use."""
    if isinstance(content, dict):
        error = content.get("error", content)
        if isinstance(error, dict):
            return str(error.get("message") or error.get("detail") or error)
        return str(error)
    return str(content)[:200]


def status_error(url: str, status: int, content: Any, retry_after: str | None) -> HttpError:
    try:
        seconds = float(retry_after) if retry_after else None
    except ValueError:
        seconds = None
    return HttpError(f"{url} answered {status}: {error_text(content)}", status=status, retry_after=seconds)
