"""An API server's way to the engine: the same surface as `ProcessClient`, through the main process, which supervises and replays.

Nothing here blocks. A request that was aborted here hears nothing more, whatever is still on its way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from octavo.config.types import EngineConfig
from octavo.errors import EngineDead, OctavoError, RequestFailed, error_of
from octavo.frontend.client import Progress, Sink, State
from octavo.frontend.http.api_servers.boot import ApiServerBoot
from octavo.frontend.http.api_servers.load_board import LoadBoard
from octavo.frontend.http.peers import Handler, PeerAnswers
from octavo.frontend.queue_bound import QueueBound
from octavo.protocol.api_server import (
    Answer,
    Answers,
    CallFailed,
    Drain,
    EngineNews,
    FromApiServer,
    Question,
    RequestEnded,
    ToApiServer,
)
from octavo.protocol.engine import (
    AbortRequests,
    EngineReady,
    EngineStats,
    NewRequest,
    Ping,
    Pong,
    ReleaseHeld,
    ResetPrefixCache,
    StepOutputs,
    TokenDelta,
    Vocabulary,
)

logger = logging.getLogger("octavo.server")

LIVE, SEQUENCES = 0, 1
"""Our counts on the board."""
LINGER_MS = 1000


class RelayedClient:
    """A `RemoteClient`, and the `Peers` of its application. Use from one event loop."""

    def __init__(self, boot: ApiServerBoot, config: EngineConfig) -> None:
        self._config = config
        self._number = boot.number
        self._board = LoadBoard(boot.board_fd, boot.count)
        self._context = zmq.asyncio.Context()
        self._outbox: zmq.Socket[bytes] = zmq.Context.shadow(self._context.underlying).socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        for socket in (self._outbox, self._inbox):
            socket.setsockopt(zmq.SNDHWM, 0)  # what is live is bounded
            socket.setsockopt(zmq.RCVHWM, 0)
        self._outbox.setsockopt(zmq.LINGER, LINGER_MS)
        self._inbox.bind(boot.inbox)
        self._outbox.connect(boot.outbox)
        zmq.Socket.shadow(self._inbox.underlying).recv()  # the greeting: an event loop need not run yet
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToApiServer)
        self._state: State = "starting"
        self._death = ""
        self._ready: asyncio.Future[EngineReady] | None = None
        self._report: EngineReady | None = None
        self._stats = EngineStats()
        self._restarts = 0
        self._engine_pid: int | None = None
        self._sinks: dict[str, Sink] = {}
        self._siblings: dict[str, set[int]] = {}
        self._num_sequences = 0
        self._work_since = 0.0
        self._queue_bound = QueueBound(config.scheduler)
        self._calls: dict[int, asyncio.Future[Pong | Answers]] = {}
        self._next_call = 0
        self._handlers: dict[str, Handler] = {}
        self._reader: asyncio.Task[None] | None = None
        self._told_vocabulary = False
        self.vocabulary: Callable[[], Vocabulary] | None = None
        self.on_drain: Callable[[], None] = lambda: None
        """Called when the main process wants this API server to end."""

    # ---- start and stop

    async def start(self, progress: Progress | None = None) -> EngineReady:
        """Wait until the engine can take requests."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._reader = asyncio.create_task(self._read(), name="octavo-main-process-reader")
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        """Give up what is live. The engine is not ours to end."""
        if self._state == "closed":
            return
        self._state = "closed"
        self._fail_all(EngineDead("The server is shutting down."), tell=True)
        if self._reader is not None:
            self._reader.cancel()
        self._outbox.close()
        self._inbox.close(linger=0)

    def send(self, message: FromApiServer) -> None:
        if not self._outbox.closed:
            self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    # ---- requests

    def add(self, request: NewRequest, sink: Sink, *, bounded: bool = True) -> None:
        """Send a request; `sink` gets its tokens. `bounded`: refuse it when too many wait, over all API servers.

        Raises:
            Overloaded: too many requests wait already.
            EngineDead: the engine is gone for good.
        """
        self.check_alive()
        if bounded:
            self._queue_bound.check(self._board.total(SEQUENCES))
        if not self._sinks:
            self._work_since = time.monotonic()
        self._sinks[request.request_id] = sink
        self._siblings[request.request_id] = set(range(request.index, request.index + request.sampling.n))
        self._count(request.sampling.n)
        if request.sampling.constraint is not None and not self._told_vocabulary and self.vocabulary is not None:
            self._told_vocabulary = True
            self.send(self.vocabulary())
        self.send(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        siblings = self._siblings.get(request_id)
        if siblings is None:
            return
        for one in list(siblings) if index is None else [index]:
            self._end_sibling(request_id, one)
        self.send(AbortRequests([request_id], index))

    def release(self, request_ids: list[str]) -> None:
        if request_ids:
            self.send(ReleaseHeld(request_ids))

    def _end_sibling(self, request_id: str, index: int) -> None:
        siblings = self._siblings[request_id]
        if index in siblings:
            siblings.remove(index)
            self._count(-1)
        if not siblings:
            del self._siblings[request_id], self._sinks[request_id]
            self._queue_bound.finished()

    def _count(self, change: int) -> None:
        self._num_sequences += change
        self._board.set(self._number, SEQUENCES, self._num_sequences)

    def _fail_all(self, error: OctavoError, *, tell: bool) -> None:
        sinks = list(self._sinks.items())
        for request_id, sink in sinks:
            self.abort(request_id) if tell else self._drop(request_id)
            sink.on_error(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def _drop(self, request_id: str) -> None:
        for index in list(self._siblings.get(request_id, ())):
            self._end_sibling(request_id, index)

    # ---- what the main process says

    async def _read(self) -> None:
        while True:
            message: ToApiServer = self._decoder.decode(await self._inbox.recv())
            try:
                self._on_message(message)
            except Exception:
                logger.exception("A message of the main process could not be handled")
            await asyncio.sleep(0)  # a receive that finds a message waiting does not suspend

    def _on_message(self, message: ToApiServer) -> None:
        if isinstance(message, StepOutputs):
            for delta in message.deltas:
                self._on_delta(delta)
            if message.stats is not None:
                self._stats = message.stats
        elif isinstance(message, EngineNews):
            self._on_news(message)
        elif isinstance(message, RequestEnded):
            sink = self._sinks.get(message.request_id)
            if sink is not None:
                self._drop(message.request_id)
                sink.on_error(error_of(message.kind, message.message) or RequestFailed(message.message))
        elif isinstance(message, EngineReady):
            self._report = message  # a later one when a replica has been given up
            if self._state == "starting":
                self._state = "running"
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, Question):
            handler = self._handlers.get(message.topic)
            self.send(Answer(message.call_id, handler(message.body) if handler is not None else b""))
        elif isinstance(message, CallFailed):
            if (future := self._calls.get(message.call_id)) is not None and not future.done():
                future.set_exception(EngineDead(message.message))
        elif isinstance(message, Drain):
            self.on_drain()
        elif (future := self._calls.get(message.call_id)) is not None and not future.done():
            future.set_result(message)

    def _on_delta(self, delta: TokenDelta) -> None:
        sink = self._sinks.get(delta.request_id)
        if sink is None or delta.index not in self._siblings[delta.request_id]:
            return  # ended by us while this was on its way
        if delta.finish_reason is not None:
            self._end_sibling(delta.request_id, delta.index)
        try:
            sink.on_delta(delta)
        except Exception as e:
            # One request's text must never stop the others.
            logger.exception("The output of request %s could not be processed", sink.request_id)
            self.abort(delta.request_id)
            sink.on_error(RequestFailed(f"The output could not be processed: {type(e).__name__}: {e}"))

    def _on_news(self, news: EngineNews) -> None:
        self._stats, self._restarts, self._engine_pid = news.stats, news.restarts, news.pid
        if self._state in ("starting", "closed"):
            return
        if news.state in ("dead", "closed"):
            self._state, self._death = "dead", news.death or "The engine has been shut down."
            self._fail_all(EngineDead(self._death), tell=False)
        elif news.state != self._state:
            self._state = "restarting" if news.state == "restarting" else "running"
            self._work_since = time.monotonic()

    # ---- health

    @property
    def state(self) -> State:
        return self._state

    @property
    def ready_report(self) -> EngineReady:
        if self._report is None:
            raise EngineDead("The engine has not started.")
        return self._report

    @property
    def death(self) -> EngineDead | None:
        return EngineDead(self._death) if self._state == "dead" else None

    @property
    def restarts(self) -> int:
        return self._restarts

    @property
    def engine_pid(self) -> int | None:
        return self._engine_pid

    def stats(self) -> EngineStats:
        return self._stats

    def last_step_age(self) -> float:
        """Seconds since the engine last finished a step while there is work of ours; 0.0 when there is none."""
        if not self._sinks:
            return 0.0
        return max(0.0, time.monotonic() - max(self._stats.last_step_time, self._work_since))

    def check_alive(self) -> None:
        if self._state == "dead":
            raise EngineDead(self._death)
        if self._state == "closed":
            raise EngineDead("The engine has been shut down.")

    async def ping(self) -> EngineStats:
        answer = await self._call(Ping)
        assert isinstance(answer, Pong)
        return answer.stats

    async def reset_prefix_cache(self) -> bool:
        answer = await self._call(ResetPrefixCache)
        assert isinstance(answer, Pong)
        return answer.result

    async def _call(self, message: Callable[[int], FromApiServer]) -> Pong | Answers:
        self._next_call += 1
        call_id = self._next_call
        future: asyncio.Future[Pong | Answers] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self.send(message(call_id))
            return await future
        finally:
            self._calls.pop(call_id, None)

    # ---- peers

    def report_live(self, live: int) -> None:
        self._board.set(self._number, LIVE, live)

    def total_live(self) -> int:
        return self._board.total(LIVE)

    def on(self, topic: str, handler: Handler) -> None:
        self._handlers[topic] = handler

    async def ask(self, topic: str, body: bytes = b"", *, own: bytes = b"") -> PeerAnswers:
        answers = await self._call(lambda call_id: Question(call_id, topic, body, own))
        assert isinstance(answers, Answers)
        return PeerAnswers(answers.living, answers.gone)
