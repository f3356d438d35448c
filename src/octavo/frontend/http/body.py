"""Reads a request's JSON body: bounded, strict, and without surprises later.

Refused here, so that nothing behind it has to think of them: bodies over the limit, or with more objects or fields than any request
needs, anything that is not UTF-8 JSON with an object on top, NaN and Infinity, numbers out of range, keys given twice, lone surrogates, and nesting deep enough to exhaust
a recursive reader.
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
from octavo.frontend.http.limits import LARGE, MAX_FIELDS, MAX_OBJECTS, off_loop

MAX_DEPTH = 100
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
    if body.count(b'":') - body.count(b'\\":') > MAX_FIELDS:
        # A quote inside a text has a backslash before it, so these are ends of keys. One huge object would be built in one go,
        # with every other thread waiting for it.
        raise _too_many_fields()
    try:
        value = json.loads(text, object_pairs_hook=_Objects(), parse_constant=_constant, parse_float=_float)
    except json.JSONDecodeError as e:
        raise BadBody(f"The body is not valid JSON: {e.msg} at line {e.lineno}, column {e.colno}.") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        raise BadBody("The body holds a number with too many digits.") from None
    if not isinstance(value, dict):
        raise BadBody(f"The body must be a JSON object, got {short_repr(value)}.")
    has_escapes = _ESCAPED_SURROGATE.search(body) is not None
    if has_escapes or body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_nesting(value, has_escapes)
    return value


def _too_many_fields() -> BadBody:
    return BadBody(f"The objects of the body have more than {MAX_FIELDS} fields, the most that a request may have.")


class _Objects:
    """Makes the objects of one body, and counts them."""

    def __init__(self) -> None:
        self._objects = 0
        self._fields = 0

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._objects += 1
        self._fields += len(pairs)
        if self._objects > MAX_OBJECTS:
            raise BadBody(f"The body holds more than {MAX_OBJECTS} objects, the most that a request may have.")
        if self._fields > MAX_FIELDS:
            raise _too_many_fields()
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


def _too_deep() -> BadBody:
    return BadBody(f"The body is nested too deeply; {MAX_DEPTH} levels are allowed.")


def _check_nesting(value: Any, check_text: bool) -> None:
    """Level by level instead of recursively: this is what guards recursive code."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for node in level:
            children = node
            if isinstance(node, dict):
                children = node.values()
                if check_text:
                    for key in node:
                        _check_text(key)
            for child in children:
                if isinstance(child, dict | list):
                    deeper.append(child)
                elif check_text and isinstance(child, str):
                    _check_text(child)
        if not deeper:
            return
        level = deeper
    raise _too_deep()


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise BadBody(f"The body holds half of a surrogate pair (\\u{ord(text[e.start]):04x}), which is not a character.") from None
