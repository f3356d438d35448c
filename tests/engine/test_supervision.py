"""The engine process dies, hangs, is poisoned or orphaned: streams go on with the same tokens, the guilty request alone fails."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from octavo.errors import CheckpointError, EngineDead, Overloaded, RequestFailed
from octavo.frontend.process_client import ProcessClient
from octavo.protocol.engine import FinishReason
from tests.support import scripted_engine as script
from tests.support.engine_client import ROOT, RecordingSink, expected, request, scripted_client
from tests.support.engine_config import tiny_config

SLOW = script.SLOW


async def wait_for(condition: object, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


def kill_engine(client: ProcessClient) -> int:
    pid = client.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


async def test_a_request_gets_its_tokens_and_the_process_ends_with_the_client() -> None:
    async with scripted_client(tiny_config()) as client:
        sink = RecordingSink()
        client.add(request("a", [5, 6]), sink)
        await sink.done()
        assert sink.tokens == {0: expected([5, 6])}
        assert sink.finish == {0: FinishReason.LENGTH}
        assert client.num_requests == 0
        pid = client.engine_pid
        assert pid is not None
    assert not psutil.pid_exists(pid)


async def test_killed_in_mid_stream_every_stream_goes_on_with_the_same_tokens() -> None:
    async with scripted_client(tiny_config()) as client:
        prompts = [[SLOW, i] for i in range(1, 6)]
        sinks = [RecordingSink(str(i)) for i in range(len(prompts))]
        for i, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
            client.add(request(str(i), prompt, prompt_logprobs=1 if i == 0 else None), sink)
        await sinks[0].until(lambda s: len(s.tokens.get(0, [])) >= 5)
        dead = kill_engine(client)
        await asyncio.gather(*(sink.done() for sink in sinks))
        for prompt, sink in zip(prompts, sinks, strict=True):
            assert sink.error is None
            assert sink.tokens == {0: expected(prompt)}
            assert sink.finish == {0: FinishReason.LENGTH}
        assert sinks[0].prompt_logprobs == 1
        assert client.restarts == 1
        assert client.engine_pid != dead
        assert client.state == "running"


async def test_an_engine_that_is_stopped_while_it_starts_is_said() -> None:
    client = ProcessClient(tiny_config())
    client.spawn()
    pid = client.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(
        EngineDead, match=r"^The engine could not start: the engine process has been stopped for \d+ seconds, by a signal, while it"
    ):
        await asyncio.wait_for(client.start(), 30)
    assert not psutil.pid_exists(pid)


async def test_killed_again_and_again_while_streaming() -> None:
    async with scripted_client(tiny_config(engine_restarts=3)) as client:
        sink = RecordingSink()
        client.add(request("a", [SLOW, 3], max_tokens=60), sink)
        for tokens in (10, 25, 40):
            await sink.until(lambda s, n=tokens: len(s.tokens.get(0, [])) >= n)  # type: ignore[misc]
            kill_engine(client)
        await sink.done()
        assert sink.error is None
        assert sink.tokens == {0: expected([SLOW, 3], 60)}
        assert client.restarts == 3


async def test_counters_never_run_backwards() -> None:
    async with scripted_client(tiny_config()) as client:
        steps: list[int] = []
        client.on_stats = lambda stats: steps.append(stats.step)
        sink = RecordingSink()
        client.add(request("a", [SLOW, 1], max_tokens=20), sink)
        await sink.until(lambda s: len(s.tokens.get(0, [])) >= 10)
        kill_engine(client)
        await sink.done()
        assert steps == sorted(steps)
        assert client.stats().step >= 20


async def test_siblings_are_replayed_one_by_one() -> None:
    async with scripted_client(tiny_config()) as client:
        sink = RecordingSink()
        client.add(request("a", [SLOW, 9], n=3, prompt_logprobs=0), sink)
        await sink.until(lambda s: len(s.tokens.get(2, [])) >= 4)
        client.abort("a", 1)
        before = len(sink.tokens[1])
        kill_engine(client)
        await sink.until(lambda s: {0, 2} <= s.finish.keys())
        assert sink.tokens[0] == expected([SLOW, 9], index=0)
        assert sink.tokens[2] == expected([SLOW, 9], index=2)
        assert len(sink.tokens[1]) == before
        assert sink.prompt_logprobs == 1
        assert client.num_requests == 0


def write_over(path: Path) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(500)
        file.write(bytes(500))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def put_another(path: Path) -> None:
    status = path.stat()
    other = path.with_name("other")
    shutil.copy(path, other)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [write_over, put_another, Path.unlink])
@pytest.mark.parametrize("stored", ["model.gguf", "folder/model.safetensors"])
async def test_other_weights_are_not_loaded_behind_the_old_tokenizer(
    tmp_path: Path, stored: str, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / stored
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(os.urandom(1000))
    config = tiny_config()
    model = path if path.suffix == ".gguf" else path.parent
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(model)))
    async with scripted_client(config) as client:
        first, second = RecordingSink("first"), RecordingSink("second")
        client.add(request("first", [SLOW, 1]), first)
        await first.until(lambda s: bool(s.tokens))
        kill_engine(client)
        await first.done()
        assert first.tokens == {0: expected([SLOW, 1])}, "files as they were: it goes on"
        client.add(request("second", [SLOW, 1]), second)
        await second.until(lambda s: bool(s.tokens))
        change(path)
        kill_engine(client)
        await second.done()
        assert isinstance(second.error, EngineDead)
        done = "removed" if change is Path.unlink else "changed"
        assert f"{path} was {done} while the server ran" in str(second.error) and "Restart the server" in str(second.error)
        assert client.state == "dead" and client.engine_pid is None and client.restarts == 1
        assert len([r for r in caplog.records if str(path) in r.getMessage()]) == 1


async def test_requests_that_arrive_during_a_restart_wait_for_it() -> None:
    async with scripted_client(tiny_config()) as client:
        first = RecordingSink()
        client.add(request("a", [SLOW, 1]), first)
        await first.until(lambda s: bool(s.tokens))
        kill_engine(client)
        await wait_for(lambda: client.state == "restarting")
        late, gone = RecordingSink(), RecordingSink()
        client.add(request("b", [2]), late)
        client.add(request("c", [3]), gone)
        client.abort("c")
        await asyncio.gather(first.done(), late.done())
        assert late.tokens == {0: expected([2])}
        assert first.tokens == {0: expected([SLOW, 1])}
        assert gone.tokens == {}


async def test_a_hung_engine_is_killed_and_the_others_go_on() -> None:
    async with scripted_client(tiny_config(engine_hang_timeout=0.5)) as client:
        good, bad = RecordingSink("good"), RecordingSink("bad")
        client.add(request("good", [SLOW, 4], max_tokens=20), good)
        await good.until(lambda s: bool(s.tokens))
        client.add(request("bad", [script.HANG]), bad)
        await asyncio.gather(good.done(), bad.done())
        assert good.error is None
        assert good.tokens == {0: expected([SLOW, 4], 20)}
        assert isinstance(bad.error, RequestFailed)
        assert "bad" in str(bad.error)
        assert "hung" in str(bad.error)


async def test_an_engine_that_a_signal_has_stopped_is_noticed_long_before_it_counts_as_hung(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.frontend.process_client.STOPPED_SECONDS", 1.0)
    async with scripted_client(tiny_config(engine_hang_timeout=300.0)) as client:
        assert client.engine_pid is not None
        process = psutil.Process(client.engine_pid)
        process.suspend()
        await asyncio.sleep(3.0)
        assert client.restarts == 0  # nobody waits for it
        process.resume()
        sink = RecordingSink()
        client.add(request("a", [SLOW, 6]), sink)
        await sink.until(lambda s: len(s.tokens.get(0, [])) >= 3)
        process.suspend()
        await sink.done()
        assert sink.tokens == {0: expected([SLOW, 6])}
        assert client.restarts == 1
        assert "has been stopped for" in caplog.text
        assert not process.is_running()


async def test_an_idle_engine_is_not_taken_for_hung() -> None:
    async with scripted_client(tiny_config(engine_hang_timeout=0.3)) as client:
        pid = client.engine_pid
        await asyncio.sleep(0.8)
        assert client.last_step_age() == 0.0
        sink = RecordingSink()
        client.add(request("a", [1]), sink)
        await sink.done()
        assert (client.engine_pid, client.restarts) == (pid, 0)


async def test_no_step_for_too_long_although_the_loop_turns_is_a_hang() -> None:
    async with scripted_client(tiny_config(engine_hang_timeout=0.4, engine_restarts=0)) as client:
        sink = RecordingSink("stuck")
        client.add(request("stuck", [script.STUCK]), sink)
        await sink.done()
        assert isinstance(sink.error, EngineDead)
        assert client.state == "dead"


@pytest.mark.parametrize("poison", [script.POISON, script.POISON_AT_3])
async def test_a_poison_request_alone_is_failed_after_two_crashes(poison: int) -> None:
    async with scripted_client(tiny_config()) as client:
        sink = RecordingSink("evil")
        client.add(request("evil#1", [poison]), sink)
        await sink.done()
        assert isinstance(sink.error, RequestFailed)
        assert "Request evil " in str(sink.error)
        await wait_for(lambda: client.state == "running")
        assert client.restarts == 2
        after = RecordingSink()
        client.add(request("a", [1]), after)
        await after.done()
        assert after.tokens == {0: expected([1])}


@pytest.mark.parametrize("poison", [script.POISON, script.POISON_AT_3])
async def test_a_poison_request_among_others_is_found_and_the_others_lose_nothing(poison: int) -> None:
    async with scripted_client(tiny_config(engine_restarts=3)) as client:
        prompts = {f"good{i}": [20 + i] for i in range(6)}
        sinks = {name: RecordingSink(name) for name in [*prompts, "evil", "late"]}
        for name in list(prompts)[:3]:
            client.add(request(name, prompts[name]), sinks[name])
        client.add(request("evil", [poison]), sinks["evil"])
        for name in list(prompts)[3:]:
            client.add(request(name, prompts[name]), sinks[name])
        await wait_for(lambda: client.restarts >= 2)
        client.add(request("late", [77]), sinks["late"])
        prompts["late"] = [77]
        await asyncio.gather(*(sink.done() for sink in sinks.values()))
        assert isinstance(sinks["evil"].error, RequestFailed)
        for name, prompt in prompts.items():
            assert sinks[name].error is None, name
            assert sinks[name].tokens == {0: expected(prompt)}, name
        assert client.state == "running"
        assert client.restarts <= 3


async def test_crashes_without_a_cause_end_in_engine_dead() -> None:
    async with scripted_client(tiny_config(engine_restarts=2), suspect_after=99) as client:
        sink = RecordingSink()
        client.add(request("a", [SLOW, 1], max_tokens=200), sink)
        for restarts in range(3):
            await wait_for(lambda n=restarts: client.state == "running" and client.restarts == n)  # type: ignore[misc]
            kill_engine(client)
        await sink.done()
        assert isinstance(sink.error, EngineDead)
        assert "SIGKILL" in str(sink.error)
        assert client.state == "dead"
        with pytest.raises(EngineDead):
            client.add(request("b", [1]), RecordingSink())
        with pytest.raises(EngineDead):
            await client.ping()


@pytest.mark.parametrize(
    ("builder", "words"),
    [
        ("build_once", "gone: the engine process ended with exit code 78 while it started; it failed 3 times in 10 minutes, so"),
        ("build_once_then_refuses", "gone: model.safetensors is truncated: .* the end of the file; it failed 3 times in 10 minutes, so"),
    ],
)
async def test_an_engine_that_does_not_come_back_ends_in_engine_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builder: str, words: str
) -> None:
    monkeypatch.setenv("OCTAVO_TEST_MARKER", str(tmp_path / "marker"))
    config = tiny_config(engine_restarts=2)
    async with scripted_client(config, builder=f"tests.support.scripted_engine:{builder}") as client:
        sink = RecordingSink()
        client.add(request("a", [SLOW, 1]), sink)
        await sink.until(lambda s: bool(s.tokens))
        kill_engine(client)
        await sink.done()
        assert isinstance(sink.error, EngineDead)
        assert re.search(words, str(sink.error))
        assert client.state == "dead"


@pytest.mark.parametrize(
    ("builder", "error", "words"),
    [
        ("build_refuses", CheckpointError, "lm_head.weight"),
        ("build_raises", EngineDead, "boom"),
        ("build_dies", EngineDead, "exit code 77"),
    ],
)
async def test_an_engine_that_cannot_start_says_why(builder: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        async with scripted_client(tiny_config(), builder=f"tests.support.scripted_engine:{builder}"):
            pass


async def test_progress_reaches_the_parent() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(ROOT) / "src"), ROOT])  # and what later tests start is this tree too
    client = ProcessClient(tiny_config(), builder="tests.support.scripted_engine:build")
    seen: list[tuple[str, int, int]] = []
    try:
        ready = await client.start(lambda *progress: seen.append(progress))
        assert seen == [("weights", 0, 2), ("weights", 1, 2), ("weights", 2, 2)]
        assert ready.pid == client.engine_pid
    finally:
        await client.close()


async def test_a_failed_request_is_alone_in_that() -> None:
    async with scripted_client(tiny_config()) as client:
        bad, good = RecordingSink(), RecordingSink()
        client.add(request("bad", [script.FAIL]), bad)
        client.add(request("good", [8]), good)
        await asyncio.gather(bad.done(), good.done())
        assert bad.finish == {0: FinishReason.ERROR}
        assert good.tokens == {0: expected([8])}
        assert client.restarts == 0


async def test_abort_ends_the_tokens_and_frees_the_place() -> None:
    async with scripted_client(tiny_config()) as client:
        sink = RecordingSink()
        client.add(request("a", [SLOW, 1], max_tokens=300), sink)
        await sink.until(lambda s: bool(s.tokens))
        client.abort("a")
        client.abort("a")
        client.abort("nobody")
        seen = len(sink.tokens[0])
        await wait_for(lambda: client.stats().running == 0)
        assert len(sink.tokens[0]) == seen
        assert client.num_requests == 0


async def test_the_queue_is_bounded() -> None:
    async with scripted_client(tiny_config(max_num_seqs=2, max_waiting=3)) as client:
        for i in range(5):
            client.add(request(str(i), [SLOW, 1], max_tokens=200), RecordingSink())
        with pytest.raises(Overloaded) as full:
            client.add(request("6", [1]), RecordingSink())
        assert full.value.retry_after >= 1.0
        client.add(request("inner", [1]), RecordingSink(), bounded=False)
        client.abort("0")
        client.abort("1")
        client.add(request("7", [1]), RecordingSink())


async def test_ping_and_reset_answer_from_the_loop() -> None:
    async with scripted_client(tiny_config()) as client:
        assert (await client.ping()).step == 0
        assert await client.reset_prefix_cache() is True
        sink = RecordingSink()
        client.add(request("a", [SLOW, 1], max_tokens=300), sink)
        await sink.until(lambda s: bool(s.tokens))
        assert await client.reset_prefix_cache() is False
        assert (await client.ping()).step > 0


async def test_a_sink_that_raises_fails_alone() -> None:
    class Broken(RecordingSink):
        def on_delta(self, delta: object) -> None:
            raise ValueError("broken text")

    async with scripted_client(tiny_config()) as client:
        broken, good = Broken(), RecordingSink()
        client.add(request("broken", [1]), broken)
        client.add(request("good", [2]), good)
        await asyncio.gather(broken.done(), good.done())
        assert isinstance(broken.error, RequestFailed)
        assert good.tokens == {0: expected([2])}


async def test_close_fails_what_is_live() -> None:
    sink = RecordingSink()
    async with scripted_client(tiny_config()) as client:
        client.add(request("a", [SLOW, 1], max_tokens=300), sink)
        await sink.until(lambda s: bool(s.tokens))
    assert isinstance(sink.error, EngineDead)


async def test_sigterm_ends_the_engine_cleanly_and_sigint_does_not() -> None:
    async with scripted_client(tiny_config()) as client:
        process = psutil.Process(client.engine_pid)
        process.send_signal(signal.SIGINT)
        sink = RecordingSink()
        client.add(request("a", [1]), sink)
        await sink.done()
        assert sink.tokens == {0: expected([1])}
        assert client.restarts == 0
        process.terminate()
        await wait_for(lambda: client.restarts == 1 and client.state == "running")


PARENT = """
import asyncio, os, sys
from octavo.frontend.process_client import ProcessClient
from tests.support.engine_config import tiny_config

async def main():
    client = ProcessClient(tiny_config(), builder="tests.support.scripted_engine:build")
    await client.start()
    print(client.engine_pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_dies_with_its_parent_and_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    folder = str(tmp_path)
    environment = {**os.environ, "TMPDIR": folder, "PYTHONPATH": os.pathsep.join([str(Path(ROOT) / "src"), ROOT])}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment, cwd="/") as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not [path for path in os.listdir(folder) if path.startswith("octavo-")]
        engine = psutil.Process(pid)
        parent.send_signal(how)
        parent.wait(10)
    deadline = time.monotonic() + 10
    with contextlib.suppress(psutil.NoSuchProcess):
        while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
