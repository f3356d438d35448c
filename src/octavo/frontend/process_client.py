"""The client of an engine core in a process of its own: it starts, watches, and restarts it, and replays live requests.

The frontend owns the truth about each live request. If the engine process dies, or hangs (work to do but no finished step for
`hang_timeout`), it is killed and started again, and every live sequence goes on from the tokens already delivered: a consumer
sees a pause; no error, no token twice, none missing. `restarts` crashes within `RESTART_WINDOW` seconds that no request explains
are final: every request then ends with EngineDead. So is a crash after which the model's files are not what they were.

Everything here runs on one event loop; no method blocks. A slow consumer costs memory for its own tokens only: sinks gather
what nobody has read yet, bounded by the request's max_tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from octavo.config.types import EngineConfig
from octavo.errors import CheckpointError, EngineDead, OctavoError, RequestFailed, UnsupportedModel, clause, error_of
from octavo.frontend.client import Progress, Sink, State
from octavo.frontend.engine_process import EngineProcess
from octavo.frontend.model_files import ModelFiles
from octavo.frontend.queue_bound import QueueBound
from octavo.frontend.replay import LiveRequest, judge
from octavo.protocol.boot import DEFAULT_BUILDER
from octavo.protocol.engine import (
    AbortRequests,
    EngineFailed,
    EngineProgress,
    EngineReady,
    EngineStats,
    FromEngine,
    NewRequest,
    Ping,
    Pong,
    ReleaseHeld,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
    TokenDelta,
    Vocabulary,
)
from octavo.protocol.stopped import STOPPED_SECONDS, StoppedClock

logger = logging.getLogger(__name__)

RESTART_WINDOW = 600.0
"""Seconds: crashes longer ago are forgiven."""
WATCH_INTERVAL = 0.1
LAST_WORDS = 0.1
"""Seconds to wait for messages that a dead engine had already sent."""
STOP_TIMEOUT = 5.0
COUNTERS = (
    "step",
    "prefix_queries",
    "prefix_hits",
    "preemptions",
    "recomputed_tokens",
    "prompt_tokens",
    "generation_tokens",
    "evictions",
    "cow_copies",
    "rejected",
)
"""Fields of EngineStats that only grow."""


class _Crash(Exception):
    """The engine process is of no use any more. `request_id` if it named a culprit, `kind` the OctavoError behind it."""

    def __init__(self, reason: str, *, kind: str = "", request_id: str = "") -> None:
        super().__init__(reason)
        self.kind = kind
        self.request_id = request_id


class ProcessClient:
    """See the module. `spawn` may be called with no event loop running; everything else needs one.

    Args:
        suspect_after: crashes in a row that make a request in flight at all of them a suspect.
        builder: `module:function` that makes the core in the engine process (tests).
    """

    def __init__(self, config: EngineConfig, *, suspect_after: int = 2, builder: str = DEFAULT_BUILDER) -> None:
        self._config = config
        self._who = f"{config.parallel.name.capitalize()}: " if config.parallel.name else ""
        """Before what is said of this engine, where there are several."""
        self._builder = builder
        self._files = ModelFiles.of(config)
        self._suspect_after = suspect_after
        self._process: EngineProcess | None = None
        self._state: State = "starting"
        self._death: EngineDead | None = None
        self._ready: EngineReady | None = None
        self._stats = EngineStats()
        self._before_restart = EngineStats()
        """Totals of the engines before this one: counters never run backwards."""
        self._live: dict[str, LiveRequest] = {}
        self._suspects: deque[LiveRequest] = deque()
        """First: the one on probation. While there are any, no other request is sent."""
        self._calls: dict[int, asyncio.Future[Pong]] = {}
        self._next_call = 0
        self._crash_times: deque[float] = deque()
        self._queue_bound = QueueBound(config.scheduler)
        self._work_since = 0.0
        self._supervisor: asyncio.Task[None] | None = None
        self._progress: Progress | None = None
        self.on_stats: Callable[[EngineStats], None] | None = None
        """Called with every new snapshot."""
        self.on_orphans: Callable[[list[LiveRequest], EngineDead], bool] = lambda orphans, error: False
        """Called with what is live when the engine is gone for good: whether somebody takes it over."""
        self.vocabulary: Callable[[], Vocabulary] | None = None
        """What an engine must know of the tokens before its first constrained request."""
        self._told_vocabulary: EngineProcess | None = None
        self.restarts = 0
        """Restarts since the start, for metrics."""

    # ---- start and stop

    def spawn(self) -> None:
        """Start the engine process; `start` waits for it."""
        if self._process is None:
            self._process = EngineProcess(self._config, builder=self._builder)

    async def start(self, progress: Progress | None = None) -> EngineReady:
        """Wait until the engine can take requests.

        Raises:
            OctavoError: what the engine said about why it cannot start, or EngineDead if it died without a word.
        """
        self._progress = progress
        self.spawn()
        assert self._process is not None
        try:
            self._ready = await self._until_ready(self._process)
        except _Crash as e:
            await self._discard_process()
            self._state = "dead"
            self._death = EngineDead(str(e))
            raise self._cannot_start(e) from None
        except BaseException:
            await self.close()
            raise
        self._state = "running"
        self._send_everybody()
        self._supervisor = asyncio.create_task(self._supervise(), name="octavo-engine-supervisor")
        return self._ready

    def _cannot_start(self, crash: _Crash) -> OctavoError:
        of_the_model = crash.kind in (CheckpointError.__name__, UnsupportedModel.__name__)  # so it is with every replica
        who = "" if of_the_model else self._who
        return error_of(crash.kind, f"{who}{crash}") or EngineDead(f"{who}The engine could not start: {clause(crash)}.")

    async def close(self) -> None:
        """End the engine process; live requests fail. Calling it again does nothing."""
        if self._state == "closed":
            return
        was_running, self._state = self._state == "running", "closed"
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._fail_all(EngineDead("The engine has been shut down."))
        if self._process is not None and was_running:
            self._process.send(Shutdown())
            deadline = time.monotonic() + STOP_TIMEOUT
            while self._process.exit_code() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
        await self._discard_process()

    def kill(self) -> None:
        """End a process that was only spawned. No event loop needed."""
        self._state = "closed"
        if self._process is not None:
            self._process.close()
            self._process = None

    async def _discard_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.aclose()

    # ---- requests

    def add(self, request: NewRequest, sink: Sink, *, bounded: bool = True) -> None:
        """Send a request; `sink` gets its tokens.

        Args:
            bounded: refuse it when the queue is full. False for the inner requests of one already admitted (beam search).

        Raises:
            Overloaded: too many requests wait already.
            EngineDead: the engine is gone for good.
        """
        self.check_alive()
        if bounded:
            self._queue_bound.check(self.num_sequences)
        self.take_over(LiveRequest(request, sink))

    def take_over(self, live: LiveRequest) -> None:
        """Go on with a request of another engine, from the tokens it has."""
        if not self._live:
            self._work_since = time.monotonic()
        live.in_flight = False
        self._live[live.request.request_id] = live
        if self._state == "running" and not self._suspects:
            self._send(live)

    def abort(self, request_id: str, index: int | None = None) -> None:
        live = self._live.get(request_id)
        if live is None:
            return
        if index is None:
            live.outputs.clear()
        else:
            live.outputs.pop(index, None)
        if live.in_flight and self._process is not None and self._state == "running":
            self._process.send(AbortRequests([request_id], index))
        self._forget_if_ended(live)

    def release(self, request_ids: list[str]) -> None:
        if request_ids and self._process is not None and self._state == "running":
            self._process.send(ReleaseHeld(request_ids))

    def _send(self, live: LiveRequest) -> None:
        assert self._process is not None
        live.in_flight = True
        live.progress = 0
        constrained = live.request.sampling.constraint is not None
        if constrained and self.vocabulary is not None and self._told_vocabulary is not self._process:
            self._told_vocabulary = self._process
            self._process.send(self.vocabulary())
        for message in live.messages():
            self._process.send(message)

    def _forget_if_ended(self, live: LiveRequest) -> None:
        if live.ended:
            self._live.pop(live.request.request_id, None)
            self._queue_bound.finished()
        self._advance_probation()

    def _advance_probation(self) -> None:
        """Let the next suspect in once the first is cleared; after the last one, everybody."""
        if not self._suspects or self._state != "running":
            return
        while self._suspects and (self._suspects[0].ended or (self._suspects[0].in_flight and self._suspects[0].cleared)):
            self._suspects.popleft().crashes = 0
        if self._suspects:
            if not self._suspects[0].in_flight:
                self._work_since = time.monotonic()
                self._send(self._suspects[0])
            return
        self._send_everybody()

    def _send_everybody(self) -> None:
        for live in list(self._live.values()):
            if not live.in_flight:
                self._send(live)

    # ---- health

    @property
    def state(self) -> State:
        return self._state

    @property
    def ready_report(self) -> EngineReady:
        if self._ready is None:
            raise EngineDead("The engine has not started.")
        return self._ready

    @property
    def num_sequences(self) -> int:
        """Live sequences, siblings counted."""
        return sum(len(live.outputs) for live in self._live.values())

    @property
    def death(self) -> EngineDead | None:
        """Why there is no engine and there will be none."""
        return self._death

    @property
    def num_requests(self) -> int:
        return len(self._live)

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    @property
    def engine_pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def stats(self) -> EngineStats:
        """The last snapshot that the engine sent."""
        return self._stats

    def last_step_age(self) -> float:
        """Seconds since the engine last finished a step while there is work; 0.0 when idle."""
        if not self._live:
            return 0.0
        return max(0.0, time.monotonic() - max(self._stats.last_step_time, self._work_since))

    def check_alive(self) -> None:
        """Raises EngineDead when there is no engine and there will be none."""
        if self._death is not None:
            raise self._death
        if self._state == "closed":
            raise EngineDead("The engine has been shut down.")

    async def ping(self) -> EngineStats:
        """A round trip through the engine's own loop: an answer proves that it turns."""
        return (await self._call(Ping)).stats

    async def reset_prefix_cache(self) -> bool:
        return (await self._call(ResetPrefixCache)).result

    async def _call(self, message: Callable[[int], Ping | ResetPrefixCache]) -> Pong:
        self.check_alive()
        if self._process is None or self._state != "running":
            raise EngineDead("The engine is restarting. Try again in a moment.")
        self._next_call += 1
        call_id = self._next_call
        future: asyncio.Future[Pong] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._process.send(message(call_id))
            return await future
        finally:
            self._calls.pop(call_id, None)

    # ---- supervision

    async def _supervise(self) -> None:
        """Keep an engine running until it is hopeless."""
        try:
            while True:
                assert self._process is not None
                try:
                    await self._run(self._process)
                except _Crash as crash:
                    await self._recover(crash)
        except EngineDead as e:
            self._die(e)
        except Exception as e:
            logger.exception("The engine's supervisor failed")
            self._die(EngineDead(f"The engine's supervisor failed: {type(e).__name__}: {e}"))
            await self._discard_process()

    def _die(self, error: EngineDead) -> None:
        self._state = "dead"
        self._death = error
        logger.error("%s%s", self._who, error)
        orphans = list(self._live.values())
        if self.on_orphans(orphans, error):
            self._live.clear()
        self._fail_all(error)
        self._before_restart = self._stats  # what was done stays done, and nothing runs here any more
        self._on_stats(EngineStats(last_step_time=self._stats.last_step_time, replicas=0))

    async def _run(self, process: EngineProcess) -> None:
        """Pass messages on until the engine is dead or hung; always ends by raising _Crash."""
        crash = asyncio.get_running_loop().create_future()
        reader = asyncio.create_task(self._read(process, crash))
        clock = StoppedClock(process.pid)
        try:
            while not crash.done():
                if process.exit_code() is not None:
                    await asyncio.wait([crash], timeout=LAST_WORDS)
                    if not crash.done():
                        raise _Crash(f"the engine process {process.describe_exit()}")
                elif (age := self.last_step_age()) > self._config.reliability.hang_timeout:
                    process.kill()
                    raise _Crash(f"the engine process hung: it had work but finished no step for {age:.0f} seconds")
                elif (stopped := clock.seconds()) >= STOPPED_SECONDS and self._live:
                    process.kill()
                    raise _Crash(f"the engine process has been stopped for {stopped:.0f} seconds, by a signal")
                else:
                    await asyncio.wait([crash], timeout=WATCH_INTERVAL)
            raise crash.result()
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _read(self, process: EngineProcess, crash: asyncio.Future[_Crash]) -> None:
        try:
            while True:
                self._on_message(await process.receive())
                # A receive that finds a message waiting does not suspend: without this a fast engine would starve every other task.
                await asyncio.sleep(0)
        except _Crash as e:
            crash.set_result(e)
        except Exception as e:
            logger.exception("A message of the engine could not be handled")
            crash.set_result(_Crash(f"a message of the engine could not be handled: {type(e).__name__}: {e}"))

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            for delta in message.deltas:
                self._on_delta(delta)
            if message.stats is not None:
                self._on_stats(message.stats)
        elif isinstance(message, Pong):
            self._on_stats(message.stats)
            future = self._calls.get(message.call_id)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, EngineProgress):
            if self._progress is not None and self._state == "starting":
                self._progress(message.phase, message.done, message.total)
        elif isinstance(message, EngineFailed):
            raise _Crash(message.message, kind=message.kind, request_id=message.request_id)

    def _on_stats(self, stats: EngineStats) -> None:
        for name in COUNTERS if self.restarts or self._death is not None else ():
            setattr(stats, name, getattr(stats, name) + getattr(self._before_restart, name))
        self._stats = stats
        if self.on_stats is not None:
            self.on_stats(stats)

    def _on_delta(self, delta: TokenDelta) -> None:
        live = self._live.get(delta.request_id)
        if live is None or not live.take(delta):
            return
        self._forget_if_ended(live)
        self._deliver(live, delta)

    def _deliver(self, live: LiveRequest, delta: TokenDelta) -> None:
        try:
            live.sink.on_delta(delta)
        except Exception as e:
            # One request's text must never stop the others.
            logger.exception("The output of request %s could not be processed", live.sink.request_id)
            self.abort(live.request.request_id)
            live.sink.on_error(RequestFailed(f"The output could not be processed: {type(e).__name__}: {e}"))

    async def _until_ready(self, process: EngineProcess) -> EngineReady:
        """Wait for EngineReady; _Crash if the process says that it cannot, or dies."""
        receive: asyncio.Future[FromEngine] = asyncio.ensure_future(process.receive())
        clock = StoppedClock(process.pid)
        try:
            while True:
                dead = process.exit_code() is not None
                await asyncio.wait([receive], timeout=LAST_WORDS if dead else WATCH_INTERVAL)
                if receive.done():
                    message = receive.result()
                    if isinstance(message, EngineReady):
                        process.unlink_sockets()
                        return message
                    self._on_message(message)
                    receive = asyncio.ensure_future(process.receive())
                elif dead:
                    raise _Crash(f"the engine process {process.describe_exit()} while it started")
                elif (stopped := clock.seconds()) >= STOPPED_SECONDS:
                    process.kill()
                    raise _Crash(f"the engine process has been stopped for {stopped:.0f} seconds, by a signal, while it started")
        finally:
            receive.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await receive

    async def _recover(self, crash: _Crash) -> None:
        """Restart the engine and replay what is live.

        Raises:
            EngineDead: too many crashes, or the model's files have changed.
        """
        self._state = "restarting"
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDead("The engine restarted before it answered. Try again."))
        logger.error("%s%s; %d live requests", self._who, clause(crash), len(self._live))
        self._judge(crash)
        self._before_restart = self._stats
        while True:
            await self._discard_process()
            self._count_crash(crash)
            self._check_files(crash)
            self.restarts += 1
            try:
                self.spawn()
                assert self._process is not None
                self._ready = await self._until_ready(self._process)
                break
            except _Crash as again:
                logger.error("%sThe engine did not come back: %s", self._who, again)
                crash = again
        try:
            self._check_files(crash)  # they may have changed while they were read
        except EngineDead:
            await self._discard_process()
            raise
        self._state = "running"
        self._work_since = time.monotonic()
        logger.warning("%sThe engine is back (process %d); %d requests go on", self._who, self._process.pid, len(self._live))
        if self._suspects:
            self._advance_probation()
        else:
            self._send_everybody()

    def _judge(self, crash: _Crash) -> None:
        on_probation = self._suspects[0] if self._suspects else None
        verdict = judge(list(self._live.values()), on_probation, crash.request_id, self._suspect_after)
        for live in self._live.values():
            live.in_flight = False
        guilty = verdict.guilty
        if guilty is None:
            if verdict.suspects:
                self._suspects = deque(verdict.suspects)
            return
        # The crashes are explained: they say nothing about the engine.
        self._crash_times.clear()
        if guilty in self._suspects:
            self._suspects.remove(guilty)
        self._suspects.clear()
        del self._live[guilty.request.request_id]
        logger.error("Request %s is taken for the cause and is not tried again", guilty.sink.request_id)
        guilty.sink.on_error(
            RequestFailed(
                f"Request {guilty.sink.request_id} was running every time the engine process failed ({clause(crash)}). It is taken for the "
                "cause and is not tried again; all other requests go on."
            )
        )

    def _count_crash(self, crash: _Crash) -> None:
        now = time.monotonic()
        self._crash_times.append(now)
        while self._crash_times[0] < now - RESTART_WINDOW:
            self._crash_times.popleft()
        allowed = self._config.reliability.restarts
        if len(self._crash_times) > allowed:
            tries = f"it failed {len(self._crash_times)} times in {RESTART_WINDOW / 60:.0f} minutes" if allowed else "restarts are off"
            raise EngineDead(f"The engine is gone: {clause(crash)}; {tries}, so it is not restarted.")

    def _check_files(self, crash: _Crash) -> None:
        if (change := self._files.changed()) is not None:
            raise EngineDead(
                f"The engine is gone: {clause(crash)}; {change}, so it is not loaded again behind the old tokenizer. Restart the server."
            )

    def _fail_all(self, error: OctavoError) -> None:
        for live in list(self._live.values()):
            live.sink.on_error(error)
        self._live.clear()
        self._suspects.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
