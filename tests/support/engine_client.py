"""A recording sink and a process client over the scripted engine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from octavo.config.types import EngineConfig
from octavo.errors import OctavoError
from octavo.frontend.process_client import ProcessClient
from octavo.protocol.engine import FinishReason, NewRequest, TokenDelta
from octavo.protocol.params import SamplingParams
from tests.support.engine_config import VOCAB_SIZE
from tests.support.scripted_engine import token_at

ROOT = str(Path(__file__).parents[2])
SCRIPTED = "tests.support.scripted_engine:build"


class RecordingSink:
    """Keeps what it is given."""

    def __init__(self, request_id: str = "r") -> None:
        self.request_id = request_id
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.prompt_logprobs = 0
        self.error: OctavoError | None = None
        self.changed = asyncio.Event()

    def on_delta(self, delta: TokenDelta) -> None:
        assert delta.index not in self.finish, "a delta after the last one"
        self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
        self.prompt_logprobs += delta.prompt_logprobs is not None
        if delta.finish_reason is not None:
            self.finish[delta.index] = delta.finish_reason
        self.changed.set()

    def on_error(self, error: OctavoError) -> None:
        assert self.error is None, "two errors"
        self.error = error
        self.changed.set()

    async def until(self, condition: Callable[[RecordingSink], bool], seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()

    async def done(self, siblings: int = 1) -> None:
        await self.until(lambda sink: sink.error is not None or len(sink.finish) == siblings)


def request(request_id: str, prompt: list[int], *, max_tokens: int = 40, seed: int = 7, **sampling: Any) -> NewRequest:
    """A resolved request that only max_tokens ends."""
    params = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, **sampling)
    return NewRequest(request_id, prompt, params, arrival_time=time.monotonic())


def expected(prompt: list[int], max_tokens: int = 40, seed: int = 7, index: int = 0) -> list[int]:
    """What the scripted engine answers."""
    return [token_at(prompt, seed, index, position, VOCAB_SIZE) for position in range(max_tokens)]


@asynccontextmanager
async def scripted_client(config: EngineConfig, *, builder: str = SCRIPTED, **options: Any) -> AsyncIterator[ProcessClient]:
    """A started client; its engine process is gone afterwards."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(ROOT) / "src"), ROOT])  # and what later tests start is this tree too
    client = ProcessClient(config, builder=builder, **options)
    try:
        await client.start()
        yield client
    finally:
        await client.close()
