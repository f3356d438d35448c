"""POST /invocations: the one route by which SageMaker asks a model, whatever it is asked for. The body says which route is meant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Message

from octavo.errors import InvalidRequest
from octavo.frontend.http.body import parse_json, read_body
from octavo.frontend.http.context import ServerContext, context_of
from octavo.frontend.http.limits import LARGE, off_loop
from octavo.frontend.http.routes import chat, completions, pooling, responses

router = APIRouter()

Route = Callable[[Request], Awaitable[Response]]


@router.post("/invocations", include_in_schema=False)
async def invoke(request: Request) -> Response:
    ctx = context_of(request)
    raw = await read_body(request, ctx.settings.max_body_bytes)
    route = _route(ctx, await off_loop(len(raw) > LARGE, parse_json, raw))
    left = [raw]

    async def again() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await request.receive()

    return await route(Request(request.scope, again))


def _route(ctx: ServerContext, body: dict[str, Any]) -> Route:
    """Raises InvalidRequest for a body that is for no route of this model."""
    model = ctx.llm.config.model.pooling
    if model is None:
        by_field: dict[str, Route] = {
            "messages": chat.create_chat_completion,
            "prompt": completions.create_completion,
            "input": responses.create_response,
        }
    else:
        usual = pooling.classify if model.labels else pooling.embeddings
        scored: dict[str, Route] = {"query": pooling.rerank, "text_1": pooling.score, "queries": pooling.score}
        by_field = {**scored, "input": usual, "messages": usual}
    found = next((route for field, route in by_field.items() if body.get(field) is not None), None)
    if found is None:
        raise InvalidRequest(f"The body must have one of {', '.join(by_field)}: that says what is asked for.", param=next(iter(by_field)))
    return found
