"""Routes that clients of this API know and this server does not have yet: a clear 501 instead of a 404 that looks like a typo."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response

router = APIRouter(include_in_schema=False)

WHAT = {
    "/v1/audio/transcriptions": "Audio",
    "/v1/audio/translations": "Audio",
    "/v1/audio/speech": "Audio",
    "/v1/images/generations": "Images",
    "/v1/moderations": "Moderation",
    "/v1/load_lora_adapter": "LoRA adapters",
    "/v1/unload_lora_adapter": "LoRA adapters",
    "/v1/responses/compact": "Compacting a conversation",
}
"""POST."""
LISTS = {"/v1/chat/completions": "A list of stored chat completions"}
"""GET."""


async def not_yet(request: Request) -> Response:
    path = request.scope["route"].path
    what = (LISTS if request.method == "GET" else WHAT)[path]
    raise HTTPException(
        501,
        f"{what} ({request.method} {path}) cannot be served yet. This server has /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages.",
    )


for _path in WHAT:
    router.add_api_route(_path, not_yet, methods=["POST"])
for _path in LISTS:
    router.add_api_route(_path, not_yet, methods=["GET"])
