"""POST /abort: end a running request by its id, from another connection than the one that reads it."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo.errors import InvalidRequest
from octavo.frontend.http.context import context_of, json_response
from octavo.frontend.http.schemas import Schema, Strings, body_schema

router = APIRouter()


class AbortRequest(Schema):
    request_id: str | None = None
    request_ids: Strings | None = None


@router.post("/abort", openapi_extra=body_schema(AbortRequest))
async def abort(request: Request) -> Response:
    """End requests, named as in their replies. Each gets what was generated so far, with finish_reason abort. Unknown ids are ignored."""
    ctx = context_of(request)
    body = await ctx.read(request, AbortRequest)
    names = [*([body.request_id] if body.request_id else ()), *(body.request_ids or ())]
    if not names:
        raise InvalidRequest("Give request_id or request_ids.", param="request_id")
    aborted = [name for name in dict.fromkeys(names) if name in ctx.live]
    for name in aborted:
        # A request with several prompts is several to the engine.
        for engine_id in ctx.llm.request_ids():
            if engine_id == name or re.fullmatch(re.escape(name) + r"-\d+", engine_id):
                await ctx.llm.abort(engine_id)
    return json_response({"aborted": aborted})
