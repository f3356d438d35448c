"""Errors as HTTP replies: `{"error": {"message", "type", "param", "code"}}` with a bounded message and never a stack trace.

`code` is the HTTP status, unless the error has a machine-readable code of its own (context_length_exceeded).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from octavo.config import address_space
from octavo.errors import NO_MEMORY, EngineDead, InvalidRequest, ModelNotFound, NotYet, OctavoError, Overloaded, RequestFailed

logger = logging.getLogger("octavo.server")

MAX_ERRORS = 10
MAX_INPUT_CHARS = 200
MAX_MESSAGE_CHARS = 3000

INTERNAL_MESSAGE = "Something went wrong inside the server; its log says what. Other requests are not affected."


class BadBody(OctavoError):
    """The body of a request cannot be read at all: not JSON, not UTF-8, too large. `status` is 400, 413 or 415."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class NotFound(OctavoError):
    """Something with an id that is not (or no longer) here: HTTP 404."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Conflict(OctavoError):
    """What is asked for cannot be done while something else is as it is: HTTP 409."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ClientGone(Exception):
    """The client closed its connection before the reply began. Nobody reads the reply to this."""


@dataclass(frozen=True)
class ErrorReply:
    """One error, ready for a status line, a JSON body or an event in a stream."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | int | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        error = {
            "message": clip(self.message, MAX_MESSAGE_CHARS),
            "type": self.type,
            "param": None if self.param is None else clip(self.param, MAX_INPUT_CHARS),
            "code": self.status if self.code is None else self.code,
        }
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def clip(text: str, limit: int) -> str:
    """`text`, cut to `limit` characters, that can be encoded as UTF-8 (no lone surrogates)."""
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.encode("utf-8", "replace").decode("utf-8")


def describe(error: BaseException) -> ErrorReply:
    """The reply to `error`. Anything unexpected becomes a plain 500; the caller logs it."""
    match error:
        case InvalidRequest():
            return ErrorReply(400, "BadRequestError", str(error), error.param, error.code)
        case ValidationError():
            return _schema_error(error.errors(include_url=False, include_context=False))
        case BadBody():
            kind = "Bad Request" if error.status == 400 else HTTPStatus(error.status).phrase
            return ErrorReply(error.status, kind, str(error), error.param)
        case ModelNotFound():
            return ErrorReply(404, "NotFoundError", str(error), "model")
        case NotFound():
            return ErrorReply(404, "NotFoundError", str(error), error.param)
        case Conflict():
            return ErrorReply(409, "ConflictError", str(error), error.param)
        case RequestValidationError():
            return _schema_error(error.errors(), skip=1)
        case NotYet():
            # The request is at fault, as far as this server goes: it is working as it should, and trying again is of no use.
            return ErrorReply(400, "NotImplementedError", str(error), error.param)
        case Overloaded():
            seconds = max(1, round(error.retry_after))
            return ErrorReply(429, "RateLimitError", str(error), headers={"Retry-After": str(seconds)})
        case EngineDead():
            return ErrorReply(503, "ServiceUnavailableError", str(error) or "The engine is not running.")
        case RequestFailed() if str(error) == NO_MEMORY:
            return _no_memory()
        case OctavoError():
            return ErrorReply(500, "InternalServerError", str(error))
        case HTTPException():
            return ErrorReply(error.status_code, _http_type(error.status_code), str(error.detail), headers=dict(error.headers or {}))
        case _ if address_space.is_refusal(error):
            return _no_memory()
        case _:
            return ErrorReply(500, "InternalServerError", INTERNAL_MESSAGE)


def _no_memory() -> ErrorReply:
    return ErrorReply(503, "ServiceUnavailableError", NO_MEMORY, headers={"Retry-After": "5"})


def renamed(error: BaseException, names: Mapping[str, str]) -> BaseException:
    """`error` about a field as one about the field that the client gave; any other error as it is.

    Args:
        names: field in the error -> the client's; a longer name before its beginning.
    """

    if not isinstance(error, InvalidRequest):
        return error

    def new(match: re.Match[str]) -> str:
        return names[match.group()]

    message = str(error)
    if names:
        # Names that are words of the language too are changed only where a message begins with them.
        identifiers = "|".join(re.escape(name) for name in names if "_" in name or "." in name)
        first = "|".join(re.escape(name) for name in names)
        message = re.sub(rf"^(?:{first})\b" + (rf"|\b(?:{identifiers})\b" if identifiers else ""), new, message)
    return InvalidRequest(message, param=names.get(error.param or "", error.param), code=error.code)


def is_expected(error: BaseException) -> bool:
    """Whether `error` was raised on purpose, so that the log needs no traceback."""
    return isinstance(error, OctavoError | ValidationError | RequestValidationError | HTTPException | ClientGone)


def _http_type(status: int) -> str:
    named = {400: "BadRequestError", 404: "NotFoundError", 422: "UnprocessableEntityError", 501: "NotImplementedError"}
    return named.get(status) or HTTPStatus(status).phrase


def _schema_error(errors: Sequence[Any], skip: int = 0) -> ErrorReply:
    """At most MAX_ERRORS of them, each input cut: a small bad body must not produce a huge reply.

    Args:
        skip: parts of each location that say nothing to a client ("query").
    """
    lines = []
    for e in errors[:MAX_ERRORS]:
        where = ".".join(str(part) for part in e["loc"][skip:])[:MAX_INPUT_CHARS]
        message = clip(str(e["msg"]).removeprefix("Value error, "), MAX_INPUT_CHARS)
        given = "" if e["type"] == "missing" else f" (got {short_repr(e['input'])})"
        lines.append(f"{where or 'body'}: {message}{given}")
    if len(errors) > MAX_ERRORS:
        lines.append(f"and {len(errors) - MAX_ERRORS} more")
    param = str(errors[0]["loc"][skip])[:MAX_INPUT_CHARS] if errors and errors[0]["loc"][skip:] else None
    return ErrorReply(400, "Bad Request", "; ".join(lines), param)


def short_repr(value: Any) -> str:
    """`repr(value)` cut to MAX_INPUT_CHARS, without first building the repr of a huge value."""
    if isinstance(value, str | bytes) and len(value) > MAX_INPUT_CHARS:
        value = value[:MAX_INPUT_CHARS]
    elif isinstance(value, dict) and len(value) > 20:
        return f"an object with {len(value)} entries"
    elif isinstance(value, list) and len(value) > 20:
        return f"a list of {len(value)} values"
    try:
        return clip(repr(value), MAX_INPUT_CHARS)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"


def install_error_handlers(app: FastAPI, respond: Callable[[Request, ErrorReply], Response]) -> None:
    """Every error of a route as a reply, the router's own 404 and 405 too. Unexpected ones: `middleware.ErrorBoundary`.

    Args:
        respond: puts an error into the shape that the client reads.
    """

    async def on_expected(request: Request, error: Exception) -> Response:
        return respond(request, describe(error))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reply = describe(error)
        where = f"{request.method} {clip(request.url.path, MAX_INPUT_CHARS)}"
        if error.status_code == 404:
            reply = ErrorReply(404, "NotFoundError", f"There is no route {where}.")
        elif error.status_code == 405:
            reply = ErrorReply(405, reply.type, f"{where}: method not allowed.", headers=reply.headers)
        return respond(request, reply)

    async def on_gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(OctavoError, on_expected)
    app.add_exception_handler(ValidationError, on_expected)
    app.add_exception_handler(RequestValidationError, on_expected)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientGone, on_gone)
