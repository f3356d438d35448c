"""Routes that exist only with --server-dev-mode."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo.frontend.http.context import context_of, json_response

router = APIRouter()


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forgets every cached prefix. `success` is false when blocks in use prevented it."""
    return json_response({"success": await context_of(request).llm.reset_prefix_cache()})
