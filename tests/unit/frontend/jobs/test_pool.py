"""Jobs in processes: late ones end alone, waiting counts for nobody, the line is bounded, and everybody gets an answer."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.errors import EngineDead, InvalidRequest, OctavoError, Overloaded
from octavo.frontend.jobs import pool as pools
from octavo.frontend.jobs.pool import STOPPED, JobPool
from octavo.frontend.jobs.process import Room

ROOM = Room("test jobs", "tests.support.job_room", seconds=1.0, memory=1 << 28)


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes can import the tests, and the machine may be as busy as it likes."""
    monkeypatch.setattr("octavo.frontend.jobs.process.BUSY_FACTOR", 100)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def pool() -> Iterator[JobPool]:
    pool = JobPool(ROOM, lambda: b"<")
    yield pool
    pool.close()


def test_jobs_are_answered_after_the_setup(pool: JobPool) -> None:
    assert [pool.submit("a", f"job {i}".encode()).result() for i in range(3)] == [b"<job 0", b"<job 1", b"<job 2"]
    assert len(pool.pids) == 1
    assert int(pool.submit("a", b"nice").result()) > os.nice(0)


def test_a_late_job_ends_and_the_next_ones_are_answered(pool: JobPool) -> None:
    late, after = pool.submit("a", b"work 60"), pool.submit("a", b"x")
    with pytest.raises(InvalidRequest, match="it ran for more than 1 seconds") as stopped:
        late.result(200)
    assert stopped.value.code == STOPPED
    assert after.result(60) == b"<x"


def test_time_without_work_does_not_count(pool: JobPool) -> None:
    assert pool.submit("a", b"sleep 2").result(60) == b"<sleep 2"


def test_a_job_that_never_gets_to_work_is_given_up_without_blame(pool: JobPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.jobs.process.BUSY_FACTOR", 1.5)
    with pytest.raises(Overloaded):
        pool.submit("a", b"sleep 60").result(60)


@pytest.mark.parametrize("job", [f"fill {1 << 30}".encode(), b"die"])
def test_a_process_that_ends_takes_only_its_job_along(pool: JobPool, job: bytes) -> None:
    with pytest.raises(InvalidRequest, match="memory"):
        pool.submit("a", job).result(60)
    assert pool.submit("a", b"fill 1000").result(60) == b"1000"


def test_one_client_leaves_a_process_to_the_others(pool: JobPool) -> None:
    """Two long jobs of one client, then a short one of another: it is answered while they run."""
    bombs = [pool.submit("bad", b"work 60") for _ in range(4)]
    begun = time.monotonic()
    assert pool.submit("good", b"x").result(60) == b"<x"
    assert not bombs[1].done()
    for bomb in bombs[:2]:
        with pytest.raises(InvalidRequest):
            bomb.result(200)
    assert time.monotonic() - begun > 1.5  # one after the other


def test_a_long_job_delays_those_of_its_client_for_a_moment_only(pool: JobPool) -> None:
    pool.submit("a", b"x").result(60)
    long = pool.submit("a", b"sleep 4")
    begun = time.monotonic()
    assert [pool.submit("a", f"job {i}".encode()).result(60) for i in range(5)] == [f"<job {i}".encode() for i in range(5)]
    assert time.monotonic() - begun < 3 and not long.done()
    assert long.result(60) == b"<sleep 4"


def test_long_jobs_are_few(pool: JobPool) -> None:
    """However many there are: of one client one stands aside; of all clients a few; and processes beyond the usual number end."""
    longs = [pool.submit(client, b"sleep 1.5") for client in "aabbccdd"]
    most = 0
    while not all(job.done() for job in longs):
        most = max(most, len(pool.pids))
        time.sleep(0.02)
    assert most <= pools.MAX_PROCESSES + pools.MAX_LONG
    assert [job.result() for job in longs] == [b"<sleep 1.5"] * 8
    assert pool.submit("a", b"x").result(60) == b"<x"
    deadline = time.monotonic() + 20
    while len(pool.pids) > pools.MAX_PROCESSES and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pool.pids) <= pools.MAX_PROCESSES
    assert not pool._long and not pool._line._running


def test_the_line_is_bounded(pool: JobPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.submit("a", b"x").result(60)
    monkeypatch.setattr(pools, "PATIENCE", 100.0)
    pool._line._most = 3
    running = pool.submit("a", b"sleep 3")
    while len(pool._line):
        time.sleep(0.01)
    waiting = [pool.submit("a", b"x") for _ in range(3)]
    with pytest.raises(Overloaded, match="too many test jobs wait for one of 2 processes") as full:
        pool.submit("a", b"x")
    assert full.value.retry_after > 0
    assert pool.submit("b", b"y").result(60) == b"<y"
    with pytest.raises(Overloaded):
        waiting[2].result(60)
    assert [one.result(60) for one in (running, *waiting[:2])] == [b"<sleep 3", b"<x", b"<x"]


def test_nobody_waits_for_ever(pool: JobPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.submit("a", b"x").result(60)
    monkeypatch.setattr(pools, "MAX_WAIT", 0.5)
    monkeypatch.setattr(pools, "PATIENCE", 100.0)
    running = pool.submit("a", b"sleep 1.5")
    late = pool.submit("a", b"x")
    with pytest.raises(Overloaded):
        late.result(200)
    assert running.result(60) == b"<sleep 1.5"


def test_who_goes_away_leaves_the_line(pool: JobPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "PATIENCE", 100.0)

    async def impatient() -> None:
        first = asyncio.ensure_future(pool.ask("a", b"sleep 1"))
        await asyncio.sleep(0.2)
        second = asyncio.ensure_future(pool.ask("a", b"x"))
        await asyncio.sleep(0.2)
        second.cancel()
        await asyncio.sleep(0)
        assert len(pool._line) == 0
        assert await first == b"<sleep 1"

    pool.submit("a", b"x").result(60)
    asyncio.run(impatient())


def test_idle_processes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "IDLE_SECONDS", 0.3)
    pool = JobPool(ROOM)
    assert pool.submit("a", b"x").result(60) == b"x"
    deadline = time.monotonic() + 30
    while pool.pids and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pool.pids == []
    assert pool.submit("a", b"y").result(60) == b"y"
    pool.close()


def test_closing_ends_what_runs_and_what_waits(pool: JobPool) -> None:
    pool.submit("a", b"x").result(60)
    jobs = [pool.submit("a", b"work 60") for _ in range(3)]
    time.sleep(0.2)
    pool.close()
    for job in jobs:
        with pytest.raises(EngineDead):
            job.result(10)
    with pytest.raises(EngineDead):
        pool.submit("a", b"x")


def test_a_room_that_does_not_open_is_an_error_of_ours() -> None:
    pool = JobPool(ROOM, lambda: b"broken")
    with pytest.raises(OctavoError, match="does not start") as failed:
        pool.submit("a", b"x").result(60)
    assert not isinstance(failed.value, InvalidRequest)
    pool.close()
