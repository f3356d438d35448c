"""Layers around every route, as plain ASGI so that a stream pays next to nothing for them: request id, keys, metrics, last resort."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Sequence

from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.frontend.http.batches.inside import OWNER
from octavo.frontend.http.errors import ClientGone, ErrorReply, describe
from octavo.frontend.http.messages.errors import in_this_shape, reads_this_shape
from octavo.observe.metrics import HttpMetrics

logger = logging.getLogger("octavo.server")

OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/version", "/metrics", "/load", "/", "/dashboard"})
"""Never need a key: probes, scrapers, and a page without data."""

_SAFE_ID = re.compile(r"[\x21-\x7e]{1,256}")


def route_path(scope: Scope) -> str:
    """The path below root_path."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(root + "/") else path


class RootPath:
    """Tells the router under which prefix a proxy publishes the server, whether or not the proxy takes it off."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self.root_path = "/" + root_path.strip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["root_path"] = self.root_path
        await self.app(scope, receive, send)


class OneSlash:
    """Takes a path with several slashes at its beginning, which a base address that ends in one makes, for the one that is meant."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("//"):
            scope["path"] = "/" + scope["path"].lstrip("/")
            scope["raw_path"] = b"/" + scope.get("raw_path", scope["path"].encode()).lstrip(b"/")
        await self.app(scope, receive, send)


class RequestIds:
    """Gives every request an id (state.request_id); sends it back as X-Request-Id when asked to, and as request-id to Anthropic's clients."""

    def __init__(self, app: ASGIApp, echo: bool) -> None:
        self.app = app
        self.echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {})["request_id"] = uuid.uuid4().hex
        headers = Headers(scope=scope)
        theirs = reads_this_shape(route_path(scope), headers)
        if not self.echo and not theirs:
            await self.app(scope, receive, send)
            return
        given = headers.get("x-request-id", "")
        shown = given if _SAFE_ID.fullmatch(given) else scope["state"]["request_id"]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                if self.echo:
                    sent["X-Request-Id"] = shown
                if theirs:
                    sent["request-id"] = f"req_{scope['state']['request_id']}"
            await send(message)

        await self.app(scope, receive, send_with_id)


class ApiKeys:
    """Refuses requests without one of the keys. Comparisons take constant time over hashes of equal length."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or route_path(scope) in OPEN_PATHS or self._allowed(scope):
            await self.app(scope, receive, send)
            return
        bearer = {"WWW-Authenticate": "Bearer"}
        if reads_this_shape(route_path(scope), Headers(scope=scope)):
            reply = ErrorReply(
                401, "Unauthorized", "The API key is missing or wrong (x-api-key, or Authorization: Bearer).", headers=bearer
            )
            response = in_this_shape(reply, scope["state"]["request_id"])
        else:
            response = Response(b'{"error":"Unauthorized"}', 401, bearer, media_type="application/json")
        await response(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if OWNER in scope:
            return True
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = headers.get("x-api-key", "")  # as Anthropic's clients send it
            if not token:
                return False
        given = hashlib.sha256(token.strip().encode("latin-1", "replace")).digest()
        matches = [secrets.compare_digest(given, known) for known in self._hashes]
        return any(matches)


class UnknownParameters:
    """Reports the query parameters that a route does not have, which it ignores as it does unknown fields of a body."""

    def __init__(self, app: ASGIApp, report: Callable[[Iterable[str], str], None]) -> None:
        self.app = app
        self.report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)
        route = scope.get("route") if scope.get("query_string") else None
        if isinstance(route, APIRoute):
            known = {parameter.alias for parameter in route.dependant.query_params}
            self.report([name for name in QueryParams(scope["query_string"]) if name not in known], "query parameters")


class HttpMetricsLayer:
    """Counts every request under its route's template."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.monotonic()
        status, sent = 500, 0

        async def count(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, count)
        finally:
            handler = getattr(scope.get("route"), "path", "none")
            size = Headers(scope=scope).get("content-length", "")
            # A path template is a bounded label, a client's method is not.
            method = scope["method"] if handler != "none" else "other"
            self.metrics.record(handler, method, status, time.monotonic() - start, int(size[:20]) if size.isdecimal() else 0, sent)


class ErrorBoundary:
    """The last resort: an exception nobody expected is logged with the request's id and answered with a plain 500."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except ClientGone:
            return
        except Exception as error:
            logger.exception("Request %s (%s %s) failed", scope["state"]["request_id"], scope["method"], scope["path"])
            if started:
                raise  # Too late for a status; ends the connection.
            await describe(error).response()(scope, receive, send)
