"""What every route needs: the engine, the settings, the metrics, and the requests that are live now."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from octavo._version import __version__
from octavo.errors import InvalidRequest, ModelNotFound
from octavo.frontend.http.body import read_request
from octavo.frontend.http.errors import MAX_INPUT_CHARS, short_repr
from octavo.frontend.http.responses_store import ResponseStore
from octavo.frontend.http.schemas import Schema
from octavo.frontend.http.settings import ServerSettings
from octavo.observe.metrics import Metrics

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

logger = logging.getLogger("octavo.server")

S = TypeVar("S", bound=Schema)

FINGERPRINT = f"octavo-{__version__}"
MAX_ID_CHARS = 256
MAX_RESPONSES = 1000
MAX_RESPONSE_BYTES = 64 << 20
"""Responses kept for `previous_response_id` and retrieval: their number, and their size as JSON in all."""
MAX_REPORTED_FIELDS = 1000


@dataclass
class ServerContext:
    """Owned by one app; used from its event loop only."""

    llm: AsyncLLM
    settings: ServerSettings
    model_names: tuple[str, ...]
    """The first is the one in replies."""
    metrics: Metrics
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(MAX_RESPONSES, MAX_RESPONSE_BYTES))
    """What /v1/responses keeps for later requests."""
    started: int = field(default_factory=lambda: int(time.time()))
    live: set[str] = field(default_factory=set)
    """Ids of the generating requests that are being served."""
    unknown_fields: set[str] = field(default_factory=set)
    """Names of unknown fields that have been logged."""

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    async def read(self, request: Request, schema: type[S]) -> S:
        """The body of `request`, with its model checked."""
        body = await read_request(request, schema, self.settings.max_body_bytes)
        self._report_unknown(body)
        self.check_model(getattr(body, "model", None))
        return body

    def check_model(self, name: str | None) -> None:
        """No name means the base model.

        Raises:
            ModelNotFound: any other name.
        """
        if name and name not in self.model_names:
            known = ", ".join(repr(n) for n in self.model_names)
            raise ModelNotFound(f"The model {short_repr(name)} does not exist here. This server has {known}.")

    def _report_unknown(self, body: Schema) -> None:
        new = [name for name in body.unknown_fields() if name[:MAX_INPUT_CHARS] not in self.unknown_fields]
        if new and len(self.unknown_fields) < MAX_REPORTED_FIELDS:
            self.unknown_fields.update(name[:MAX_INPUT_CHARS] for name in new[:100])
            logger.debug("Unknown request fields, ignored: %s", short_repr(new))

    def claim(self, request_id: str) -> None:
        """Take `request_id` until `release`.

        Raises:
            InvalidRequest: a live request has it.
        """
        if request_id in self.live:
            raise InvalidRequest(f"The request id {request_id!r} is in use by a request that is still running.", param="request_id")
        self.live.add(request_id)

    def release(self, request_id: str) -> None:
        self.live.discard(request_id)


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


def fair_key(request: Request, user: str | None) -> str:
    """Whose share of the machine a request uses, for the fair policy: the API key's, and within it the user's."""
    parts = []
    if key := request.headers.get("authorization"):
        parts.append(hashlib.sha256(key.encode()).hexdigest()[:16])
    if user:
        parts.append(user[:64])
    return "/".join(parts)


def json_response(value: msgspec.Struct | dict[str, object] | BaseModel) -> Response:
    content = value.model_dump_json().encode() if isinstance(value, BaseModel) else msgspec.json.encode(value)
    return Response(content, media_type="application/json")
