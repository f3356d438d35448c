"""`RanksExecutor`: one process a rank, on this host or on others; rank 0 is this process itself.

Every rank gets every plan and computes its share; sampling has the same result on each, so that nothing but failures comes back. A rank
that dies leaves the others waiting in a sum: a thread watches them all, and says so at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from octavo.config.types import EngineConfig
from octavo.errors import EngineDead
from octavo.executor.door import Door
from octavo.executor.inline import Rank
from octavo.executor.rank_ends import LinkedRank, LocalRank, RankEnd
from octavo.executor.ring import RING_BYTES, RingWriter, make_memory
from octavo.protocol.engine import EngineReady
from octavo.protocol.ranks import PrepareNow, RankBoot, RankFailed, RankReady, RingPlace, RunStep, StopRank, encode
from octavo.protocol.step import CacheShape, StepPlan, StepResult

logger = logging.getLogger(__name__)

Lost = Callable[[str, str], None]
"""(message, kind of OctavoError): a rank is gone, and the engine with it. Called from any thread, perhaps from several."""

STOP_SECONDS = 5.0
WATCH_SECONDS = 1.0
ARRIVAL_SECONDS = 0.1
"""How often to look who has come while somebody is missing."""


class FirstRank(Rank, Protocol):
    """What `RanksExecutor` needs of rank 0."""

    @property
    def left_to_prepare(self) -> bool:
        """Whether there is anything left for `prepare`."""

    def preparation_due(self, *, idle: bool) -> bool:
        """Whether now is the time."""

    def check_ranks(self) -> None:
        """From any thread. Raises EngineDead if its device has given up waiting for another rank."""


class RanksExecutor:
    """Implements `executor.base.Executor`.

    Args:
        worker_factory: makes rank 0, here and now, once the others are on their way; given what raises if one of them is gone.
        rendezvous: where the ranks find each other.
        module: what a rank's process runs.
        local: the ranks to start here.
        door: where the others come in, where there are any; closed with the executor.
        abandon: called from any thread when all that are elsewhere are to end at once, and rank 0 is to wait for none of them any more.
        release: called when all have ended.
        lost: what to do when a rank is gone; may never return.
        defer: leave for `prepare` what can wait.

    Raises:
        EngineDead, OctavoError: a rank could not load; says which.
    """

    def __init__(
        self,
        config: EngineConfig,
        worker_factory: Callable[[Callable[[], None]], FirstRank],
        *,
        rendezvous: str,
        module: str,
        local: range,
        door: Door | None = None,
        abandon: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
        lost: Lost,
        defer: bool,
    ) -> None:
        self._config = config
        self._defer = defer
        self._lost = lost
        self._closing = False
        self._failure: str | None = None
        self._kind = ""
        self._submitted: list[float] = []
        """When each step not collected yet was."""
        self._late = config.device.kind == "cpu" and config.parallel.pipeline > 1
        """A CPU computes when it launches: our stage's share waits until a result is wanted, so that the stages before can be ahead."""
        self._waiting: deque[StepPlan] = deque()
        self._door = door
        self._abandon = abandon
        self._release = release
        self._ring: RingWriter | None = None
        self._ends: list[RankEnd] = []
        """Of the ranks that are here."""
        self._links: list[LinkedRank] = []
        self._changed = threading.Condition()
        if local:
            self._start(local, rendezvous, module)
        self._worker: FirstRank | None = None
        self._watcher = threading.Thread(target=self._watch, name="octavo-ranks", daemon=True)
        self._watcher.start()
        try:
            self._worker = worker_factory(self._check_arrivals)
            self._until_ready()
        except BaseException:
            self._end_ranks(stop=False)
            raise

    def _start(self, ranks: range, rendezvous: str, module: str) -> None:
        memory = make_memory()
        pipes, started = [], []
        for reader, rank in enumerate(ranks):
            read_headers, write_headers = os.pipe()
            read_status, write_status = os.pipe()
            place = RingPlace(memory, RING_BYTES, reader, read_headers, write_status, rendezvous, self._defer)
            boot = RankBoot(
                config=self._config,
                rank=rank,
                local_rank=rank,
                place=place,
                from_main_thread=threading.current_thread() is threading.main_thread(),
                log_level=logging.getLogger().getEffectiveLevel(),
            )
            end = LocalRank(boot, module, read_status, (memory, read_headers, write_status))
            end.reader = reader
            os.close(read_headers)
            os.close(write_status)
            pipes.append(write_headers)
            started.append(end)
        self._ring = RingWriter(memory, pipes)
        for end in started:
            end.ring = self._ring
        self._ends += started
        os.close(memory)

    @property
    def _first(self) -> FirstRank:
        assert self._worker is not None
        return self._worker

    # Executor

    @property
    def cache_shape(self) -> CacheShape:
        return self._first.cache_shape

    @property
    def ready_report(self) -> EngineReady:
        return self._first.ready_report

    @property
    def tries(self) -> bool:
        return False

    def submit(self, plan: StepPlan) -> None:
        """Send the plan, and launch rank 0's share of it."""
        self._check()
        self._send(encode(RunStep(plan)))
        self._submitted.append(time.monotonic())
        if self._late:
            self._waiting.append(plan)
        else:
            self._launch(plan)

    def collect(self) -> StepResult:
        """Rank 0's result: it is in the last stage, and every rank of that has the same."""
        try:
            if self._waiting:
                self._launch(self._waiting.popleft())
            with self._together():
                return self._first.collect()
        finally:
            self._submitted.pop(0)

    def _launch(self, plan: StepPlan) -> None:
        with self._together():
            self._first.submit(plan)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Around what every rank does: if it fails here, the others wait for us in it."""
        try:
            yield
        except Exception as e:
            # If it failed because one of them is gone, that is the better word.
            with self._changed:
                known = self._changed.wait_for(lambda: self._failure is not None, WATCH_SECONDS)
            if not known:
                logger.exception("Rank 0 failed")
            self._fail(f"Rank 0 could not run a step that the other ranks are in: {type(e).__name__}: {e}", "")
            self._check()
            raise
        self._check()  # what waited for a rank that was abandoned has no result

    def prepare(self, *, idle: bool) -> bool:
        """Rank 0 decides when; then all do it, since what is captured holds sums over ranks."""
        if not self._first.preparation_due(idle=idle):
            return self._first.left_to_prepare
        self._send(encode(PrepareNow()))
        return self._first.prepare(idle=True)

    def shutdown(self) -> None:
        """End the other ranks, then release rank 0. Calling it again does nothing."""
        if self._closing:
            return
        # The other ranks are in these steps already, and would wait for rank 0's share instead of for their end.
        with contextlib.suppress(Exception):
            while self._waiting and self._failure is None:
                self._launch(self._waiting.popleft())
        self._end_ranks(stop=True)
        self._first.shutdown()

    # Ranks

    def _send(self, data: bytes, check: Callable[[], None] | None = None) -> None:
        check = check or self._check
        try:
            for far in self._links:  # theirs is the longer way
                far.link.send(data, check)
            if self._ring is not None:
                self._ring.send(data, check)
        except BrokenPipeError:
            check()
            raise EngineDead("A rank does not take steps any more.") from None

    def _check(self) -> None:
        """Go no further if a rank is gone: requests would get an error for what a restart mends."""
        if self._failure is not None:
            self._lost(self._failure, self._kind)
            raise EngineDead(self._failure)

    def _fail(self, message: str, kind: str) -> None:
        with self._changed:
            first = self._failure is None and not self._closing
            if first:
                self._failure, self._kind = message, kind
            self._changed.notify_all()
        if first:
            logger.error("%s", message)
            self._lost(message, kind)
            # The engine is still there. It may be waiting for a rank that neither ends nor goes on.
            for end in self._ends:
                end.abandon()
            self._abandon()

    def _check_arrivals(self) -> None:
        self._check()
        if self._door is not None:
            self._door.check()

    def _until_ready(self) -> None:
        others = self._config.parallel.world - 1
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or sum(end.ready for end in self._ends) == others)
        self._check()

    def _watch(self) -> None:
        """Read what ranks say, and notice when one comes, ends or hangs."""
        with selectors.DefaultSelector() as selector:
            for end in self._ends:
                selector.register(end, selectors.EVENT_READ)
            pause = min(WATCH_SECONDS, self._config.reliability.hang_timeout / 20)
            while not self._closing:
                missing = self._door is not None and len(self._ends) < self._config.parallel.world - 1
                if not missing and not selector.get_map():
                    return
                for key, _ in selector.select(ARRIVAL_SECONDS if missing else pause):
                    if not self._listen(key.fileobj):  # type: ignore[arg-type]
                        selector.unregister(key.fileobj)
                for guest in self._door.arrivals() if self._door is not None else ():
                    far = LinkedRank(guest)
                    selector.register(far, selectors.EVENT_READ)
                    with self._changed:
                        self._links.append(far)
                        self._ends.append(far)
                self._look_for_silent()
                self._look_for_given_up()
                self._look_for_hung()

    def _listen(self, end: RankEnd) -> bool:
        """What a rank says; False when it is gone."""
        if self._closing:  # `end` reads what is left
            return False
        messages = end.read()
        if messages is None:
            if not self._closing:
                self._fail(end.farewell(), "")
            return False
        for told in messages:
            if isinstance(told, RankReady):
                with self._changed:
                    end.ready = True
                    self._changed.notify_all()
            elif isinstance(told, RankFailed):
                self._fail(f"Rank {end.rank}: {told.message}", told.kind)
        return True

    def _look_for_silent(self) -> None:
        for end in self._ends:
            if (words := end.silent()) is not None:
                self._fail(words, "")

    def _look_for_given_up(self) -> None:
        """The step may go on to something that waits for the rank without end."""
        if self._worker is not None:
            try:
                self._worker.check_ranks()
            except EngineDead as e:
                self._fail(str(e), "")

    def _look_for_hung(self) -> None:
        oldest = self._submitted[0] if self._submitted else None
        limit = 0.8 * self._config.reliability.hang_timeout  # so that who is named comes before the frontend's own verdict
        if oldest is None or time.monotonic() - oldest < limit:
            return
        states = [state for end in self._ends if (state := end.trouble())]
        self._fail(f"A step has not been finished for {limit:.0f} s: {', '.join(states) or 'every rank is at work on it'}.", "")

    def _end_ranks(self, *, stop: bool) -> None:
        """
        Args:
            stop: tell those on other hosts that it is for good. Otherwise they come back, for the next engine.
        """
        self._closing = True
        if self._door is not None:
            self._door.close()
        well = stop and self._failure is None
        for far in self._links if well else ():
            with contextlib.suppress(BrokenPipeError, EngineDead):
                far.link.send(encode(StopRank()), self._give_up)
        if self._ring is not None:
            with contextlib.suppress(OSError, EngineDead):
                self._ring.send(encode(StopRank()), self._give_up)
        deadline = time.monotonic() + STOP_SECONDS
        for end in self._ends:
            end.end(deadline, now=self._failure is not None or (isinstance(end, LinkedRank) and not well))
        if self._ring is not None:
            self._ring.close()
        self._release()

    @staticmethod
    def _give_up() -> None:
        raise EngineDead("no room for the last message")
