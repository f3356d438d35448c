"""The process of a rank other than the first: takes plans and computes its share, until it is told to end or the engine is gone."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
import time
from collections import deque

from octavo.errors import OctavoError
from octavo.executor.rank_side import Channel, open_channel
from octavo.protocol.boot import die_with_parent
from octavo.protocol.ranks import PrepareNow, RankBoot, RankFailed, RankReady, RunStep, StopRank, decode_down

logger = logging.getLogger(__name__)

YIELD_SECONDS = 2.0
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Gloo's words."""


def main() -> int:
    """Exit code 0 after `StopRank`, 1 after a failure that has been reported or when the engine is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the engine decides
    boot: RankBoot = pickle.load(sys.stdin.buffer)
    die_with_parent(boot.from_main_thread)
    replica = boot.config.parallel.name
    logging.basicConfig(level=boot.log_level, format=f"%(levelname)s {replica}{', ' * bool(replica)}rank {boot.rank}: %(message)s")
    try:
        channel = open_channel(boot)
    except OctavoError:
        return 1
    try:
        return 0 if _run(boot, channel) else 1
    except OctavoError as e:
        channel.say(RankFailed(str(e), type(e).__name__))
        return 1
    except Exception as e:
        if (lost := lost_connection(e)) is not None:
            # Another one has failed, which is what people should hear of. It is seen to end, if we give that a moment.
            logger.debug("The rank has lost another one", exc_info=True)
            time.sleep(YIELD_SECONDS)
            channel.say(RankFailed(lost))
            return 1
        logger.exception("The rank failed")
        channel.say(RankFailed(f"{type(e).__name__}: {e}"))
        return 1


def lost_connection(error: Exception) -> str | None:
    """What to say of a failure that only says that another rank is gone; None of others."""
    text = str(error)
    return "it has lost its connection to another rank." if any(words in text for words in _LOST) else None


def _run(boot: RankBoot, channel: Channel) -> bool:
    """Until `StopRank`; False when the engine is gone without it."""
    from octavo.engine.build import join
    from octavo.worker.worker import Worker

    ranks = join(boot, channel.rendezvous)
    worker = Worker(boot.config, lambda phase, done, total: None, defer_graphs=channel.defer, ranks=ranks)
    gc.collect()
    gc.freeze()
    channel.say(RankReady())
    launched: deque[int] = deque()
    while (data := channel.receive()) is not None:
        message = decode_down(data)
        if isinstance(message, StopRank):
            channel.leave()
            worker.shutdown()
            return True
        if isinstance(message, RunStep):
            worker.submit(message.plan)
            launched.append(message.plan.step_id)
            # Nobody wants the tokens of this rank: an old step is only let go of.
            while len(launched) > boot.config.scheduler.inflight:
                launched.popleft()
                worker.collect()
        elif isinstance(message, PrepareNow):
            worker.prepare(idle=True)
        channel.finished()
    return False


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as the engine's process does
