"""Reads a request's JSON body: bounded, strict, and without surprises later.

Refused here, so that nothing behind it has to think of them: bodies over the limit, or with more in them than any request needs or
nested deep enough to exhaust a recursive reader (`json_shape`), anything that is not UTF-8 JSON with an object on top, NaN and Infinity,
numbers out of range, keys given twice, and lone surrogates.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from octavo.config.sizes import format_bytes
from octavo.frontend.http.errors import BadBody, ClientGone, short_repr
from octavo.frontend.http.limits import LARGE, off_loop
from octavo.frontend.json_shape import MAX_DEPTH, TooMuch, check_shape

_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

M = TypeVar("M", bound=BaseModel)


async def read_request(request: Request, schema: type[M], max_bytes: int) -> M:
    """The body as `schema`.

    Raises:
        BadBody: it cannot be read.
        pydantic.ValidationError: it is JSON of another shape.
    """
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise BadBody(f"Content-Type is {short_repr(content_type)}; send JSON with the header Content-Type: application/json.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise BadBody(f"Content-Encoding is {short_repr(encoding)}; send the JSON as it is, not compressed.")
    raw = await read_body(request, max_bytes)
    return await off_loop(len(raw) > LARGE, lambda: schema.model_validate(parse_json(raw)))


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The raw body; stops reading as soon as it is known to be too large."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > max_bytes:
        raise _too_large(max_bytes)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)


def _too_large(max_bytes: int) -> BadBody:
    return BadBody(f"The body is larger than {max_bytes} bytes ({format_bytes(max_bytes)}), the limit of this server.", status=413)


def parse_json(body: bytes) -> dict[str, Any]:
    """`body` as a JSON object, or `BadBody`."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise BadBody(f"The body is not valid UTF-8 (byte {e.start}).") from None
    if not text.strip():
        raise BadBody("The body is empty; send a JSON object.")
    try:
        check_shape(body)
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except TooMuch as e:
        raise BadBody(f"The body {e}") from None
    except json.JSONDecodeError as e:
        raise BadBody(f"The body is not valid JSON: {e.msg} at line {e.lineno}, column {e.colno}.") from None
    except RecursionError:
        raise BadBody(f"The body is nested too deeply; {MAX_DEPTH} levels are allowed.") from None
    except ValueError:
        raise BadBody("The body holds a number with too many digits.") from None
    if not isinstance(value, dict):
        raise BadBody(f"The body must be a JSON object, got {short_repr(value)}.")
    if _ESCAPED_SURROGATE.search(body) is not None:
        _check_texts(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise BadBody(f"The key {short_repr(twice)} is given twice.", param=twice[:100])
    return result


def _constant(name: str) -> float:
    raise BadBody(f"The body holds {name}, which is not a JSON number.")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadBody(f"The number {short_repr(text)} is out of range.")
    return value


def _check_texts(value: Any) -> None:
    rest = [value]
    while rest:
        node = rest.pop()
        if isinstance(node, str):
            _check_text(node)
        elif isinstance(node, dict):
            rest += node
            rest += node.values()
        elif isinstance(node, list):
            rest += node


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise BadBody(f"The body holds half of a surrogate pair (\\u{ord(text[e.start]):04x}), which is not a character.") from None
