"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo.errors import InvalidRequest
from octavo.frontend.http.chat import ChatWriter
from octavo.frontend.http.chat_plan import plan_chat
from octavo.frontend.http.context import client_of, context_of, request_id
from octavo.frontend.http.errors import renamed
from octavo.frontend.http.generation import answer
from octavo.frontend.http.schemas import ChatRequest, body_schema
from octavo.frontend.http.tracking import RequestTracker

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, ChatRequest)
    job_id = request_id(request, "chatcmpl", body.request_id)
    tracker = RequestTracker(job_id, "/v1/chat/completions", client_of(request), ctx.settings)
    try:
        options, job = await plan_chat(ctx, request, body, job_id)
        tracker.received(job.params, [options.prompt_text])
        return await answer(request, ctx, job, tracker, ChatWriter(options), stream=bool(body.stream))
    except InvalidRequest as error:
        raise renamed(error, {"prompt": "messages"}) from None
