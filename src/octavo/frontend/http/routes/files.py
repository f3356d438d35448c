"""/v1/files: uploads of batch inputs, and the outputs of batches."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, Response
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from octavo.config.sizes import format_bytes
from octavo.errors import InvalidRequest
from octavo.frontend.http.batches.records import Record, file_record
from octavo.frontend.http.batches.store import Page
from octavo.frontend.http.context import context_of, json_response, owner_of
from octavo.frontend.http.errors import BadBody, ClientGone, NotFound, clip, short_repr

router = APIRouter()

MAX_NAME_CHARS = 255
FORM_OVERHEAD = 64 * 1024
"""Bytes that a form may have beside the file."""
PURPOSES = ("batch", "batch_output")
LONGEST_LIFE = 30 * 24 * 3600
_RANGE = re.compile(r"bytes=(?=.*\d)(\d{0,18})-(\d{0,18})", re.ASCII)
_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": LONGEST_LIFE},
                    },
                }
            }
        },
    }
}


@router.post("/v1/files", openapi_extra=_UPLOAD)
async def upload_file(request: Request) -> Response:
    ctx = context_of(request)
    form = await _form(request, ctx.settings.max_file_bytes)
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise InvalidRequest("file is missing: send a form with file and purpose.", param="file")
        if purpose != "batch":
            raise InvalidRequest(f"purpose must be batch, got {short_repr(purpose)}.", param="purpose")
        seconds = expiry(form.get("expires_after[anchor]"), form.get("expires_after[seconds]"), "expires_after")
        store, size = ctx.batches.store, file.size or 0
        if size == 0:
            raise InvalidRequest("The file is empty.", param="file")
        if store.used_bytes() + size > store.max_bytes:
            raise BadBody(
                f"There is no room for {format_bytes(size)} more: files may take {format_bytes(store.max_bytes)}. Delete some.", status=413
            )
        name = clip(file.filename or "file", MAX_NAME_CHARS)
        record = file_record(f"file-{uuid.uuid4().hex}", name, size, "batch", int(store.clock()), seconds)
        await asyncio.to_thread(store.write_content, record["id"], file.file)
        store.insert_file(record, owner_of(request))
    finally:
        await form.close()
    return json_response(record)


async def _form(request: Request, max_bytes: int) -> FormData:
    """The form in the body; a large file in it goes to disk as it comes."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise BadBody("Send the file as a form: Content-Type: multipart/form-data.")

    async def bounded() -> AsyncGenerator[bytes, None]:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > max_bytes + FORM_OVERHEAD:
                raise BadBody(f"The file is larger than {max_bytes} bytes ({format_bytes(max_bytes)}).", status=413)
            yield part

    try:
        return await MultiPartParser(request.headers, bounded(), max_files=1, max_fields=16).parse()
    except MultiPartException as e:
        raise BadBody(f"The form cannot be read: {e.message}") from None
    except (LookupError, UnicodeError):
        raise BadBody("The form cannot be read: its text is not in a known encoding.") from None
    except ClientDisconnect:
        raise ClientGone from None


def expiry(anchor: Any, seconds: Any, name: str) -> int | None:
    """Seconds that a file is kept, from both fields of an `expires_after`; None: for ever.

    Raises:
        InvalidRequest
    """
    if anchor is None and seconds is None:
        return None
    try:
        value = int(seconds)
    except (TypeError, ValueError):
        value = 0
    if anchor != "created_at" or not 3600 <= value <= LONGEST_LIFE:
        raise InvalidRequest(f"{name} needs anchor created_at and seconds, 3600 to {LONGEST_LIFE}.", param=name)
    return value


@router.get("/v1/files")
async def list_files(
    request: Request,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    store = context_of(request).batches.store
    if purpose not in (None, *PURPOSES):
        raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}, got {short_repr(purpose)}.", param="purpose")
    return json_response(listing(store.files(owner_of(request), purpose=purpose, limit=limit, after=after, ascending=order == "asc")))


@router.get("/v1/files/{file_id}")
async def get_file(request: Request, file_id: str) -> Response:
    return json_response(_file(request, file_id))


@router.get("/v1/files/{file_id}/content")
async def get_content(request: Request, file_id: str) -> Response:
    record = _file(request, file_id)
    path = context_of(request).batches.store.path(record["id"])
    try:
        found = path.stat()
    except FileNotFoundError:  # deleted a moment ago
        raise _not_found(file_id) from None
    _settle_range(request, found.st_size)
    return FileResponse(path, media_type="application/octet-stream", stat_result=found)


def _settle_range(request: Request, size: int) -> None:
    """Take a Range header away that is not one range of bytes, as if it had not been sent: then the whole file is the answer.

    Raises:
        HTTPException: 416, for a range that begins behind the end of the file.
    """
    given = request.headers.get("range")
    match = _RANGE.fullmatch(given.strip()) if given is not None else None
    if match and match[1] and int(match[1]) >= size:
        raise HTTPException(416, f"The file has {size} bytes; the range begins behind them.", {"Content-Range": f"bytes */{size}"})
    if match is None or (match[1] and match[2] and int(match[2]) < int(match[1])):
        request.scope["headers"] = [(name, value) for name, value in request.scope["headers"] if name != b"range"]


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    if not context_of(request).batches.store.delete_file(file_id, owner_of(request)):
        raise _not_found(file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


def _file(request: Request, file_id: str) -> Record:
    record = context_of(request).batches.store.file(file_id, owner_of(request))
    if record is None:
        raise _not_found(file_id)
    return record


def _not_found(file_id: str) -> NotFound:
    return NotFound(f"There is no file {short_repr(file_id)} here.", param="file_id")


def listing(page: Page) -> dict[str, Any]:
    """A page of records as a list object."""
    return {
        "object": "list",
        "data": page.data,
        "first_id": page.data[0]["id"] if page.data else None,
        "last_id": page.data[-1]["id"] if page.data else None,
        "has_more": page.has_more,
    }
