"""Errors in Anthropic's shape, for the routes that are Anthropic's and for its clients on the routes that both APIs have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

from octavo.frontend.http.errors import MAX_MESSAGE_CHARS, ErrorReply, clip

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(reply: ErrorReply, request_id: str | None = None) -> dict[str, Any]:
    """An error in this API's shape."""
    kind = ERROR_TYPES.get(reply.status, "invalid_request_error" if reply.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": clip(reply.message, MAX_MESSAGE_CHARS)}, "request_id": request_id}


def reads_this_shape(path: str, headers: Mapping[str, str]) -> bool:
    """Whether the client of a request expects this API's errors."""
    return path == "/v1/messages" or path.startswith("/v1/messages/") or "anthropic-version" in headers


def in_this_shape(reply: ErrorReply, request_id: str) -> Response:
    body = msgspec.json.encode(error_body(reply, f"req_{request_id}"))
    return Response(body, reply.status, reply.headers, media_type="application/json")


def respond(request: Request, reply: ErrorReply) -> Response:
    """`reply` as the client of `request` reads errors."""
    if reads_this_shape(request.scope["path"].removeprefix(request.scope.get("root_path", "")), request.headers):
        return in_this_shape(reply, request.state.request_id)
    return reply.response()
