"""/v1/conversations: what /v1/responses goes on with when it is given a `conversation`."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from octavo.errors import InvalidRequest
from octavo.frontend.http.context import context_of, json_response, owner_of
from octavo.frontend.http.errors import NotFound, short_repr
from octavo.frontend.http.limits import check_metadata, is_large, off_loop
from octavo.frontend.http.responses.conversations import append_items, find_conversation, is_conversation, new_conversation, not_found
from octavo.frontend.http.responses.items import Item, dereferenced, input_items, item_page
from octavo.frontend.http.schemas import Schema, body_schema

router = APIRouter(prefix="/v1/conversations")


class ConversationRequest(Schema):
    items: Any = None
    metadata: dict[str, Any] | None = None


class ItemsRequest(Schema):
    items: Any = None


@router.post("", openapi_extra=body_schema(ConversationRequest))
async def create(request: Request) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, ConversationRequest)
    check_metadata(body.metadata)
    items = [] if body.items is None else await _items(request, body.items)
    conversation = new_conversation(int(time.time()), body.metadata or {}, items, owner_of(request))
    ctx.responses.put(conversation)
    return json_response(conversation.response)


@router.get("/{conversation_id}")
async def retrieve(request: Request, conversation_id: str) -> Response:
    return json_response(find_conversation(context_of(request).responses, conversation_id, owner_of(request)).response)


@router.post("/{conversation_id}", openapi_extra=body_schema(ConversationRequest))
async def update(request: Request, conversation_id: str) -> Response:
    """Replaces its metadata."""
    ctx = context_of(request)
    body = await ctx.read(request, ConversationRequest)
    if body.metadata is None:
        raise InvalidRequest("metadata is missing: an object with strings.", param="metadata")
    check_metadata(body.metadata)
    with ctx.responses.changing(conversation_id, owner_of(request)) as stored:
        if stored is None or not is_conversation(stored):
            raise not_found(conversation_id)
        stored.response["metadata"] = body.metadata
    return json_response(stored.response)


@router.delete("/{conversation_id}")
async def delete(request: Request, conversation_id: str) -> Response:
    store, owner = context_of(request).responses, owner_of(request)
    find_conversation(store, conversation_id, owner)
    store.delete(conversation_id, owner)
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.post("/{conversation_id}/items", openapi_extra=body_schema(ItemsRequest))
async def add_items(request: Request, conversation_id: str) -> Response:
    ctx = context_of(request)
    body = await ctx.read(request, ItemsRequest)
    items = await _items(request, body.items)
    added = append_items(ctx.responses, conversation_id, owner_of(request), items)
    if added is None:
        raise not_found(conversation_id)
    return json_response(item_page(added, limit=len(added), order="asc", after=None))


@router.get("/{conversation_id}/items")
async def list_items(
    request: Request,
    conversation_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    stored = find_conversation(context_of(request).responses, conversation_id, owner_of(request))
    return json_response(item_page(stored.items, limit=limit, order=order, after=after))


@router.get("/{conversation_id}/items/{item_id}")
async def retrieve_item(request: Request, conversation_id: str, item_id: str) -> Response:
    stored = find_conversation(context_of(request).responses, conversation_id, owner_of(request))
    found = next((item for item in stored.items if item["id"] == item_id), None)
    if found is None:
        raise _no_item(item_id)
    return json_response(found)


@router.delete("/{conversation_id}/items/{item_id}")
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Takes an item out; replies with the conversation."""
    with context_of(request).responses.changing(conversation_id, owner_of(request)) as stored:
        if stored is None or not is_conversation(stored):
            raise not_found(conversation_id)
        left = [item for item in stored.items if item["id"] != item_id]
        if len(left) == len(stored.items):
            raise _no_item(item_id)
        stored.items[:] = left
    return json_response(stored.response)


async def _items(request: Request, given: Any) -> list[Item]:
    store, owner = context_of(request).responses, owner_of(request)
    items = await off_loop(is_large(given), input_items, given, "items")
    return dereferenced(items, lambda item_id: store.output_item(item_id, owner), "items")


def _no_item(item_id: str) -> NotFound:
    return NotFound(f"There is no item {short_repr(item_id)} in this conversation.", param="item_id")
