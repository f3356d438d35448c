"""The main process of several API servers: it holds the engine's client and the API servers' processes, and relays between them.

Every request goes through the one `ProcessClient` here, so supervision, replay and the search for a request that ends engines are
what they are with a single server. An API server that ends takes its own requests with it; another is started in its place, with the
same listening socket, so that connections which wait there are taken by its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.errors import EngineDead, OctavoError, error_of
from octavo.frontend.child_process import Addresses, ChildProcess
from octavo.frontend.http.api_servers.boot import ApiServerBoot
from octavo.frontend.http.api_servers.load_board import LoadBoard
from octavo.frontend.http.sse import cancel
from octavo.frontend.process_client import ProcessClient
from octavo.frontend.replicas import ReplicasClient
from octavo.protocol.api_server import (
    Answer,
    Answers,
    CallFailed,
    CannotServe,
    Drain,
    EngineNews,
    FromApiServer,
    Question,
    RequestEnded,
    Serving,
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
from octavo.protocol.stopped import STOPPED_SECONDS, StoppedClock

logger = logging.getLogger("octavo.server")

WATCH_INTERVAL = 0.05
"""How often API servers are looked after, and hear of the engine when they have nothing to do with it."""
ANSWER_TIMEOUT = 1.0
"""Seconds for an API server to answer another one's question."""
DEATHS, DEATHS_WINDOW = 10, 60.0
"""So many API servers that end within so many seconds are no accident: the whole server ends."""
LONGEST_BACKOFF = 5.0
HEARTBEAT = 0.5
"""How often an API server that says nothing is asked whether it lives."""
ALIVE = "alive"
"""Topic of that question."""


@dataclass
class _Member:
    """One API server, over all its incarnations."""

    number: int
    process: ChildProcess[ToApiServer, FromApiServer] | None = None
    tag: str = ""
    """In front of its ids in the engine; another one for every incarnation."""
    serving: bool = False
    requests: dict[str, _Relay] = field(default_factory=dict)
    """Live ones, by its own id."""
    held: set[str] = field(default_factory=set)
    """Ids in the engine whose blocks are kept for it (beam search)."""
    deltas: list[TokenDelta] = field(default_factory=list)
    last_answers: dict[str, bytes] = field(default_factory=dict)
    reader: asyncio.Task[None] | None = None
    told: EngineNews | None = None
    """The last news it had."""
    silent: float = 0.0
    """Seconds since it said anything, as far as we were awake to hear it."""
    asked: float = 0.0
    """`silent` when it was last asked whether it lives."""
    stopped: StoppedClock | None = None
    """Of its process."""

    def send(self, message: ToApiServer) -> None:
        if self.process is not None:
            self.process.send(message)


class _Relay:
    """The sink of one request: sends what comes to the API server that asked."""

    def __init__(self, hub: ApiServerHub, member: _Member, request: NewRequest) -> None:
        self._hub = hub
        self._member = member
        self._tag = member.tag
        self.id = request.request_id
        self.engine_id = member.tag + request.request_id
        self.siblings = set(range(request.index, request.index + request.sampling.n))
        """Those that have not ended."""

    @property
    def request_id(self) -> str:
        return self.id.rpartition("#")[0] or self.id

    def on_delta(self, delta: TokenDelta) -> None:
        if delta.finish_reason is not None:
            self.siblings.discard(delta.index)
            if not self.siblings:
                self._member.requests.pop(self.id, None)
        if self._tag == self._member.tag:
            delta.request_id = self.id
            self._hub.deliver(self._member, delta)

    def on_error(self, error: OctavoError) -> None:
        self._member.requests.pop(self.id, None)
        if self._tag == self._member.tag:
            self._hub.flush()
            self._member.send(RequestEnded(self.id, str(error), type(error).__name__))


@dataclass
class _Poll:
    """A question on its round: whose answers are missing."""

    topic: str
    kept: bool
    """Answers outlast those who give them."""
    waiting: set[int]
    answers: dict[int, bytes]
    done: asyncio.Event


class ApiServerHub:
    """See the module. Use from one event loop.

    Args:
        listen_fds: one listening socket for each API server.
        shared: file with what all of them must know, pickled.
        responses_path: database of the responses that they keep.
        hang_timeout: seconds of silence after which an API server is taken for hung, and killed.
    """

    def __init__(
        self,
        client: ProcessClient | ReplicasClient,
        board: LoadBoard,
        listen_fds: Sequence[int],
        shared: str,
        responses_path: str,
        hang_timeout: float,
    ) -> None:
        self._hang_timeout = hang_timeout
        self._client = client
        self._board = board
        self._listen_fds = listen_fds
        self._shared = shared
        self._responses_path = responses_path
        self._members = [_Member(number) for number in range(len(listen_fds))]
        self._incarnations = 0
        self._engine_ready = False
        self._replicas = 0
        """As many as the API servers know of."""
        self._stopping = False
        self._deaths: deque[float] = deque()
        self._gone: dict[str, list[bytes]] = {}
        """Last answers of API servers that have ended, by topic."""
        self._vocabulary: Vocabulary | None = None
        self._flushing = False
        self._polls: dict[int, _Poll] = {}
        self._next_poll = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] | None = None
        client.vocabulary = self._known_vocabulary

    # ---- life

    def spawn(self) -> None:
        """Start all API servers. They load while the engine does."""
        for member in self._members:
            self._spawn(member)

    def _spawn(self, member: _Member) -> None:
        number, count, ready = member.number, len(self._members), self._engine_ready

        def boot(to: Addresses) -> ApiServerBoot:
            return ApiServerBoot(
                number=number,
                count=count,
                shared=self._shared,
                inbox=to.inbox,
                outbox=to.outbox,
                listen_fd=self._listen_fds[number],
                board_fd=self._board.fd,
                responses_path=self._responses_path,
                ready=ready,
                from_main_thread=to.from_main_thread,
            )

        self._incarnations += 1
        member.tag = f"{number}.{self._incarnations}:"
        member.serving, member.told = False, None
        member.silent = member.asked = 0.0
        member.process = ChildProcess(
            "octavo.frontend.http.api_servers.process", boot, FromApiServer, pass_fds=(self._listen_fds[number], self._board.fd)
        )
        member.stopped = StoppedClock(member.process.pid)
        if ready:
            member.send(self._client.ready_report)

    async def start(self, engine: Coroutine[Any, Any, EngineReady]) -> None:
        """Wait for `engine`, then until all API servers answer requests.

        Raises:
            OctavoError: one of them cannot start, or the engine cannot.
        """
        self._failure = asyncio.get_running_loop().create_future()
        for member in self._members:
            member.reader = asyncio.ensure_future(self._read(member))
        self._spawn_task(self._watch())
        starting = asyncio.ensure_future(engine)
        waiting: set[asyncio.Future[Any]] = {starting, self._failure}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            await cancel(starting)
            self._failure.result()
        starting.result()
        self._engine_ready = True
        self._client.on_stats = self._on_stats
        self._replicas = self._client.stats().replicas
        for member in self._members:
            member.send(self._client.ready_report)
        self._tell_news()
        while not all(member.serving for member in self._members):
            await asyncio.wait({self._failure}, timeout=WATCH_INTERVAL)
            if self._failure.done():
                self._failure.result()

    async def wait_failed(self) -> None:
        """Returns never; raises what makes going on impossible."""
        assert self._failure is not None
        await asyncio.shield(self._failure)

    def drain(self) -> None:
        """Let API servers end once their requests have. The second time: at once."""
        self._stopping = True
        for member in self._members:
            member.send(Drain())

    async def wait_ended(self) -> None:
        while any(member.process is not None for member in self._members):
            await asyncio.sleep(WATCH_INTERVAL)

    async def close(self) -> None:
        """End what still runs."""
        self._stopping = True
        await cancel(*self._tasks, *(m.reader for m in self._members if m.reader is not None))
        for member in self._members:
            process, member.process = member.process, None
            if process is not None:
                await process.aclose()
        if self._failure is not None:
            self._failure.cancel()

    def kill(self) -> None:
        """End processes that were only spawned. No event loop needed."""
        for member in self._members:
            if member.process is not None:
                member.process.close()
                member.process = None

    @property
    def num_requests(self) -> int:
        return self._client.num_requests

    @property
    def pids(self) -> list[int]:
        return [member.process.pid for member in self._members if member.process is not None]

    def _spawn_task(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- watching

    async def _watch(self) -> None:
        then = time.monotonic()
        while True:
            now = time.monotonic()
            awake, then = min(now - then, 2 * HEARTBEAT), now
            for member in self._members:
                if member.process is not None and member.process.exit_code() is not None:
                    await self._bury(member)
                elif member.process is not None and member.serving:
                    self._listen_for(member, member.process, awake)
            if self._engine_ready:
                self._tell_news()
            await asyncio.sleep(WATCH_INTERVAL)

    def _listen_for(self, member: _Member, process: ChildProcess[ToApiServer, FromApiServer], awake: float) -> None:
        """Nobody else can see that one of several hangs: a health check would be answered by another."""
        member.silent += awake
        stopped = 0.0 if member.stopped is None else member.stopped.seconds()
        if stopped >= STOPPED_SECONDS:
            logger.error(
                "API server %d (process %d) has been stopped for %.0f s, by a signal; it is killed.", member.number, process.pid, stopped
            )
            process.kill()
        elif member.silent > self._hang_timeout:
            logger.error("API server %d has said nothing for %.0f s; it is killed.", member.number, member.silent)
            process.kill()
        elif member.silent - member.asked >= HEARTBEAT:
            member.asked = member.silent
            member.send(Question(0, ALIVE))

    async def _bury(self, member: _Member) -> None:
        process = member.process
        assert process is not None
        how, was_serving = process.describe_exit(), member.serving
        await asyncio.sleep(0)  # what it had said last
        member.process, member.tag, member.serving = None, "", False
        if member.reader is not None:
            await cancel(member.reader)
        self._board.clear(member.number)
        for relay in list(member.requests.values()):
            self._client.abort(relay.engine_id)
        self._client.release(list(member.held))
        live = len(member.requests)
        member.requests.clear()
        member.held.clear()
        member.deltas.clear()
        for topic, answer in member.last_answers.items():
            self._gone.setdefault(topic, []).append(answer)
        member.last_answers.clear()
        for poll in self._polls.values():
            self._answered(poll, member.number, None)
        await process.aclose()
        if self._stopping:
            return
        if not was_serving and not self._engine_ready:
            self._fail(EngineDead(f"API server {member.number} {how} while it started."))
            return
        logger.error("API server %d %s; %d of its requests end with it. Another takes its place.", member.number, how, live)
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - DEATHS_WINDOW:
            self._deaths.popleft()
        if len(self._deaths) >= DEATHS:
            self._fail(EngineDead(f"API servers have ended {len(self._deaths)} times in {DEATHS_WINDOW:.0f} seconds; the last one {how}."))
            return
        self._spawn_task(self._replace(member, min(LONGEST_BACKOFF, 0.05 * 2 ** len(self._deaths)) if len(self._deaths) > 1 else 0.0))

    async def _replace(self, member: _Member, delay: float) -> None:
        await asyncio.sleep(delay)
        if not self._stopping:
            self._spawn(member)
            member.reader = asyncio.ensure_future(self._read(member))

    def _fail(self, error: OctavoError) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    # ---- from the API servers

    async def _read(self, member: _Member) -> None:
        process = member.process
        assert process is not None
        while True:
            message = await process.receive()
            member.silent = member.asked = 0.0
            try:
                self._on_message(member, message)
            except Exception:
                logger.exception("A message of API server %d could not be handled", member.number)
            await asyncio.sleep(0)

    def _on_message(self, member: _Member, message: FromApiServer) -> None:
        if isinstance(message, NewRequest):
            self._add(member, message)
        elif isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                self._abort(member, request_id, message.index)
        elif isinstance(message, ReleaseHeld):
            ids = [member.tag + request_id for request_id in message.request_ids]
            member.held.difference_update(ids)
            self._client.release(ids)
        elif isinstance(message, Vocabulary):
            self._vocabulary = message
        elif isinstance(message, Question):
            self._spawn_task(self._poll(member, message))
        elif isinstance(message, Answer):
            if (poll := self._polls.get(message.call_id)) is not None:
                if poll.kept:
                    member.last_answers[poll.topic] = message.body
                self._answered(poll, member.number, message.body)
        elif isinstance(message, Ping | ResetPrefixCache):
            self._spawn_task(self._call(member, message))
        elif isinstance(message, Serving):
            member.serving = True
        elif isinstance(message, CannotServe):
            self._fail(
                error_of(message.kind, message.message) or EngineDead(f"API server {member.number} could not start: {message.message}")
            )

    def _add(self, member: _Member, request: NewRequest) -> None:
        relay = _Relay(self, member, request)
        parent = member.tag + request.parent_id if request.parent_id else ""
        request = msgspec.structs.replace(request, request_id=member.tag + request.request_id, parent_id=parent)
        try:
            # The API server has bounded the queue already, over all of them.
            self._client.add(request, relay, bounded=False)
        except OctavoError as error:
            relay.on_error(error)
        else:
            member.requests[relay.id] = relay
            if request.hold:
                member.held.add(request.request_id)

    def _abort(self, member: _Member, request_id: str, index: int | None) -> None:
        relay = member.requests.get(request_id)
        if relay is None:
            return
        self._client.abort(member.tag + request_id, index)
        relay.siblings -= relay.siblings if index is None else {index}
        if not relay.siblings:
            del member.requests[request_id]

    def _known_vocabulary(self) -> Vocabulary:
        assert self._vocabulary is not None, "a constrained request before the vocabulary"
        return self._vocabulary

    async def _call(self, member: _Member, message: Ping | ResetPrefixCache) -> None:
        tag = member.tag
        try:
            reset = await self._client.reset_prefix_cache() if isinstance(message, ResetPrefixCache) else True
            pong = Pong(message.call_id, await self._client.ping(), result=reset)
        except OctavoError as error:
            if member.tag == tag:
                member.send(CallFailed(message.call_id, str(error)))
        else:
            if member.tag == tag:
                member.send(pong)

    async def _poll(self, member: _Member, question: Question) -> None:
        """Put a question to the others; answer with what has come in after `ANSWER_TIMEOUT` at the latest."""
        tag, topic = member.tag, question.topic
        if question.own:
            member.last_answers[topic] = question.own
        others = [one for one in self._members if one is not member and one.process is not None]
        self._next_poll += 1
        poll_id = self._next_poll
        poll = self._polls[poll_id] = _Poll(topic, bool(question.own), {one.number for one in others if one.serving}, {}, asyncio.Event())
        try:
            for one in others:
                if one.serving:
                    one.send(Question(poll_id, topic, question.body))
            if poll.waiting:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(poll.done.wait(), ANSWER_TIMEOUT)
        finally:
            del self._polls[poll_id]
        if member.tag != tag:
            return
        late = {one.number: one.last_answers[topic] for one in others if question.own and topic in one.last_answers}
        living = {number: body for number, body in (late | poll.answers).items() if body}
        member.send(Answers(question.call_id, list(living.values()), list(self._gone.get(topic, ()))))

    def _answered(self, poll: _Poll, number: int, body: bytes | None) -> None:
        if number in poll.waiting:
            poll.waiting.discard(number)
            if body is not None:
                poll.answers[number] = body
            if not poll.waiting:
                poll.done.set()

    # ---- to the API servers

    def deliver(self, member: _Member, delta: TokenDelta) -> None:
        """Goes out with everything else of the same step."""
        member.deltas.append(delta)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        self._flushing = False
        stats: EngineStats = self._client.stats()
        for member in self._members:
            if member.deltas:
                deltas, member.deltas = member.deltas, []
                member.send(StepOutputs(deltas, stats))
                # The tokens of a step count once, in one API server.
                stats = msgspec.structs.replace(stats, step_tokens=0)

    def _on_stats(self, _stats: EngineStats) -> None:
        """The engine's message has been read: pass its tokens on before the next one is."""
        if self._flushing:
            self.flush()

    def _tell_news(self) -> None:
        client = self._client
        if (replicas := client.stats().replicas) != self._replicas:
            self._replicas = replicas
            for member in self._members:
                member.send(client.ready_report)
        death = "" if client.death is None else str(client.death)
        news = EngineNews(client.state, client.restarts, client.engine_pid, msgspec.structs.replace(client.stats(), step_tokens=0), death)
        for member in self._members:
            if member.process is not None and news != member.told:
                member.told = news
                member.send(news)
