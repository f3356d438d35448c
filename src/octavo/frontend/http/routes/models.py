"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo.frontend.http.context import ServerContext, context_of, json_response

router = APIRouter()


def _card(ctx: ServerContext, name: str) -> dict[str, Any]:
    permission = {
        "id": "modelperm-octavo",
        "object": "model_permission",
        "created": ctx.started,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": ctx.started,
        # Clients choose their request extensions by this word, and the extensions are those.
        "owned_by": "vllm",
        "root": ctx.llm.config.model.name,
        "parent": None,
        "max_model_len": ctx.llm.ready_report.max_model_len,
        "permission": [permission],
        # What Anthropic's clients read
        "type": "model",
        "display_name": name,
        "lifecycle": "active",
        "max_input_tokens": ctx.llm.ready_report.max_model_len,
        "max_tokens": ctx.llm.ready_report.max_model_len,
        "created_at": datetime.datetime.fromtimestamp(ctx.started, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    ctx = context_of(request)
    names = ctx.model_names
    cards = [_card(ctx, name) for name in names]
    return json_response({"object": "list", "data": cards, "first_id": names[0], "last_id": names[-1], "has_more": False})


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    ctx = context_of(request)
    ctx.check_model(name)
    return json_response(_card(ctx, name))
