"""/v1/responses: create, stream, continue, retrieve, cancel, delete."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo.errors import InvalidRequest, OctavoError
from octavo.frontend.http.chat import ChatOptions
from octavo.frontend.http.chat_plan import plan_chat
from octavo.frontend.http.context import ServerContext, client_of, context_of, fair_key, json_response, request_id
from octavo.frontend.http.errors import ErrorReply, NotFound, clip, describe, short_repr
from octavo.frontend.http.generation import Generation, Job, answer
from octavo.frontend.http.responses import Json, ResponseWriter, new_response, output_messages
from octavo.frontend.http.responses_schema import ResponsesRequest, chat_request, input_messages
from octavo.frontend.http.responses_store import StoredResponse
from octavo.frontend.http.schemas import body_schema
from octavo.frontend.http.sse import Framing, named_event
from octavo.frontend.http.tracking import RequestTracker

logger = logging.getLogger("octavo.server")

router = APIRouter()

PATH = "/v1/responses"


_FIELDS = {"response_format": "text", "messages": "input", "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens"}
"""What fields of a chat are called here, for error messages."""


def _stream_error(reply: ErrorReply) -> bytes:
    return named_event("error", {"type": "error", "code": str(reply.code or reply.type), "message": reply.message, "param": reply.param})


FRAMING = Framing(_stream_error, b"")


@router.post(PATH, openapi_extra=body_schema(ResponsesRequest))
async def create_response(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, ResponsesRequest)
    response_id = request_id(request, "resp", body.request_id).replace("resp-", "resp_", 1)
    if body.background and (body.stream or body.store is False):
        raise InvalidRequest("background needs store, and cannot be combined with stream.", param="background")
    owner = fair_key(request, None)
    history = _history(ctx, body.previous_response_id, owner)
    messages = input_messages(body.input)
    chat = chat_request(body, history)
    tracker = RequestTracker(response_id, PATH, client_of(request), ctx.settings)
    try:
        options, job = await plan_chat(ctx, request, chat, response_id)
    except InvalidRequest as error:
        renamed = _FIELDS.get(error.param or "")
        if renamed is None:
            raise
        raise InvalidRequest(str(error), param=renamed, code=error.code) from None
    tracker.received(job.params, [options.prompt_text])
    items = [{"type": "message", "role": "user", "content": body.input}] if isinstance(body.input, str) else list(body.input)
    stored = StoredResponse(owner, new_response(body, options, response_id), [*history, *messages], items)

    def finished(response: Json) -> None:
        stored.response = response
        if body.store is not False:
            ctx.responses.put(stored)

    writer = _writer(ctx, options, stored.response, finished)
    if body.background:
        return await _in_background(ctx, job, tracker, writer, stored)
    return await answer(request, ctx, job, tracker, writer, stream=bool(body.stream), framing=FRAMING)


def _writer(ctx: ServerContext, options: ChatOptions, response: Json, finished: Any) -> ResponseWriter:
    tokenizer = ctx.llm.tokenizer
    return ResponseWriter(options, response, lambda text: len(tokenizer.encode(text, add_special_tokens=False)), finished)


def _history(ctx: ServerContext, previous: str | None, owner: str) -> list[Json]:
    if previous is None:
        return []
    stored = _stored(ctx, previous, owner, "previous_response_id")
    if stored.task is not None:
        raise InvalidRequest(f"previous_response_id: {short_repr(previous)} is still running.", param="previous_response_id")
    return [*stored.messages, *output_messages(stored.response)]


def _stored(ctx: ServerContext, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
    stored = ctx.responses.get(response_id, owner)
    if stored is None:
        raise NotFound(f"There is no response {short_repr(response_id)} here (it may be too old: only the newest are kept).", param=param)
    return stored


async def _in_background(ctx: ServerContext, job: Job, tracker: RequestTracker, writer: ResponseWriter, stored: StoredResponse) -> Response:
    """Answer at once; the response is there when it is asked for."""
    generation = await Generation.start(ctx, job, tracker)

    async def run() -> None:
        response = stored.response
        try:
            await writer.whole(generation)
        except asyncio.CancelledError:
            response["status"] = "cancelled"
            raise
        except Exception as error:
            if not isinstance(error, OctavoError):
                logger.exception("Response %s failed", response["id"])
            response["status"] = "failed"
            response["error"] = {"code": "server_error", "message": clip(describe(error).message, 300)}
        finally:
            stored.task = None
            await generation.close()

    stored.response["status"] = "queued"
    stored.task = asyncio.create_task(run())
    ctx.responses.put(stored)
    reply = json_response(stored.response)
    await asyncio.sleep(0)  # a task that is cancelled before it has begun would not clean up behind itself
    return reply


@router.get(PATH + "/{response_id}")
async def retrieve_response(request: Request, response_id: str) -> Response:
    ctx = context_of(request)
    return json_response(_stored(ctx, response_id, fair_key(request, None)).response)


@router.delete(PATH + "/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    ctx = context_of(request)
    stored = _stored(ctx, response_id, fair_key(request, None))
    await _cancel(stored)
    ctx.responses.remove(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post(PATH + "/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    ctx = context_of(request)
    stored = _stored(ctx, response_id, fair_key(request, None))
    if not stored.response["background"]:
        raise InvalidRequest("Only responses made with background: true can be cancelled.", param="response_id")
    await _cancel(stored)
    return json_response(stored.response)


async def _cancel(stored: StoredResponse) -> None:
    task = stored.task
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@router.get(PATH + "/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    ctx = context_of(request)
    items = [{"id": f"item_{i}", **item} for i, item in enumerate(_stored(ctx, response_id, fair_key(request, None)).input_items)]
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": items, "has_more": False, **ends})
