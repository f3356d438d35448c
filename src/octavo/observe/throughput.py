"""The periodic line of throughput and cache use. Says nothing while nothing happens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from octavo.protocol.engine import EngineStats

logger = logging.getLogger("octavo.stats")


async def log_throughput(stats: Callable[[], EngineStats], interval: float) -> None:
    """Runs until cancelled; every `interval` seconds (0: never) logs what was done since the last line."""
    if interval <= 0:
        return
    before, then = stats(), time.monotonic()
    while True:
        await asyncio.sleep(interval)
        after, now = stats(), time.monotonic()
        line = throughput_line(before, after, now - then)
        if line is not None:
            logger.info("%s", line)
        before, then = after, now


def throughput_line(before: EngineStats, after: EngineStats, seconds: float) -> str | None:
    """What happened between two snapshots, or None if nothing did."""
    if after.step < before.step:
        before = EngineStats()  # the engine was restarted and counts from zero
    if after.step == before.step and not after.running and not after.waiting:
        return None
    prompt = (after.prompt_tokens - before.prompt_tokens) / seconds
    output = (after.generation_tokens - before.generation_tokens) / seconds
    usage = after.kv_blocks_used / after.kv_blocks_total if after.kv_blocks_total else 0.0
    queries = after.prefix_queries - before.prefix_queries
    hits = (after.prefix_hits - before.prefix_hits) / queries if queries else 0.0
    line = (
        f"prompt {prompt:.1f} tokens/s, output {output:.1f} tokens/s, running {after.running}, waiting {after.waiting}, "
        f"KV cache {usage:.1%}, prefix hits {hits:.1%}"
    )
    if preempted := after.preemptions - before.preemptions:
        line += f", preempted {preempted} (recomputing {after.recomputed_tokens - before.recomputed_tokens} tokens)"
    return line
