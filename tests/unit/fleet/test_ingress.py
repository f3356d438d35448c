"""Where a fleet's requests come in, over replicas that are none: what is passed on, asked of all, tried again, and refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

pytest.importorskip("ray", reason="needs ray")

from ray.exceptions import RayActorError

from octavo.fleet.call import Call, ReplyHead
from octavo.fleet.ingress import FleetIngress, kept_elsewhere

JSON, EVENTS = [(b"content-type", b"application/json")], [(b"content-type", b"text/event-stream; charset=utf-8")]


class Reply:
    """Of Ray's stream: an exception in it is raised where it stands."""

    def __init__(self, *parts: Any) -> None:
        self._parts = list(parts)
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if not self._parts:
            raise StopAsyncIteration
        if isinstance(part := self._parts.pop(0), BaseException):
            raise part
        return part

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """A handle of Ray Serve. `replies` are given one after the other."""

    def __init__(self, *replies: Reply, everybody: dict[str, list[Any]] | None = None) -> None:
        self.replies = list(replies)
        self.calls: list[Call] = []
        self.answer = SimpleNamespace(remote=self._answer)
        self._everybody = everybody or {}

    def options(self, *, stream: bool) -> Replicas:
        assert stream
        return self

    def _answer(self, call: Call) -> Reply:
        self.calls.append(call)
        return self.replies[len(self.calls) - 1]

    def broadcast(self, method: str, *args: Any) -> Any:
        async def results(*, timeout_s: float) -> list[Any]:
            return self._everybody[method]

        return SimpleNamespace(results_async=results)


async def ask(
    replicas: Replicas, path: str, body: bytes = b"", *, method: str = "POST", root_path: str = "", max_body_bytes: int = 1000
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of a reply, read to its end."""
    messages = [
        {"type": "http.request", "body": body[:5], "more_body": True},
        {"type": "http.request", "body": body[5:], "more_body": False},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": root_path + path, "root_path": root_path, "query_string": b"a=1", "client": ("10.0.0.9", 5),
        "headers": [(b"Connection", b"close"), (b"X-Mine", b"yes")],
    }  # fmt: skip
    request = Request(scope, receive)
    response = await FleetIngress(replicas, max_body_bytes)(request)
    await response(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(m.get("body", b"") for m in sent[1:])


async def test_a_request_and_its_reply_are_passed_on_as_they_are() -> None:
    reply = Reply(ReplyHead(201, [(b"x-theirs", b"1"), (b"Transfer-Encoding", b"chunked")]), b"one ", b"two")
    replicas = Replicas(reply)
    status, headers, body = await ask(replicas, "/v1/completions", b'{"prompt": "a prompt"}', root_path="/mine")
    assert (status, headers, body) == (201, {b"x-theirs": b"1"}, b"one two")
    (call,) = replicas.calls
    assert (call.method, call.path, call.query, call.client) == ("POST", "/mine/v1/completions", b"a=1", ("10.0.0.9", 5))
    assert (call.headers, call.body, call.key) == (((b"x-mine", b"yes"),), b'{"prompt": "a prompt"}', b"a prompt")


async def test_a_request_whose_replica_ends_before_it_answers_goes_to_another() -> None:
    replicas = Replicas(Reply(RayActorError()), Reply(RayActorError()), Reply(ReplyHead(200, JSON), b"{}"))
    assert (await ask(replicas, "/v1/completions"))[::2] == (200, b"{}")
    assert len(replicas.calls) == 3
    replicas = Replicas(*(Reply(RayActorError()) for _ in range(3)))
    status, _, body = await ask(replicas, "/v1/completions")
    assert (status, json.loads(body)["error"]["type"]) == (503, "ServiceUnavailableError")


async def test_a_stream_whose_replica_ends_says_so_and_any_other_reply_is_cut_off() -> None:
    _, _, body = await ask(Replicas(Reply(ReplyHead(200, EVENTS), b"data: {}\n\n", RayActorError())), "/v1/completions")
    first, error, last, _ = body.split(b"\n\n")
    assert (first, last) == (b"data: {}", b"data: [DONE]")
    assert "Send the request again" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
    with pytest.raises(RayActorError):
        await ask(Replicas(Reply(ReplyHead(200, JSON), b"{", RayActorError())), "/v1/completions")


async def test_a_stream_that_nobody_reads_to_its_end_is_ended() -> None:
    reply = Reply(ReplyHead(200, EVENTS), b"data: {}\n\n", RuntimeError("the client is gone"))
    with pytest.raises(RuntimeError):
        await ask(Replicas(reply), "/v1/completions")
    assert reply.cancelled


@pytest.mark.parametrize("root_path", ["", "/mine"])
async def test_what_concerns_all_is_asked_of_all(root_path: str) -> None:
    everybody: dict[str, list[Any]] = {
        "metrics": [("b", b"# TYPE up gauge\nup 1\n"), ("a", b"# TYPE up gauge\nup 2\n")],
        "answer_whole": [(200, b'{"aborted": ["x"]}'), (200, b'{"aborted": []}')],
    }
    replicas = Replicas(everybody=everybody)
    assert (await ask(replicas, "/metrics", method="GET", root_path=root_path))[
        2
    ] == b'# TYPE up gauge\nup{replica="a"} 2\nup{replica="b"} 1\n'
    assert json.loads((await ask(replicas, "/abort", b"{}", root_path=root_path))[2]) == {"aborted": ["x"]}
    everybody["answer_whole"] = [(400, b'{"error": {}}')] * 2
    assert (await ask(replicas, "/abort", b"{}", root_path=root_path))[::2] == (400, b'{"error": {}}')
    assert (await ask(replicas, "/v1/files", root_path=root_path))[0] == 501
    assert not replicas.calls


async def test_a_body_that_is_too_large_goes_nowhere() -> None:
    replicas = Replicas()
    status, _, body = await ask(replicas, "/v1/completions", b"x" * 1001)
    assert status == 413
    assert b"--max-body-bytes" in body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/files", b""),
        ("/v1/files/file-1/content", b""),
        ("/v1/batches", b"{}"),
        ("/v1/conversations", b"{}"),
        ("/v1/responses/resp_1", b""),
        ("/v1/responses/resp_1/cancel", b""),
        ("/v1/responses", b'{"previous_response_id": "resp_1"}'),
        ("/v1/responses", b'{"background": true}'),
    ],
)
def test_what_would_be_kept_is_refused(path: str, body: bytes) -> None:
    assert "keeps nothing between requests" in (kept_elsewhere(path, body) or "")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", b'{"input": "hi"}'),
        ("/v1/responses", b"{"),
        ("/v1/responses", b"[]"),
        ("/v1/chat/completions", b"{}"),
        ("/v1/filesystem", b""),
    ],
)
def test_everything_else_is_for_a_replica(path: str, body: bytes) -> None:
    assert kept_elsewhere(path, body) is None
