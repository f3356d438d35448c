"""What every route needs: the engine, the settings, the metrics, and the requests that are live now."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from octavo._version import __version__
from octavo.errors import EngineDead, InvalidRequest, ModelNotFound
from octavo.frontend.http.batches.inside import OWNER
from octavo.frontend.http.batches.service import BatchService
from octavo.frontend.http.body import read_request
from octavo.frontend.http.errors import MAX_INPUT_CHARS, short_repr
from octavo.frontend.http.peers import Alone, Peers
from octavo.frontend.http.responses.store import ResponseStore
from octavo.frontend.http.schemas import GenerationRequest, Schema
from octavo.frontend.http.settings import ServerSettings
from octavo.frontend.http.sse import cancel
from octavo.frontend.text.template_process import TemplateProcesses
from octavo.observe.metrics import Metrics

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

logger = logging.getLogger("octavo.server")

S = TypeVar("S", bound=Schema)

ABORT, COUNTED, WAKE_BATCHES = "abort", "counted", "wake batches"
"""Topics of questions to other API servers."""
FINGERPRINT = f"octavo-{__version__}"
MAX_ID_CHARS = 256
MAX_REPORTED_FIELDS = 1000


@dataclass
class ServerContext:
    """Owned by one app; used from its event loop only."""

    llm: AsyncLLM
    settings: ServerSettings
    model_names: tuple[str, ...]
    """The first is the one in replies."""
    metrics: Metrics
    peers: Peers = field(default_factory=Alone)
    responses_path: str = ":memory:"
    number: int = 0
    """Which of the API servers this is."""
    started: int = field(default_factory=lambda: int(time.time()))
    live: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    """The generating requests that are being served: id -> what aborts it."""
    responses: ResponseStore = field(init=False)
    batches: BatchService = field(init=False)
    """Set by `build_app`, whose application it posts to."""
    templates: TemplateProcesses = field(default_factory=TemplateProcesses)
    """Renders what brings its own chat template."""
    background: set[asyncio.Task[None]] = field(default_factory=set)
    """What goes on without a client that waits."""
    unknown_fields: set[str] = field(default_factory=set)
    """Names of unknown fields and query parameters that have been logged."""

    def __post_init__(self) -> None:
        settings = self.settings
        self.responses = ResponseStore(
            self.responses_path, ttl=settings.response_store_ttl, max_bytes=settings.response_store_bytes, keeper=self.number
        )

    async def close(self) -> None:
        """End what runs in the background and close the stores. The engine is not ours to end."""
        await self.batches.close()
        await cancel(*self.background)
        self.responses.close()
        self.templates.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background; it handles its own errors."""
        task = asyncio.ensure_future(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    async def read(self, request: Request, schema: type[S]) -> S:
        """The body of `request`, with its model checked."""
        body = await read_request(request, schema, self.settings.max_body_bytes)
        self.report_unknown(body.unknown_fields())
        self.check_model(getattr(body, "model", None))
        return body

    def shows_ids(self, body: GenerationRequest) -> bool:
        """Whether tokens are spelled `token_id:123` in the reply."""
        wish = body.return_tokens_as_token_ids
        return self.settings.return_tokens_as_token_ids if wish is None else wish

    def streamed_usage(self, body: GenerationRequest) -> tuple[bool, bool]:
        """Whether a stream tells its usage (at the end, in every chunk)."""
        wants = body.stream_options
        at_end = bool(body.stream) and (self.settings.enable_force_include_usage or bool(wants and wants.include_usage))
        return at_end, at_end and bool(wants and wants.continuous_usage_stats)

    def check_model(self, name: str | None) -> None:
        """No name means the base model.

        Raises:
            ModelNotFound: any other name.
        """
        if name and name not in self.model_names:
            known = ", ".join(repr(n) for n in self.model_names)
            raise ModelNotFound(f"The model {short_repr(name)} does not exist here. This server has {known}.")

    def report_unknown(self, names: Iterable[str], what: str = "request fields") -> None:
        """Say of names that mean nothing here that they are ignored; of each once."""
        new = [name for name in names if name[:MAX_INPUT_CHARS] not in self.unknown_fields]
        if new and len(self.unknown_fields) < MAX_REPORTED_FIELDS:
            self.unknown_fields.update(name[:MAX_INPUT_CHARS] for name in new[:100])
            logger.info("Unknown %s, ignored: %s", what, short_repr(new))

    def claim(self, request_id: str, abort: Callable[[], Awaitable[None]]) -> None:
        """Take `request_id` until `release`. `abort` ends the request early; its reply is then what there is so far.

        Raises:
            InvalidRequest: a live request has it.
        """
        if request_id in self.live:
            raise InvalidRequest(f"The request id {request_id!r} is in use by a request that is still running.", param="request_id")
        self.live[request_id] = abort
        self.peers.report_live(len(self.live))

    def release(self, request_id: str) -> None:
        self.live.pop(request_id, None)
        self.peers.report_live(len(self.live))

    # What several API servers must agree on

    def answer_peers(self) -> None:
        """Answer the questions below when another API server asks them."""
        self.peers.on(ABORT, lambda body: msgspec.json.encode(self._abort_soon(msgspec.json.decode(body, type=list[str]))))
        self.peers.on(COUNTED, lambda _: self.metrics.snapshot())
        self.peers.on(WAKE_BATCHES, lambda _: self.batches.woken())

    async def abort(self, request_ids: list[str]) -> list[str]:
        """End live requests, wherever they are served; returns the ids of those that were live."""
        answers = await self.peers.ask(ABORT, msgspec.json.encode(request_ids))
        here = [one for one in request_ids if one in self.live]
        for one in here:
            if (end := self.live.get(one)) is not None:
                await end()
        there = {one for answer in answers.living for one in msgspec.json.decode(answer, type=list[str])}
        return [one for one in request_ids if one in here or one in there]

    def _abort_soon(self, request_ids: list[str]) -> list[str]:
        here = [one for one in request_ids if one in self.live]
        for one in here:
            self.spawn(self._abort_one(one))
        return here

    async def _abort_one(self, request_id: str) -> None:
        if (end := self.live.get(request_id)) is not None:
            await end()

    async def render_metrics(self) -> bytes:
        """The text of /metrics, over all API servers."""
        self.metrics.step(self.llm.stats())
        answers = await self.peers.ask(COUNTED, own=self.metrics.snapshot())
        return self.metrics.render(answers.living, answers.gone)

    def wake_batches(self) -> None:
        """Tell the API server that runs batches to look for work."""
        self.spawn(self._wake_batches())

    async def _wake_batches(self) -> None:
        with contextlib.suppress(EngineDead):
            await self.peers.ask(WAKE_BATCHES)


def context_of(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


def request_id(request: Request, prefix: str, given: str | None) -> str:
    """`prefix-` and the client's own id: the field, else the header X-Request-Id, else a fresh one.

    The header is often the id of a whole trace, so one that is in use, or that would not survive a log line, is no error:
    it gets a suffix, or is passed over.

    Raises:
        InvalidRequest: the field holds an id that is no plain text.
    """
    fresh: str = request.state.request_id
    if given:
        if not _is_plain(given):
            raise InvalidRequest(
                f"request_id must be at most {MAX_ID_CHARS} printable ASCII characters, got {short_repr(given)}.", param="request_id"
            )
        return f"{prefix}-{given}"
    header = request.headers.get("x-request-id", "")
    if not header or not _is_plain(header):
        return f"{prefix}-{fresh}"
    name = f"{prefix}-{header}"
    return f"{name}-{fresh[:8]}" if name in context_of(request).live else name


def _is_plain(name: str) -> bool:
    return len(name) <= MAX_ID_CHARS and name.isascii() and name.isprintable()


def client_of(request: Request) -> str:
    return f"{request.client.host}:{request.client.port}" if request.client else "unix"


def credential(request: Request) -> str:
    """The key that came with a request, in either header; empty without one."""
    return request.headers.get("authorization") or request.headers.get("x-api-key") or ""


def owner_of(request: Request) -> str:
    """Whose stored things a request may see: with API keys, those of its own key; else everybody's."""
    if OWNER in request.scope:
        return str(request.scope[OWNER])
    if not context_of(request).settings.api_key:
        return ""
    return hashlib.sha256(credential(request).removeprefix("Bearer ").strip().encode()).hexdigest()[:32]


def fair_key(request: Request, user: str | None) -> str:
    """Whose share of the machine a request uses, for the fair policy: the API key's, and within it the user's."""
    parts = ["batch", request.scope[OWNER]] if OWNER in request.scope else []
    if key := credential(request):
        parts.append(hashlib.sha256(key.encode()).hexdigest()[:16])
    if user:
        parts.append(user[:64])
    return "/".join(parts)


def client_key(request: Request) -> str:
    """Who takes turns with others for work at the door: the holder of an API key, where there are keys, else an address; the lines of
    batches are one client of their own. (What a client may call itself as it likes is no use here.)"""
    if OWNER in request.scope:
        return f"batch {request.scope[OWNER]}"
    return owner_of(request) or (request.client.host if request.client else "")


def json_response(value: msgspec.Struct | dict[str, Any] | BaseModel) -> Response:
    content = value.model_dump_json().encode() if isinstance(value, BaseModel) else msgspec.json.encode(value)
    return Response(content, media_type="application/json")
