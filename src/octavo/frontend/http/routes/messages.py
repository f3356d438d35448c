"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo.frontend.http.chat import ChatWriter
from octavo.frontend.http.chat_plan import plan_chat
from octavo.frontend.http.context import client_key, client_of, context_of, json_response, request_id
from octavo.frontend.http.conversation import render
from octavo.frontend.http.errors import ClientGone, describe, is_expected, renamed
from octavo.frontend.http.generation import answer
from octavo.frontend.http.limits import is_large, off_loop
from octavo.frontend.http.messages.errors import in_this_shape
from octavo.frontend.http.messages.request import OUR_NAME, CountTokensRequest, MessagesRequest, chat_request
from octavo.frontend.http.messages.writer import STYLE, MessageOptions, MessagesWriter
from octavo.frontend.http.schemas import body_schema
from octavo.frontend.http.tracking import RequestTracker

logger = logging.getLogger("octavo.server")

router = APIRouter()


@router.post("/v1/messages", openapi_extra=body_schema(MessagesRequest))
async def create_message(request: Request) -> Response:
    return await _in_our_shape(request, _create)


@router.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """How many tokens these messages are for the model."""
    return await _in_our_shape(request, _count)


async def _in_our_shape(request: Request, handle: Callable[[Request], Awaitable[Response]]) -> Response:
    """The reply of `handle`, with errors as this API has them."""
    try:
        return await handle(request)
    except ClientGone:
        raise
    except Exception as error:
        if not is_expected(error):
            logger.exception("Request %s (%s) failed", request.state.request_id, request.url.path)
        return in_this_shape(describe(renamed(error, OUR_NAME)), request.state.request_id)


async def _create(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, MessagesRequest)
    job_id = request_id(request, "msg", body.request_id)
    tracker = RequestTracker(job_id, "/v1/messages", client_of(request), ctx.settings)
    options, job = await plan_chat(ctx, request, await off_loop(is_large(body.messages), chat_request, body), job_id)
    tracker.received(job.params, [options.prompt_text])
    thinking = body.thinking or {}
    wanted = MessageOptions(
        id=job_id,
        model=ctx.model_name,
        stop_sequences=tuple(body.stop_sequences or ()),
        max_tokens=body.max_tokens,
        thinking=thinking.get("type") in ("enabled", "adaptive") and thinking.get("display") != "omitted",
    )
    if thinking.get("type") == "enabled":
        marks = options.plan.marks
        if marks is not None and (marks.reasoning_end_ids or marks.reasoning_end):
            job.params.thinking_token_budget = min(thinking["budget_tokens"], 2**31 - 1)
    writer = MessagesWriter(wanted, ChatWriter(options))
    return await answer(request, ctx, job, tracker, writer, stream=bool(body.stream), style=STYLE)


async def _count(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, CountTokensRequest)
    chat = await off_loop(is_large(body.messages), chat_request, body)
    prompt = await render(ctx, client_key(request), chat)
    return json_response({"input_tokens": len(prompt.token_ids)})
