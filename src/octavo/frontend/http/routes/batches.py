"""/v1/batches: many requests in one file, answered when there is room."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from octavo.errors import InvalidRequest
from octavo.frontend.http.batches.lines import URLS
from octavo.frontend.http.batches.records import Record, batch_record
from octavo.frontend.http.context import context_of, json_response, owner_of
from octavo.frontend.http.errors import NotFound, short_repr
from octavo.frontend.http.limits import check_metadata
from octavo.frontend.http.routes.files import expiry, listing
from octavo.frontend.http.schemas import Schema, body_schema

router = APIRouter()

_UNITS = {"m": 60, "h": 3600, "d": 86400}
_LONGEST_WINDOW = 30 * 86400
_CANCELLABLE = ("validating", "in_progress")


class BatchRequest(Schema):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, Any] | None = None
    output_expires_after: dict[str, Any] | None = None


@router.post("/v1/batches", openapi_extra=body_schema(BatchRequest))
async def create_batch(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, BatchRequest)
    owner, store = owner_of(request), ctx.batches.store
    if body.endpoint not in URLS:
        raise InvalidRequest(f"endpoint must be one of {', '.join(URLS)}, got {short_repr(body.endpoint)}.", param="endpoint")
    source = store.file(body.input_file_id, owner)
    if source is None or source["purpose"] != "batch":
        raise _no_input(body.input_file_id)
    check_metadata(body.metadata)
    if (keep := body.output_expires_after) is not None:
        expiry(keep.get("anchor"), keep.get("seconds"), "output_expires_after")
    record = batch_record(
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        window=body.completion_window,
        window_seconds=_window(body.completion_window),
        metadata=body.metadata,
        created=int(store.clock()),
        output_expires_after=keep,
    )
    if not store.add_batch(record, owner):
        raise _no_input(body.input_file_id)
    ctx.batches.wake()
    return json_response(record)


def _no_input(file_id: str) -> InvalidRequest:
    return InvalidRequest(f"There is no file {short_repr(file_id)} with purpose batch.", param="input_file_id")


def _window(text: str) -> int:
    """Seconds of a completion window, such as 24h."""
    match = re.fullmatch(r"([1-9]\d{0,5})([mhd])", text, re.ASCII)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_WINDOW:
        raise InvalidRequest(
            f"completion_window must be like 24h (m, h or d, up to 30d), got {short_repr(text)}.", param="completion_window"
        )
    return seconds


@router.get("/v1/batches")
async def list_batches(request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None) -> Response:
    return json_response(listing(context_of(request).batches.store.batches(owner_of(request), limit=limit, after=after)))


@router.get("/v1/batches/{batch_id}")
async def get_batch(request: Request, batch_id: str) -> Response:
    return json_response(_batch(request, batch_id))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Ends a batch; what it has answered is kept."""
    ctx = context_of(request)
    with ctx.batches.store.changing(batch_id, owner_of(request)) as found:
        if found is None:
            raise _not_found(batch_id)
        record, cancelled = found, found["status"] in _CANCELLABLE
        if cancelled:
            record.update(status="cancelling", cancelling_at=int(ctx.batches.store.clock()))
    if cancelled:
        ctx.batches.wake()
    elif record["status"] not in ("cancelling", "cancelled"):
        raise InvalidRequest(f"The batch cannot be cancelled: it is {record['status']}.", param="batch_id")
    return json_response(record)


def _batch(request: Request, batch_id: str) -> Record:
    record = context_of(request).batches.store.batch(batch_id, owner_of(request))
    if record is None:
        raise _not_found(batch_id)
    return record


def _not_found(batch_id: str) -> NotFound:
    return NotFound(f"There is no batch {short_repr(batch_id)} here.", param="batch_id")
