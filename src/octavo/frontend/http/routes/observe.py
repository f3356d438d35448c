"""GET /metrics for Prometheus; the dashboard page and the numbers it draws."""

from __future__ import annotations

import time
from functools import cache
from importlib.resources import files

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo._version import __version__
from octavo.frontend.http.context import context_of, json_response

router = APIRouter()
dashboard_router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(await context_of(request).render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


@dashboard_router.get("/stats")
async def stats(request: Request) -> Response:
    """The engine's counters and what it was started with, for the dashboard."""
    ctx = context_of(request)
    ready = ctx.llm.ready_report
    return json_response(
        {
            "time": time.monotonic(),
            "model": ctx.model_name,
            "version": __version__,
            "device": ready.device,
            "dtype": ready.dtype,
            "max_model_len": ready.max_model_len,
            "max_num_seqs": ready.max_num_seqs,
            "block_size": ready.block_size,
            "cache_bytes": ready.cache_bytes,
            "state": ctx.llm.state,
            "http_requests": ctx.peers.total_live(),
            "engine": msgspec.to_builtins(ctx.llm.stats()),
        }
    )


@cache
def _page() -> bytes:
    return files("octavo.frontend.http").joinpath("dashboard.html").read_bytes()


@dashboard_router.get("/", include_in_schema=False)
@dashboard_router.get("/dashboard", include_in_schema=False)
async def dashboard() -> Response:
    # The page needs nothing from elsewhere and may load nothing from elsewhere.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'"
    return Response(_page(), media_type="text/html; charset=utf-8", headers={"Content-Security-Policy": policy})
