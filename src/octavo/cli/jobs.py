"""Bounded-concurrency running of many independent jobs, for `generate`, `run-batch` and `bench serve`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

J = TypeVar("J")
R = TypeVar("R")


async def run_jobs(jobs: Iterable[J], work: Callable[[J], Awaitable[R]], concurrency: int) -> AsyncIterator[R]:
    """Results as they come, with at most `concurrency` jobs running.

    Jobs are taken from `jobs` only when there is room, so a huge input is never held in memory. Leaving early cancels what runs.
    """
    running: set[asyncio.Future[R]] = set()
    source = iter(jobs)
    more = True
    try:
        while more or running:
            while more and len(running) < concurrency:
                try:
                    job = next(source)
                except StopIteration:
                    more = False
                else:
                    running.add(asyncio.ensure_future(work(job)))
            if running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    # One by one: when a result is an error, the others are still there to be looked after.
                    running.discard(task)
                    yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
