"""How a frontend reaches an engine core: the sink contract, and the client for a core in this very process.

The client for a core in its own, supervised process is in process_client.py. Both take `NewRequest`s and call each request's
sink with the new tokens; neither knows about text.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Literal, Protocol

from octavo.config.types import EngineConfig
from octavo.errors import EngineDead, OctavoError, clause
from octavo.protocol.engine import AbortRequests, EngineReady, EngineStats, NewRequest, ReleaseHeld, StepOutputs, TokenDelta, Vocabulary

Progress = Callable[[str, int, int], None]
"""(phase, done, total) while the engine loads."""

State = Literal["starting", "running", "restarting", "dead", "closed"]


class Sink(Protocol):
    """Where the tokens of one request go. Called in order, on the client's thread, and must not raise or block."""

    @property
    def request_id(self) -> str:
        """The user's name for it (a `NewRequest` carries one that is never used twice)."""

    def on_delta(self, delta: TokenDelta) -> None:
        """New tokens of one sibling; the last delta of each sibling carries a finish reason."""

    def on_error(self, error: OctavoError) -> None:
        """The request ends here: the engine is gone for good, or this request keeps ending it."""


class EngineClient(Protocol):
    """What `LLM`, `AsyncLLM` and beam search need of an engine."""

    def add(self, request: NewRequest, sink: Sink) -> None: ...

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sibling; its sink hears nothing more of it. Unknown ids are ignored."""

    def release(self, request_ids: list[str]) -> None:
        """Give up the blocks of held requests."""


class RemoteClient(EngineClient, Protocol):
    """A client of an engine in another process, as `AsyncLLM` uses it: supervised here, or by the process that we belong to."""

    vocabulary: Callable[[], Vocabulary] | None

    async def start(self, progress: Progress | None = None) -> EngineReady: ...

    async def close(self) -> None: ...

    def add(self, request: NewRequest, sink: Sink, *, bounded: bool = True) -> None: ...

    @property
    def state(self) -> State: ...

    @property
    def ready_report(self) -> EngineReady: ...

    @property
    def death(self) -> EngineDead | None:
        """Why there is no engine and there will be none."""

    @property
    def restarts(self) -> int: ...

    @property
    def engine_pid(self) -> int | None: ...

    def stats(self) -> EngineStats: ...

    def last_step_age(self) -> float: ...

    def check_alive(self) -> None: ...

    async def ping(self) -> EngineStats: ...

    async def reset_prefix_cache(self) -> bool: ...


class Core(Protocol):
    """What a client needs of an engine core."""

    def add(self, request: NewRequest) -> None: ...

    def abort(self, message: AbortRequests) -> None: ...

    def release(self, message: ReleaseHeld) -> None: ...

    def reset_prefix_cache(self) -> bool: ...

    def has_work(self) -> bool: ...

    def set_vocabulary(self, vocabulary: Vocabulary) -> None: ...

    def step(self) -> StepOutputs: ...

    def stats(self) -> EngineStats: ...

    def shutdown(self) -> None: ...


Builder = Callable[[EngineConfig, Progress, Callable[[str, str], None]], tuple[Core, EngineReady]]


class InProcessClient:
    """An engine core in this process, turned by whoever calls `step`. Not thread-safe: `LLM` holds a lock."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        # Not an import statement: only here does the frontend reach the composition root, and torch behind it.
        build: Builder = importlib.import_module("octavo.engine.build").build_engine
        self._death = ""
        core, ready = build(config, progress, self._lost)
        self._core: Core | None = core
        self.ready_report: EngineReady = ready
        self._sinks: dict[str, Sink] = {}
        self._siblings: dict[str, set[int]] = {}
        self.vocabulary: Callable[[], Vocabulary] | None = None
        """What the core must know of the tokens before the first constrained request."""
        self._knows_vocabulary = False

    def _lost(self, message: str, kind: str) -> None:
        self._death = self._death or message

    def check_alive(self) -> None:
        """Raises EngineDead when there is no engine any more that could take requests."""
        if self._death:
            raise EngineDead(f"The engine of this LLM is gone: {clause(self._death)}. Make a new one.")

    @property
    def dead(self) -> bool:
        """A rank is gone, and the engine with it."""
        return bool(self._death)

    @property
    def core(self) -> Core:
        if self._core is None:
            raise EngineDead("This LLM has been closed. Make a new one.")
        return self._core

    def add(self, request: NewRequest, sink: Sink) -> None:
        if request.sampling.constraint is not None and not self._knows_vocabulary and self.vocabulary is not None:
            self.core.set_vocabulary(self.vocabulary())
            self._knows_vocabulary = True
        self._sinks[request.request_id] = sink
        self._siblings[request.request_id] = set(range(request.index, request.index + request.sampling.n))
        try:
            self.core.add(request)
        except BaseException:
            self._forget(request.request_id)
            raise

    def abort(self, request_id: str, index: int | None = None) -> None:
        if request_id not in self._siblings:
            return
        if index is None:
            self._forget(request_id)
        else:
            self._end_sibling(request_id, index)
        self.core.abort(AbortRequests([request_id], index))

    def abort_all(self) -> None:
        """End every live request and let the core settle what is in flight."""
        ids = list(self._siblings)
        for request_id in ids:
            self._forget(request_id)
        if ids:
            self.core.abort(AbortRequests(ids))
        while self.core.has_work():
            self.core.step()

    def release(self, request_ids: list[str]) -> None:
        if request_ids:
            self.core.release(ReleaseHeld(request_ids))

    @property
    def num_live(self) -> int:
        return len(self._siblings)

    def step(self) -> None:
        """One turn of the core's loop; sinks get what it produced."""
        for delta in self.core.step().deltas:
            siblings = self._siblings.get(delta.request_id)
            if siblings is None or delta.index not in siblings:
                continue  # ended by us while this was in flight
            sink = self._sinks[delta.request_id]
            if delta.finish_reason is not None:
                self._end_sibling(delta.request_id, delta.index)
            sink.on_delta(delta)

    def stats(self) -> EngineStats:
        return self.core.stats()

    def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache()

    def close(self) -> None:
        """Free the engine's memory. Calling it again does nothing."""
        core, self._core = self._core, None
        self._sinks.clear()
        self._siblings.clear()
        if core is not None:
            core.shutdown()

    def _end_sibling(self, request_id: str, index: int) -> None:
        siblings = self._siblings[request_id]
        siblings.discard(index)
        if not siblings:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._sinks.pop(request_id, None)
        self._siblings.pop(request_id, None)
