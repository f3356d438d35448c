"""`build_app`: puts the HTTP server together around an engine. Everything an app owns hangs on its `ServerContext`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from octavo._version import __version__
from octavo.frontend.http.batches.inside import post_to_app
from octavo.frontend.http.batches.service import BatchService
from octavo.frontend.http.context import ServerContext
from octavo.frontend.http.errors import install_error_handlers
from octavo.frontend.http.messages.errors import respond
from octavo.frontend.http.middleware import ApiKeys, ErrorBoundary, HttpMetricsLayer, OneSlash, RequestIds, RootPath, UnknownParameters
from octavo.frontend.http.peers import Alone, Peers
from octavo.frontend.http.routes import (
    batches,
    chat,
    completions,
    control,
    conversations,
    development,
    files,
    health,
    invocations,
    messages,
    models,
    observe,
    pooling,
    responses,
    tokens,
    unsupported,
)
from octavo.frontend.http.settings import ServerSettings
from octavo.observe.metrics import Metrics

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM


def build_app(
    llm: AsyncLLM,
    settings: ServerSettings,
    *,
    served_model_names: Sequence[str] | None = None,
    peers: Peers | None = None,
    responses_path: str = ":memory:",
    number: int = 0,
) -> FastAPI:
    """The ASGI app over a started engine. Does not start or stop the engine.

    Args:
        served_model_names: names that requests may use; the first is echoed. Default: what the user called the model.
        peers: the other API servers over the same engine, if there are any.
        responses_path: the database of kept responses, which API servers share.
        number: which of the API servers this is. The first one runs batches.
    """
    names = tuple(served_model_names or (llm.config.model.name,))
    metrics = _metrics(llm, names[0])
    context = ServerContext(llm, settings, names, metrics, peers or Alone(), responses_path, number)

    docs = not settings.disable_fastapi_docs
    app = FastAPI(
        title="Octavo",
        version=__version__,
        docs_url="/docs" if docs else None,
        redoc_url="/redoc" if docs else None,
        openapi_url="/openapi.json" if docs else None,
    )
    app.state.context = context
    context.batches = BatchService(
        settings, partial(post_to_app, app), lambda: llm.stats().waiting > 0, others=None if peers is None else context.wake_batches
    )
    context.batches.runs = number == 0
    context.answer_peers()
    for area in (
        completions,
        chat,
        responses,
        conversations,
        messages,
        control,
        files,
        batches,
        pooling,
        models,
        tokens,
        health,
        invocations,
        observe,
        unsupported,
    ):
        app.include_router(area.router)
    if not settings.disable_dashboard:
        app.include_router(observe.dashboard_router)
    if settings.server_dev_mode:
        app.include_router(development.router)
    install_error_handlers(app, respond)
    app.add_middleware(UnknownParameters, report=context.report_unknown)
    _add_layers(app, settings, metrics)
    return app


def _add_layers(app: FastAPI, settings: ServerSettings, metrics: Metrics) -> None:
    """Innermost first. CORS is outside the keys, so that a page can read a 401; ids and metrics see everything."""
    if settings.api_key:
        app.add_middleware(ApiKeys, keys=settings.api_key)
    app.add_middleware(ErrorBoundary)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
    )
    app.add_middleware(HttpMetricsLayer, metrics=metrics.http)
    app.add_middleware(RequestIds, echo=settings.enable_request_id_headers)
    if settings.root_path:
        app.add_middleware(RootPath, root_path=settings.root_path)
    app.add_middleware(OneSlash)


def _metrics(llm: AsyncLLM, model_name: str) -> Metrics:
    ready, config = llm.ready_report, llm.config

    def cache_info() -> dict[str, str]:
        return {
            "block_size": str(ready.block_size),
            "num_gpu_blocks": str(llm.ready_report.num_blocks),  # fewer once a replica is given up
            "cache_dtype": ready.kv_dtype,
            "enable_prefix_caching": str(config.cache.prefix_caching),
            "gpu_memory_utilization": str(config.cache.memory_utilization),
        }

    metrics = Metrics(model_name, ready.max_model_len, ready.block_size, llm.stats, cache_info)
    llm.add_listener(metrics.finished)
    return metrics
