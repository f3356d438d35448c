"""Several engines behind one `AsyncLLM` and behind API servers: who gets what, and what a dead one means."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from octavo import LLM, AsyncLLM, BeamSearchParams, RequestOutput, RequestOutputKind, SamplingParams
from octavo.errors import ConfigError, EngineDead, OctavoError
from octavo.frontend.replicas import ReplicasClient, make_client
from tests.support.engine_client import ROOT
from tests.support.engine_config import tiny_config
from tests.support.scripts import scripted_args, token_ids
from tests.support.tiny_models import save_tiny

DELTA = RequestOutputKind.DELTA
RULES = [
    {"prompt_contains_ids": token_ids("slow"), "tokens": token_ids("abcde"), "cycle": True, "delay_ms": 10},
    {"prompt_contains_ids": token_ids("poison"), "tokens": token_ids("xyz"), "fail": {"at_output": 0, "how": "exit"}},
]


@asynccontextmanager
async def replicas(folder: Path, count: int = 2, **settings: Any) -> AsyncIterator[tuple[AsyncLLM, ReplicasClient]]:
    args = scripted_args(folder, default="Hello", rules=RULES, data_parallel_size=count, **settings)
    async with await AsyncLLM.start(args) as llm:
        yield llm, cast("ReplicasClient", llm._client)


async def text(stream: AsyncIterator[RequestOutput]) -> str:
    return "".join([o.text async for output in stream for o in output.outputs])


def alive(client: ReplicasClient) -> list[int]:
    return [client.num_requests_of(i) for i in range(len(client.engine_pids))]


async def test_requests_are_spread_and_results_are_whole(tmp_path: Path) -> None:
    async with replicas(tmp_path, 3) as (llm, client):
        streams = [
            asyncio.create_task(text(llm.generate(f"slow {i}", SamplingParams(max_tokens=50, output_kind=DELTA), f"r{i}")))
            for i in range(9)
        ]
        async with asyncio.timeout(10):
            while alive(client) != [3, 3, 3]:
                await asyncio.sleep(0.01)
        assert len(set(await asyncio.gather(*streams))) == 1
        assert alive(client) == [0, 0, 0]
        assert [load.sequences for load in client._router.loads] == [0, 0, 0]
        stats = await llm.ping()
        assert (stats.generation_tokens, stats.replicas) == (9 * 50, 3)
        pids = client.engine_pids
    assert not any(psutil.pid_exists(pid) for pid in pids if pid is not None)


async def test_a_killed_replica_is_a_pause_for_its_streams_and_nothing_for_the_others(tmp_path: Path) -> None:
    async with replicas(tmp_path) as (llm, client):
        long = SamplingParams(max_tokens=300, output_kind=DELTA)
        streams = [asyncio.create_task(text(llm.generate(f"slow {i}", long, f"r{i}"))) for i in range(4)]
        await asyncio.sleep(0.5)
        dead, other = client.engine_pids
        assert dead is not None
        os.kill(dead, signal.SIGKILL)
        assert await asyncio.wait_for(text(llm.generate("hi", SamplingParams(max_tokens=20, output_kind=DELTA), "new")), 20) == "Hello"
        results = await asyncio.gather(*streams)
        assert results == ["abcde" * 60] * 4
        assert client.engine_pids[1] == other
        assert client.engine_pids[0] != dead
        assert (llm.restarts, llm.state) == (1, "running")


async def test_streams_of_a_replica_that_is_given_up_go_on_with_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with replicas(tmp_path, engine_restarts=0) as (llm, client):
        whole = (llm.ready_report.num_blocks, llm.ready_report.device)
        long = SamplingParams(max_tokens=300, output_kind=DELTA)
        streams = [asyncio.create_task(text(llm.generate(f"slow {i}", long, f"r{i}"))) for i in range(6)]
        await asyncio.sleep(0.5)
        assert alive(client) == [3, 3]
        dead, other = client.engine_pids
        assert dead is not None and other is not None
        os.kill(dead, signal.SIGKILL)
        assert await asyncio.gather(*streams) == ["abcde" * 60] * 6
        assert "Replica 0: the engine process was ended by SIGKILL" in caplog.text
        assert "1 of 2 replicas are left; 3 requests go on there" in caplog.text
        assert (alive(client), [load.sequences for load in client._router.loads]) == ([0, 0], [0, 0])
        stats = await llm.ping()
        assert (stats.running, stats.kv_blocks_used, stats.kv_blocks_total) == (0, 0, client._clients[1].stats().kv_blocks_total)
        assert stats.replicas == 1
        assert stats.generation_tokens >= 6 * 300 - 6  # what was computed and not delivered is computed again
        assert llm.ready_report.num_blocks == whole[0] // 2
        assert llm.ready_report.device == whole[1].replace("2 replicas", "1 of 2 replicas")
        llm.check_health()
        last = [asyncio.create_task(text(llm.generate("slow", long, f"last {i}"))) for i in range(2)]
        await asyncio.sleep(0.3)
        os.kill(other, signal.SIGKILL)
        for stream in last:
            with pytest.raises(EngineDead, match="restarts are off"):
                await stream
        with pytest.raises(EngineDead):
            llm.check_health()


async def test_a_replica_that_cannot_start_is_named(tmp_path: Path) -> None:
    llm = AsyncLLM.from_engine_args(scripted_args(tmp_path, default="Hello", data_parallel_size=3))
    killed = cast("ReplicasClient", llm._client).engine_pids[1]
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"^Replica 1: The engine could not start: the engine process was ended by SIGKILL"):
        await llm.wait_ready()
    await llm.shutdown()


@pytest.mark.parametrize(
    ("builder", "words"),
    [("build_refuses", "^model.safetensors is truncated"), ("build_dies", "^Replica [01]: The engine could not start")],
)
async def test_what_is_wrong_with_the_model_is_not_a_replicas_fault(builder: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(ROOT) / "src"), ROOT]))
    client = make_client(tiny_config(data_parallel_size=2), builder=f"tests.support.scripted_engine:{builder}")
    with pytest.raises(OctavoError, match=words):
        await client.start()


async def test_a_request_that_ends_engines_fails_alone(tmp_path: Path) -> None:
    async with replicas(tmp_path) as (llm, _):
        with pytest.raises(Exception, match="engine"):
            await text(llm.generate("poison", SamplingParams(max_tokens=5), "bad"))
        assert await text(llm.generate("hi", SamplingParams(max_tokens=20, output_kind=DELTA), "good")) == "Hello"


async def test_aborted_requests_and_beams_leave_nothing(tmp_path: Path) -> None:
    async with replicas(tmp_path) as (llm, client):
        task = asyncio.create_task(text(llm.generate("slow", SamplingParams(max_tokens=5000), "gone")))
        await asyncio.sleep(0.3)
        await llm.abort("gone")
        await asyncio.gather(task, return_exceptions=True)
        output = await llm.beam_search("hi", BeamSearchParams(beam_width=2, max_tokens=4))
        assert len(output.outputs) == 2
        assert client._home == {}
        assert [load.sequences for load in client._router.loads] == [0, 0]
        stats = await llm.ping()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)


async def test_a_repeated_prompt_finds_its_cache(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", max_position_embeddings=512)
    from octavo.config.args import EngineArgs

    args = EngineArgs(
        model=str(tmp_path),
        device="cpu",
        threads=2,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=64,
        max_num_seqs=4,
        data_parallel_size=2,
    )
    prompts = [[i] * 200 for i in range(3, 7)]
    async with await AsyncLLM.start(args) as llm:
        cached = []
        for turn in range(2):
            for i, ids in enumerate(prompts):
                async for output in llm.generate({"prompt_token_ids": [*ids, turn]}, SamplingParams(max_tokens=2), f"{turn}-{i}"):
                    last = output
                cached.append(last.num_cached_tokens or 0)
        assert cached[:4] == [0] * 4
        assert all(count >= 192 for count in cached[4:])
        assert len(set(cast("ReplicasClient", llm._client).engine_pids)) == 2


def test_offline_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data-parallel-size: LLM has one replica"):
        LLM(**vars(scripted_args(tmp_path, data_parallel_size=2)))
