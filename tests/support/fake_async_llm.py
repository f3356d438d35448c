"""A real `AsyncLLM` (its door, its text, its streams) over a client that answers from rules instead of an engine process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config.args import EngineArgs
from octavo.errors import EngineDead, OctavoError, Overloaded
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.client import Sink
from octavo.frontend.launch import open_tokenizer, prepare_launch
from octavo.protocol.engine import EngineReady, EngineStats, FinishReason, LogprobRow, NewRequest, Phase, RequestTimes, TokenDelta

BLOCK = 16


@dataclass
class Rule:
    """Requests whose prompt contains `prompt` are answered with `tokens`, then EOS."""

    prompt: str
    tokens: Sequence[int]
    delay: float = 0.0
    """Seconds before each token."""
    fail_at: int | None = None
    """Output number at which the engine reports that the request failed."""


@dataclass
class FakeClient:
    """The surface of `ProcessClient` that `AsyncLLM` uses."""

    ready_report: EngineReady
    decode: Callable[[list[int]], str]
    rules: list[Rule] = field(default_factory=list)
    state: str = "running"
    restarts: int = 0
    engine_pid: int = 0
    step_age: float = 0.0
    refuse: OctavoError | None = None
    """Raised by `add`."""
    seen: list[NewRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    max_live: int = 0
    counters: EngineStats = field(default_factory=lambda: EngineStats(kv_blocks_total=1024))
    _tasks: dict[tuple[str, int], asyncio.Task[None]] = field(default_factory=dict)

    async def start(self, progress: Any = None) -> EngineReady:
        return self.ready_report

    def check_alive(self) -> None:
        if self.state in ("dead", "closed"):
            raise EngineDead("The engine is gone: the engine process was killed by signal 9.")

    def last_step_age(self) -> float:
        return self.step_age

    def stats(self) -> EngineStats:
        self.counters.running = len(self._tasks)
        return self.counters

    async def ping(self) -> EngineStats:
        return self.stats()

    async def reset_prefix_cache(self) -> bool:
        return not self._tasks

    def add(self, request: NewRequest, sink: Sink, *, bounded: bool = True) -> None:
        self.check_alive()
        if self.refuse is not None:
            raise self.refuse
        self.seen.append(request)
        self.counters.prompt_tokens += len(request.prompt_token_ids)
        for i in range(request.sampling.n):
            task = asyncio.ensure_future(self._answer(request, request.index + i, sink))
            self._tasks[request.request_id, i] = task
            task.add_done_callback(lambda _t, key=(request.request_id, i): self._tasks.pop(key, None))
        self.max_live = max(self.max_live, len(self._tasks))

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append(request_id)
        for (owner, i), task in list(self._tasks.items()):
            if owner == request_id and index in (None, i):
                task.cancel()

    def release(self, request_ids: list[str]) -> None:
        pass

    async def close(self) -> None:
        self.state = "closed"
        for task in list(self._tasks.values()):
            task.cancel()

    def die(self) -> None:
        """The engine is lost for good."""
        self.state = "dead"
        self.close_all(EngineDead("The engine is gone."))

    def close_all(self, _error: OctavoError) -> None:
        for task in list(self._tasks.values()):
            task.cancel()

    async def _answer(self, request: NewRequest, index: int, sink: Sink) -> None:
        sampling, queued = request.sampling, time.monotonic()
        text = self.decode(request.prompt_token_ids)
        rule = next((r for r in reversed(self.rules) if r.prompt in text), Rule("", []))
        eos = (request.eos_token_ids or [0])[0]  # none with ignore_eos
        first = 0.0
        assert sampling.max_tokens is not None
        for number in range(sampling.max_tokens):
            await asyncio.sleep(rule.delay)
            token = rule.tokens[number] if number < len(rule.tokens) else eos
            finish, stop_reason, error = None, None, None
            if number + 1 >= sampling.min_tokens and token == eos and not sampling.ignore_eos:
                finish = FinishReason.STOP
            elif number + 1 >= sampling.min_tokens and token in (sampling.stop_token_ids or ()):
                finish, stop_reason = FinishReason.STOP, token
            elif number + 1 == sampling.max_tokens:
                finish = FinishReason.LENGTH
            if rule.fail_at == number:
                finish, error = FinishReason.ERROR, "The logits of this request are not finite (NaN)."
            now = time.monotonic()
            first = first or now
            delta = TokenDelta(request.request_id, index, [] if error else [token], finish, stop_reason, error=error)
            if sampling.logprobs is not None:
                delta.logprobs = [] if error else [self._row(token, sampling.logprobs)]
            if number == 0:
                delta.num_cached_tokens = len(request.prompt_token_ids) // BLOCK * BLOCK if len(self.seen) > 1 else 0
                if sampling.prompt_logprobs is not None:
                    delta.prompt_logprobs = [None, *(self._row(t, sampling.prompt_logprobs) for t in request.prompt_token_ids[1:])]
            if finish is not None:
                delta.times = RequestTimes(queued, queued, first, now)
            self.counters.step += 1
            self.counters.step_tokens = 1
            self.counters.last_step_time = now
            self.counters.generation_tokens += 1
            sink.on_delta(delta)
            if finish is not None:
                return

    def _row(self, token: int, k: int) -> LogprobRow:
        """The token first, its successors next, 0.5 apart."""
        size = self.ready_report.vocab_size
        return LogprobRow(token, -0.5, 1, [(token + i) % size for i in range(k)], [-0.5 * (i + 1) for i in range(k)])


def fake_async_llm(folder: Path, **settings: Any) -> AsyncLLM:
    """Call it in the loop that will use it. `.client` of the result is the `FakeClient`."""
    launch = prepare_launch(EngineArgs(model=str(folder), load_format="dummy", device="cpu", **settings))
    tokenizer = open_tokenizer(launch)
    model = launch.config.model
    ready = EngineReady(
        pid=1,
        num_blocks=1024,
        block_size=BLOCK,
        max_num_seqs=64,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        weights_bytes=1,
        cache_bytes=1 << 20,
        activation_bytes=1,
        total_bytes=1 << 30,
        other_bytes=0,
        device="fake",
        dtype="float32",
        kv_dtype="float32",
        attention="none",
        phases=[Phase("fake", 0.0)],
    )
    decode = (lambda ids: tokenizer.decode(ids, skip_special_tokens=False)) if tokenizer else (lambda ids: "")
    client = FakeClient(ready, decode)
    llm = AsyncLLM(launch, tokenizer, client)  # type: ignore[arg-type]
    llm.fake = client  # type: ignore[attr-defined]
    return llm


def overloaded() -> Overloaded:
    return Overloaded("The server is full: 1024 requests wait for one of 64 places. Try again later.", retry_after=3.4)
