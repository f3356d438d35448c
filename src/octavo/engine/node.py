"""A host other than the first: starts its ranks, and again when the engine they belonged to is gone, until there is none any more.

Nothing is served here. The ranks find the engine themselves (`executor.door`); this process only watches them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import threading
import time
from types import FrameType

from octavo.config.types import EngineConfig
from octavo.engine.build import RANK_MODULE
from octavo.errors import EngineDead, error_of
from octavo.executor.door import resolve_address
from octavo.executor.rank_ends import SILENT_SECONDS, LocalRank
from octavo.protocol.ranks import LinkPlace, RankBoot, RankFailed

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0
"""How long to look for the next engine after one has been lost. It is started at once, if at all."""
ENDED_SECONDS = 15.0
"""The same after one has ended in good order."""
LOOK_SECONDS = 1.0
FOLLOW_SECONDS = 5.0
"""The other ranks see by themselves that the engine is gone."""


class _Terminated(BaseException):
    """SIGTERM or Ctrl-C."""


def run_node(config: EngineConfig) -> None:
    """Until the first host's engine has ended, or a signal comes.

    Raises:
        ConfigError: the model cannot be divided so, or the first host will not have us; it says why.
        EngineDead: it did not answer in time.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        raise _Terminated

    from octavo.models.loader import check_divisible

    check_divisible(config)  # the first host refuses it too, and would not be there to tell us
    nodes = config.parallel.nodes
    with contextlib.suppress(OSError):  # a name that is not known yet: the ranks try again
        resolve_address(nodes)  # refuses what no wait will mend
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    patience, ended = nodes.timeout, False
    try:
        while True:
            began = time.monotonic()
            failure, well = _one_life(config, patience, speaks=not ended)
            if failure is not None:
                if ended:
                    logger.info("The first host has ended, and so does this one")
                    return
                raise error_of(failure.kind, failure.message) or EngineDead(failure.message)
            ended = well
            patience = min(nodes.timeout, ENDED_SECONDS if well else AGAIN_SECONDS)
            logger.warning(
                "The engine %s after %.0f s: looking for the next one for %g s",
                "has ended" if well else "is gone, or a rank here",
                time.monotonic() - began,
                patience,
            )
    except _Terminated:
        return
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _one_life(config: EngineConfig, patience: float, *, speaks: bool) -> tuple[RankFailed | None, bool]:
    """The ranks of this host, from their start until all have ended.

    Returns:
        why the first host did not let them in, and whether they were told to end.
    """
    parallel = config.parallel
    first = parallel.nodes.rank * parallel.per_node
    ranks: list[LocalRank] = []
    failure = None
    try:
        for local in range(parallel.per_node):
            ranks.append(_start(config, first + local, local, patience, speaks=speaks and local == 0))
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(rank, selectors.EVENT_READ)
            while len(selector.get_map()) == len(ranks):
                _end_stopped(ranks)
                for key, _ in selector.select(LOOK_SECONDS):
                    assert isinstance(key.fileobj, LocalRank)
                    messages = key.fileobj.read()
                    if messages is None:
                        selector.unregister(key.fileobj)
                    for message in messages or ():
                        if isinstance(message, RankFailed):
                            failure = failure or message
    except BaseException:
        for rank in ranks:
            rank.abandon()
        raise
    finally:
        deadline = time.monotonic() + FOLLOW_SECONDS
        for rank in ranks:
            rank.end(deadline, now=failure is not None)
            if rank.killed_by_others:  # the first host sees only that it is gone
                logger.error("%s", rank.farewell())
    return failure, all(rank.process.returncode == 0 for rank in ranks)


def _end_stopped(ranks: list[LocalRank]) -> None:
    """A rank that a signal has stopped does not notice that its engine is gone: it would stay for ever. The engine finds out first, and
    says what it was."""
    for rank in ranks:
        if rank.stopped_for() > SILENT_SECONDS:
            logger.error("Rank %d (process %d) is stopped, by a signal: ending it", rank.rank, rank.process.pid)
            rank.abandon()


def _start(config: EngineConfig, rank: int, local_rank: int, patience: float, *, speaks: bool) -> LocalRank:
    read_status, write_status = os.pipe()
    boot = RankBoot(
        config=config,
        rank=rank,
        local_rank=local_rank,
        place=LinkPlace(patience, speaks, write_status),
        from_main_thread=threading.current_thread() is threading.main_thread(),
        log_level=logging.getLogger("octavo").getEffectiveLevel(),
    )
    try:
        return LocalRank(boot, RANK_MODULE, read_status, (write_status,))
    finally:
        os.close(write_status)
