"""Ranks in processes: one is killed, cannot load, is stopped, or outlives nobody."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from octavo.config.args import EngineArgs
from octavo.errors import ConfigError
from tests.support.tiny_models import save_tiny

PROMPT = {"prompt_token_ids": [5, 6, 7]}
LONG = SamplingParams(max_tokens=200, temperature=0.8, seed=3, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    save_tiny(folder, "llama", max_position_embeddings=512)
    return {
        "model": str(folder), "device": "cpu", "threads": 1, "skip_tokenizer_init": True, "num_gpu_blocks_override": 64, "max_num_seqs": 4,
        "tensor_parallel_size": 2, **more,
    }  # fmt: skip


@asynccontextmanager
async def engine(folder: Path, **more: Any) -> AsyncIterator[AsyncLLM]:
    async with await AsyncLLM.start(EngineArgs(**settings(folder, **more))) as llm:
        yield llm


def ranks(llm: AsyncLLM) -> list[psutil.Process]:
    """The processes of the ranks but the first."""
    assert llm.engine_pid is not None
    return psutil.Process(llm.engine_pid).children()


async def tokens(stream: AsyncIterator[Any], at: dict[int, Any] | None = None) -> list[int]:
    """All tokens of a stream; `at` has what to do once there are that many."""
    got: list[int] = []
    waiting = dict(at or {})
    async for output in stream:
        got += output.outputs[0].token_ids
        for count in [c for c in waiting if len(got) >= c]:
            waiting.pop(count)()
    return got


async def test_a_killed_rank_is_a_pause_for_streams(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with engine(tmp_path) as llm:
        whole = await tokens(llm.generate(PROMPT, LONG, "before"))
        (rank,) = ranks(llm)
        first = llm.engine_pid
        again = await tokens(llm.generate(PROMPT, LONG, "after"), {20: rank.kill})
        assert again == whole
        async with asyncio.timeout(60):  # on a busy machine all tokens may have been there before it was killed
            while llm.engine_pid in (None, first):
                await asyncio.sleep(0.1)
        assert "Rank 1 was ended by SIGKILL" in caplog.text
        new = ranks(llm)
    assert not any(process.is_running() for process in [rank, *new])


async def test_a_stopped_rank_is_noticed_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with engine(tmp_path, engine_hang_timeout=4.0) as llm:
        whole = await tokens(llm.generate(PROMPT, LONG, "before"))
        (rank,) = ranks(llm)
        began = time.monotonic()
        again = await tokens(llm.generate(PROMPT, LONG, "after"), {20: rank.suspend})
        assert again == whole
        assert time.monotonic() - began < 30
        assert "A step has not been finished for" in caplog.text
        assert f"rank 1 (process {rank.pid}) is stopped" in caplog.text
    assert not rank.is_running()


async def test_a_stopped_rank_is_noticed_long_before_its_steps_count_as_hung(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with engine(tmp_path) as llm:
        whole = await tokens(llm.generate(PROMPT, LONG, "before"))
        (rank,) = ranks(llm)
        assert await tokens(llm.generate(PROMPT, LONG, "after"), {20: rank.suspend}) == whole
        async with asyncio.timeout(60):  # on a busy machine all tokens may have been there before it was stopped
            while f"Rank 1 (process {rank.pid}) has been stopped for " not in caplog.text:
                await asyncio.sleep(0.1)
    assert not rank.is_running()


async def test_no_rank_outlives_the_engine(tmp_path: Path) -> None:
    async with engine(tmp_path) as llm:
        (rank,) = ranks(llm)
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)
        await asyncio.to_thread(rank.wait, 10)


@pytest.mark.parametrize("loss", ["kill", "suspend"])
def test_offline_the_requests_under_way_fail_with_the_reason_and_nobody_waits(tmp_path: Path, loss: str) -> None:
    with LLM(**settings(tmp_path)) as llm:
        (rank,) = [child for child in psutil.Process().children() if "octavo.engine.rank" in child.cmdline()]
        timer = threading.Timer(0.5, getattr(rank, loss))
        timer.start()
        outputs = llm.generate([PROMPT] * 4, SamplingParams(max_tokens=500, ignore_eos=True, temperature=0))
        timer.join()
        if all(output.outputs[0].finish_reason == "length" for output in outputs):  # quicker than the timer
            outputs = llm.generate([PROMPT] * 4, SamplingParams(max_tokens=500, ignore_eos=True, temperature=0))
    assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
    assert not rank.is_running()


LOSES_A_RANK = """
import os, psutil, signal, sys, threading
from octavo import LLM, SamplingParams
from octavo.errors import EngineDead

with LLM(**{settings}) as llm:
    (rank,) = [child for child in psutil.Process().children() if "octavo.engine.rank" in child.cmdline()]
    threading.Timer(0.3, rank.kill).start()
    prompts = [{{"prompt_token_ids": [5, 6, 7]}}] * 40
    outputs = llm.generate(prompts, SamplingParams(max_tokens=500, ignore_eos=True, temperature=0))
    assert {{o.outputs[0].finish_reason for o in outputs}} >= {{"error"}}, outputs[-1]
    assert "Rank 1 was ended by SIGKILL" in outputs[-1].outputs[0].error
    for _ in range(2):
        try:
            llm.generate(prompts)
        except EngineDead as e:
            print(e)
"""


@pytest.mark.parametrize("debug", [False, True])
def test_offline_a_killed_rank_is_one_line_and_later_calls_say_so(tmp_path: Path, debug: bool) -> None:
    program = tmp_path / "program.py"
    program.write_text(LOSES_A_RANK.format(settings=settings(tmp_path)))
    env = {**os.environ, "OCTAVO_DEBUG": "1" if debug else ""}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, check=False, env=env)
    line = "Rank 1 was ended by SIGKILL (often the kernel's way to say that memory ran out)."
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"The engine of this LLM is gone: {line} Make a new one."] * 2
    if debug:
        assert "Traceback" in done.stderr
    else:
        assert done.stderr.splitlines() == [line]


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"tensor_parallel_size": 3}, r"--tensor-parallel-size 3: this LlamaForCausalLM has 4 attention heads.*Possible sizes: 1, 2, 4"),
        ({"tensor_parallel_size": 1, "pipeline_parallel_size": 60}, "--pipeline-parallel-size 60: this LlamaForCausalLM has 2 layers"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_before_a_rank_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr("octavo.executor.rank_ends.start_process", lambda *_: pytest.fail("a rank was started"))
    before = set(psutil.Process().children())  # other tests may leave some that live as long as this process
    with pytest.raises(ConfigError, match=f"^{words}"):  # it is no rank's own complaint
        LLM(**settings(tmp_path, **parallel))
    assert not set(psutil.Process().children()) - before


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tensor_parallel_size": 0}, "tensor-parallel-size"),
        ({"tensor_parallel_size": 65}, "at most 64 processes on a CPU"),
        ({"pipeline_parallel_size": 3, "tensor_parallel_size": 1}, "--pipeline-parallel-size 3: this LlamaForCausalLM has 2 layers"),
        ({"distributed_executor_backend": "inline"}, "--distributed-executor-backend inline runs a single rank"),
        ({"cpu_kernels": "native"}, "--cpu-kernels native: they compute whole models"),
        ({"nnodes": 2, "node_rank": 1}, "--node-rank 1: only the first host takes requests"),
        ({"nnodes": 2, "master_addr": "192.0.2.200"}, "--master-addr 192.0.2.200 is not an address of this host"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(**settings(tmp_path, **more))


def test_stages_end_by_themselves_with_steps_under_way(tmp_path: Path) -> None:
    """The other stage is in steps that rank 0 has not begun: it waits for rank 0 in them, and would have to be killed."""
    llm = LLM(**settings(tmp_path, tensor_parallel_size=1, pipeline_parallel_size=2))
    client: Any = llm._client
    params = [SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)] * 4
    turn, executor = client.step, client.core.executor
    turns = 0

    def some_turns(*args: Any) -> Any:
        nonlocal turns
        turns += 1
        if turns > 6 and executor._waiting:
            raise KeyboardInterrupt
        return turn(*args)

    client.step = some_turns
    client.abort_all = lambda: None  # what an engine is told that has no time left
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 4, params)
    assert executor._waiting
    (end,) = executor._ends
    executor.shutdown()
    assert end.process.returncode == 0
    llm.close()


def test_a_program_that_does_not_close_its_llm_ends_well(tmp_path: Path) -> None:
    """Without leave-taking at the end of the interpreter one in four such programs is aborted, after all that it had to say."""
    program = (
        "import sys, json\n"
        "from octavo import LLM, SamplingParams\n"
        "llm = LLM(**json.loads(sys.argv[1]))\n"
        f"out = llm.generate({PROMPT!r}, SamplingParams(max_tokens=5, ignore_eos=True))\n"
        "print(len(out[0].outputs[0].token_ids), len(__import__('psutil').Process().children()))\n"
    )
    given = json.dumps(settings(tmp_path))
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program, given], capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout) == (0, "5 1\n"), done.stderr
        assert "terminate called" not in done.stderr
