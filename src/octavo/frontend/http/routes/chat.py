"""POST /v1/chat/completions, and the prompt it would come to."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo.frontend.http.chat import ChatWriter
from octavo.frontend.http.chat_plan import plan_chat
from octavo.frontend.http.context import client_of, context_of, json_response, request_id
from octavo.frontend.http.conversation import render
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
    options, job = await plan_chat(ctx, request, body, job_id)
    tracker.received(job.params, [options.prompt_text])
    return await answer(request, ctx, job, tracker, ChatWriter(options), stream=bool(body.stream))


@router.post("/v1/chat/completions/render", openapi_extra=body_schema(ChatRequest))
async def render_chat(request: Request) -> Response:
    """The prompt that a chat request comes to, as text and token ids; nothing is generated."""
    ctx = context_of(request)
    body = await ctx.read(request, ChatRequest)
    prompt = await render(ctx.llm, body, trust_template=ctx.settings.trust_request_chat_template)
    return json_response({"prompt": prompt.text, "token_ids": prompt.token_ids, "count": len(prompt.token_ids)})
