"""`FleetIngress`: where a fleet's requests come in. It reads them, hands them to the replica that the router chooses, and the reply back.

What concerns all replicas (metrics, ending a request by its id) is asked of all. What is kept between requests (files, batches, responses)
is not to be had in a fleet, whose replicas come and go.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayActorError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from octavo.errors import EngineDead
from octavo.executor.ray_cluster import take_usual_priority
from octavo.fleet.call import Call, ReplyHead, make_call
from octavo.fleet.metrics import merged
from octavo.fleet.watch import watched
from octavo.frontend.http.errors import BadBody, ErrorReply, describe
from octavo.frontend.http.middleware import route_path
from octavo.frontend.http.sse import OPENAI_STYLE

logger = logging.getLogger(__name__)

KEPT = ("/v1/files", "/v1/batches", "/v1/conversations", "/v1/responses/")
"""Paths of what would have to be kept."""
ABORTS = ("/abort", "/abort_requests")
TRIES = 3
"""Replicas that a request is given to, one after the other, if they end before they answer."""
ASK_SECONDS = 10.0
"""For an answer of all replicas."""
_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer", b"proxy-connection"})
"""Headers that concern one connection."""


class FleetIngress:
    """Made by Ray Serve, which calls it with each HTTP request.

    Args:
        replicas: handle of the replicas.
        max_body_bytes: see `ServerSettings`.
    """

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        take_usual_priority()
        self._watcher = watched()
        self._replicas = replicas
        self._calls = replicas.options(stream=True)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        path = route_path(request.scope)
        try:
            body = await self._body(request)
        except BadBody as e:
            return describe(e).response()
        except ClientDisconnect:
            return Response(status_code=499)
        client = (request.client.host, request.client.port) if request.client else None
        headers = [(name.lower(), value) for name, value in request.scope["headers"] if name.lower() not in _HOP]
        call = make_call(request.method, request.scope["path"], request.scope["query_string"], headers, body, client)
        if path == "/metrics" and request.method == "GET":
            return Response(await self._metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")
        if path in ABORTS and request.method == "POST":
            return await self._abort(call)
        if refusal := kept_elsewhere(path, body):
            return ErrorReply(501, "NotImplementedError", refusal).response()
        return await self._forward(call)

    async def _body(self, request: Request) -> bytes:
        """
        Raises:
            BadBody: it is too large.
        """
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_body_bytes:
                raise BadBody(f"The body is larger than {self._max_body_bytes} bytes (--max-body-bytes).", status=413)
            parts.append(part)
        return b"".join(parts)

    async def _forward(self, call: Call) -> Response:
        for _ in range(TRIES):
            reply = self._calls.answer.remote(call)
            try:
                head = await anext(reply)
                break
            except RayActorError:
                # Nothing of a reply has been sent: whichever replica is next can make all of it.
                logger.warning("A replica has ended before it answered %s", call.path)
            except BaseException:
                reply.cancel()
                raise
        else:
            return describe(EngineDead("The replicas that were asked have ended. Try again.")).response()
        assert isinstance(head, ReplyHead)
        events = any(name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in head.headers)
        response = StreamingResponse(_body_of(reply, events), head.status)
        response.raw_headers = [(name, value) for name, value in head.headers if name.lower() not in _HOP]
        return response

    async def _metrics(self) -> bytes:
        answers = await self._replicas.broadcast("metrics").results_async(timeout_s=ASK_SECONDS)
        return merged(dict(answers))

    async def _abort(self, call: Call) -> Response:
        """Whichever replica has the requests."""
        answers = await self._replicas.broadcast("answer_whole", call).results_async(timeout_s=ASK_SECONDS)
        status, body = answers[0]
        if status != 200:
            return Response(body, status, media_type="application/json")
        aborted = [one for _, text in answers for one in json.loads(text)["aborted"]]
        return Response(json.dumps({"aborted": aborted}), media_type="application/json")


async def _body_of(reply: Any, events: bool) -> AsyncIterator[bytes]:
    """
    Args:
        events: the body is a stream of events, which can say that it has failed. Any other is cut off.
    """
    try:
        async for part in reply:
            yield part
    except RayActorError:
        logger.warning("A replica has ended within a reply")
        if not events:
            raise
        yield OPENAI_STYLE.failure(EngineDead("The replica with this request has ended. Send the request again."))
        yield OPENAI_STYLE.end
    finally:
        with contextlib.suppress(Exception):
            reply.cancel()  # does nothing where it has ended


def kept_elsewhere(path: str, body: bytes) -> str | None:
    """Why a request cannot be answered by whichever replica gets it; None: it can."""
    if any((path == prefix.rstrip("/") and not prefix.endswith("/")) or path.startswith(prefix.rstrip("/") + "/") for prefix in KEPT):
        return f"{path.split('/')[2]}: a fleet keeps nothing between requests. Use a server of `octavo serve` for this."
    if path == "/v1/responses":
        with contextlib.suppress(ValueError):
            fields = json.loads(body)
            for name in ("previous_response_id", "conversation", "background"):
                if isinstance(fields, dict) and fields.get(name):
                    return f"{name}: a fleet keeps nothing between requests. Send the conversation as input."
    return None
