"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's shape, errors included."""

from __future__ import annotations

from collections.abc import Awaitable

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo.frontend.http.chat_plan import plan_chat
from octavo.frontend.http.context import ServerContext, client_of, context_of, json_response, request_id
from octavo.frontend.http.conversation import render
from octavo.frontend.http.errors import MAX_MESSAGE_CHARS, ClientGone, ErrorReply, clip, describe, is_expected
from octavo.frontend.http.generation import answer
from octavo.frontend.http.messages import MessageWriter
from octavo.frontend.http.messages_schema import CountTokensRequest, MessagesRequest, chat_request
from octavo.frontend.http.schemas import body_schema
from octavo.frontend.http.sse import Framing, named_event
from octavo.frontend.http.tracking import RequestTracker
from octavo.frontend.parsing.formats import reasoning_format

router = APIRouter()

PATH = "/v1/messages"

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _error(reply: ErrorReply) -> dict[str, object]:
    kind = _TYPES.get(reply.status, "api_error" if reply.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": clip(reply.message, MAX_MESSAGE_CHARS)}}


FRAMING = Framing(lambda reply: named_event("error", _error(reply)), b"")


@router.post(PATH, openapi_extra=body_schema(MessagesRequest))
async def create_message(request: Request) -> Response:
    return await _in_its_shape(_create(request))


@router.post(PATH + "/count_tokens", openapi_extra=body_schema(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    return await _in_its_shape(_count(request))


async def _in_its_shape(work: Awaitable[Response]) -> Response:
    """Errors that clients of this API understand. Unexpected ones are logged and answered further out."""
    try:
        return await work
    except Exception as error:
        if not is_expected(error) or isinstance(error, ClientGone):
            raise
        reply = describe(error)
        return Response(msgspec.json.encode(_error(reply)), reply.status, reply.headers, media_type="application/json")


def _thinks(ctx: ServerContext) -> bool:
    return reasoning_format(ctx.settings.reasoning_parser, ctx.llm.tokenizer.chat_template) is not None


async def _create(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, MessagesRequest)
    chat = chat_request(body, thinks=_thinks(ctx))
    message_id = request_id(request, "msg", None).replace("msg-", "msg_", 1)
    tracker = RequestTracker(message_id, PATH, client_of(request), ctx.settings)
    options, job = await plan_chat(ctx, request, chat, message_id)
    tracker.received(job.params, [options.prompt_text])
    return await answer(request, ctx, job, tracker, MessageWriter(options), stream=bool(body.stream), framing=FRAMING)


async def _count(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, CountTokensRequest)
    prompt = await render(ctx.llm, chat_request(body, thinks=False), trust_template=False)
    return json_response({"input_tokens": len(prompt.token_ids)})
