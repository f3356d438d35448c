"""The HTTP server on a real socket, in a thread with its own loop, over a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.http.app import build_app
from octavo.frontend.http.settings import ServerSettings
from tests.support.fake_async_llm import FakeClient, Rule, fake_async_llm


@dataclass
class RunningServer:
    """A server and what a test wants to know of it."""

    url: str
    port: int
    llm: AsyncLLM
    fake: FakeClient
    loop: asyncio.AbstractEventLoop
    app: FastAPI
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def tokens(self, text: str) -> list[int]:
        return self.llm.tokenizer.encode(text, add_special_tokens=False)

    def script(self, prompt: str, answer: str | Sequence[int], *, delay: float = 0.0, fail_at: int | None = None) -> None:
        """Answer prompts that contain `prompt` with `answer`; the newest rule wins."""
        ids = self.tokens(answer) if isinstance(answer, str) else list(answer)
        self.fake.rules.append(Rule(prompt, ids, delay, fail_at))

    def post(self, path: str, body: dict[str, Any] | None = None, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream but the last, which must be [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            raw = response.read().decode()
        return parse_events(raw)

    def metric(self, name: str, **labels: str) -> float:
        from prometheus_client.parser import text_string_to_metric_families

        total, found = 0.0, False
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and all(sample.labels.get(k) == v for k, v in labels.items()):
                    total, found = total + sample.value, True
        assert found, f"no sample {name} {labels}"
        return total


def parse_events(raw: str) -> list[dict[str, Any]]:
    assert raw.endswith("data: [DONE]\n\n"), raw[-200:]
    blocks = raw.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether `condition` became true in time; tests assert on the result."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


@contextlib.contextmanager
def running_server(
    folder: Path, settings: ServerSettings | None = None, served_model_names: Sequence[str] | None = ("tiny",), **engine: Any
) -> Iterator[RunningServer]:
    ready: list[RunningServer] = []
    failed: list[BaseException] = []
    started = threading.Event()
    stop: list[Callable[[], None]] = []

    async def main() -> None:
        sock = socket.socket()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does so only where the protocol was named
        sock.bind(("127.0.0.1", 0))
        sock.listen(128)
        llm = fake_async_llm(folder, **engine)
        app = build_app(llm, settings or ServerSettings(), served_model_names=served_model_names)
        config = uvicorn.Config(app, log_config=None, lifespan="off", http="httptools", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        port = sock.getsockname()[1]
        loop = asyncio.get_running_loop()
        stop.append(lambda: setattr(server, "should_exit", True))
        ready.append(RunningServer(f"http://127.0.0.1:{port}", port, llm, llm.fake, loop, app))  # type: ignore[attr-defined]
        app.state.context.batches.start()
        started.set()
        await server.serve(sockets=[sock])
        await app.state.context.close()
        await llm.shutdown()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as e:
            failed.append(e)
            started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(30)
    if failed:
        raise failed[0]
    try:
        yield ready[0]
    finally:
        ready[0].http.close()
        stop[0]()
        thread.join(10)
        assert not thread.is_alive()
