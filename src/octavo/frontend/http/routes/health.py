"""Whether the server lives and the engine works. None of these needs a key or waits for the engine."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo._version import __version__
from octavo.errors import EngineDead
from octavo.frontend.http.context import context_of, json_response

router = APIRouter()


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health(request: Request) -> Response:
    """200 with no body, or 503 when the engine is gone for good or hangs (it has work but finishes no step)."""
    try:
        context_of(request).llm.check_health()
    except EngineDead:
        return Response(status_code=503)
    return Response(status_code=200)


@router.get("/ping")
@router.post("/ping", include_in_schema=False)
async def ping(request: Request) -> Response:
    """The same, as SageMaker asks."""
    return await health(request)


@router.get("/live")
async def live() -> Response:
    """200 as long as this process turns its loop, whatever the engine does."""
    return Response(status_code=200)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 when a request sent now would be worked on; else 503 with the reason. A restart of the engine is the difference to /health."""
    llm = context_of(request).llm
    reason = None
    try:
        llm.check_health()
        if llm.state != "running":
            reason = f"The engine is {llm.state}."
    except EngineDead as e:
        reason = str(e)
    reply = json_response({"ready": reason is None, "reason": reason, "last_step_age": round(llm.last_step_age(), 3)})
    reply.status_code = 200 if reason is None else 503
    return reply


@router.get("/version")
async def version() -> Response:
    return json_response({"version": __version__})


@router.get("/load")
async def load(request: Request) -> Response:
    """Generating HTTP requests now, and sequences in the engine."""
    ctx = context_of(request)
    stats = ctx.llm.stats()
    return json_response({"server_load": ctx.peers.total_live(), "running": stats.running, "waiting": stats.waiting})
