"""POST /v1/responses and what can be done with a response afterwards."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from octavo.errors import InvalidRequest, NotYet
from octavo.frontend.http.chat import ChatWriter
from octavo.frontend.http.chat_plan import plan_chat
from octavo.frontend.http.context import ServerContext, client_key, client_of, context_of, json_response, owner_of, request_id
from octavo.frontend.http.conversation import render
from octavo.frontend.http.errors import NotFound, is_expected, renamed, short_repr
from octavo.frontend.http.generation import Generation, Job, answer
from octavo.frontend.http.limits import check_count, is_large, off_loop
from octavo.frontend.http.prompts import Truncation
from octavo.frontend.http.responses.conversations import append_items, conversation_id, find_conversation, is_conversation
from octavo.frontend.http.responses.items import Item, dereferenced, input_items, item_page, messages, new_id
from octavo.frontend.http.responses.request import OUR_NAME, InputTokensRequest, ResponsesRequest, chat_request, check_request
from octavo.frontend.http.responses.store import StoredResponse
from octavo.frontend.http.responses.writer import ResponsePlan, ResponsesWriter
from octavo.frontend.http.schemas import ChatRequest, body_schema
from octavo.frontend.http.sse import CANCEL_AGAIN, StreamStyle, cancel, unless_gone
from octavo.frontend.http.tracking import RequestTracker

logger = logging.getLogger("octavo.server")

router = APIRouter()

CANCEL_POLL = 0.2
"""Seconds between looks at whether a background response has been cancelled, perhaps through another process."""
RUNNING = ("queued", "in_progress")


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
async def create_response(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, ResponsesRequest)
    response_id, owner = new_id("resp"), owner_of(request)
    job_id = request_id(request, "resp", body.request_id) if body.request_id else response_id
    tracker = RequestTracker(job_id, "/v1/responses", client_of(request), ctx.settings)
    items = await _items(ctx, body, owner)
    conversation = conversation_id(body.conversation)
    try:
        chat = await _chat(ctx, body, items, owner)
        options, job = await plan_chat(ctx, request, chat, job_id)
    except InvalidRequest as error:
        raise renamed(error, OUR_NAME) from None
    tracker.received(job.params, [options.prompt_text])

    def keep(response: dict[str, Any]) -> None:
        if body.store is not False:
            ctx.responses.put(StoredResponse(response, items, owner))
        if conversation is not None and response["status"] in ("completed", "incomplete"):
            try:
                append_items(ctx.responses, conversation, owner, [*items, *response["output"]])
            except InvalidRequest as error:
                logger.warning("Response %s is not added to its conversation: %s", response["id"], error)

    plan = ResponsePlan(response_id, int(time.time()), ctx.model_name, body, job.params, conversation)
    writer = ResponsesWriter(plan, ChatWriter(options), keep)
    if body.background:
        return await _start_in_background(request, ctx, job, tracker, plan, writer, keep)
    style = StreamStyle(failure=writer.failure, end=b"")
    try:
        return await answer(request, ctx, job, tracker, writer, stream=bool(body.stream), style=style)
    except InvalidRequest as error:
        raise renamed(error, OUR_NAME) from None


async def _items(ctx: ServerContext, body: InputTokensRequest, owner: str) -> list[Item]:
    items = await off_loop(is_large(body.input), input_items, body.input)
    return dereferenced(items, lambda item_id: ctx.responses.output_item(item_id, owner))


async def _chat(ctx: ServerContext, body: InputTokensRequest, items: list[Item], owner: str) -> ChatRequest:
    """The chat request for `items` after the conversation they continue."""
    check_request(body)
    conversation: list[Item] = []
    if (kept := conversation_id(body.conversation)) is not None:
        conversation += find_conversation(ctx.responses, kept, owner, param="conversation").items
    if body.previous_response_id is not None:
        chain = ctx.responses.chain(body.previous_response_id, owner)
        if chain is None or is_conversation(chain[-1]):
            raise InvalidRequest(
                f"There is no response {short_repr(body.previous_response_id)} here, or one that it continues is no longer kept.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if chain[-1].response["status"] in RUNNING:
            raise InvalidRequest(f"The response {body.previous_response_id} is not finished yet.", param="previous_response_id")
        for stored in chain:
            conversation += [*stored.items, *stored.response["output"]]
    conversation += items
    check_count("input, with what it continues,", conversation, "input")

    def made() -> ChatRequest:
        return chat_request(body, messages(conversation, body.instructions))

    return await off_loop(is_large(conversation), made)


async def _start_in_background(
    request: Request,
    ctx: ServerContext,
    job: Job,
    tracker: RequestTracker,
    plan: ResponsePlan,
    writer: ResponsesWriter,
    keep: Any,
) -> Response:
    generation = await unless_gone(request, Generation.start(ctx, job, tracker))
    keep(plan.object("in_progress", []))
    ctx.spawn(_run_in_background(ctx, generation, writer, plan.id))
    return json_response(plan.object("queued", []))


async def _run_in_background(ctx: ServerContext, generation: Generation, writer: ResponsesWriter, response_id: str) -> None:
    async def run() -> None:
        try:
            await writer.whole(generation)
        except Exception as error:
            if not is_expected(error):
                logger.exception("Background response %s failed", response_id)
            writer.failed(error)
        finally:
            await generation.close()

    task = asyncio.ensure_future(run())
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=CANCEL_POLL)
            if ctx.responses.cancelled(response_id):
                break
    finally:
        await cancel(task, again=CANCEL_AGAIN)


@router.post("/v1/responses/input_tokens", openapi_extra=body_schema(InputTokensRequest))
async def count_input_tokens(request: Request) -> Response:
    """How many tokens a request with this input would send to the model."""
    ctx = context_of(request)
    body = await ctx.read(request, InputTokensRequest)
    try:
        chat = await _chat(ctx, body, await _items(ctx, body, owner_of(request)), owner_of(request))
        truncation = Truncation.asked(ctx.llm, chat.truncate_prompt_tokens, None, chat.max_completion_tokens)
        prompt = await render(ctx, client_key(request), chat, truncation)
        prompt = prompt if truncation is None else truncation.of(prompt)
    except InvalidRequest as error:
        raise renamed(error, OUR_NAME) from None
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str, stream: bool = False) -> Response:
    stored = _stored(request, response_id)
    if stream:
        raise NotYet("A kept response cannot be streamed; fetch it without stream.", param="stream")
    return json_response(stored.response)


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Forgets a response. One that still runs in the background is ended."""
    _stored(request, response_id)
    context_of(request).responses.delete(response_id, owner_of(request))
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Ends a background response; one that has finished stays what it is."""
    stored = _stored(request, response_id)
    response = stored.response
    if not response["background"]:
        raise InvalidRequest("Only a response that was created with background: true can be cancelled.", param="response_id")
    if response["status"] in RUNNING:
        response["status"] = "cancelled"
        context_of(request).responses.put(stored)
    return json_response(response)


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    return json_response(item_page(_stored(request, response_id).items, limit=limit, order=order, after=after))


def _stored(request: Request, response_id: str) -> StoredResponse:
    stored = context_of(request).responses.get(response_id, owner_of(request))
    if stored is None or is_conversation(stored):
        raise _not_found(response_id)
    return stored


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"There is no response {short_repr(response_id)} here; responses are kept for a limited time.", param="response_id")
