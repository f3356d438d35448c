"""Ranks that Ray places, in a cluster of several Ray nodes on this machine: the tokens of one process, and what a loss means."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from octavo.config.args import EngineArgs
from octavo.errors import ConfigError
from tests.support.tiny_models import save_tiny

pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROMPT = {"prompt_token_ids": [5, 6, 7]}
GREEDY = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with room for one rank each. What Ray starts imports octavo from here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "src"))
        patch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
        patch.setenv("RAY_worker_niceness", "0")  # the other tests would go first
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes()
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            cluster.shutdown()


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    save_tiny(folder, "llama", max_position_embeddings=512)
    return {
        "model": str(folder), "device": "cpu", "threads": 1, "skip_tokenizer_init": True, "num_gpu_blocks_override": 64, "max_num_seqs": 4,
        "tensor_parallel_size": 2, "kv_cache_dtype": "float32", "distributed_executor_backend": "ray", "node_timeout": 60.0, **more,
    }  # fmt: skip


def alone(folder: Path) -> list[int]:
    one = settings(folder, tensor_parallel_size=1, distributed_executor_backend=None, cpu_kernels="torch", node_timeout=300.0)
    with LLM(**one) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=300, temperature=0, ignore_eos=True))
    return output.outputs[0].token_ids


async def tokens(stream: AsyncIterator[Any], lose: Any = None) -> list[int]:
    got: list[int] = []
    async for output in stream:
        got += output.outputs[0].token_ids
        if lose is not None and len(got) >= 20:
            lose()
            lose = None
    return got


def cluster_ranks(llm: AsyncLLM) -> list[psutil.Process]:
    """Processes of ranks that this test's Ray nodes, which are our children, have started."""
    engine = llm.engine_pid
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "octavo.engine.rank" in process.cmdline() and engine not in (p.pid for p in process.parents()):
                found.append(process)
    return found


async def test_ranks_of_a_cluster_give_the_tokens_of_one_process_and_are_replaced(cluster: Any, tmp_path: Path) -> None:
    expected = await asyncio.to_thread(alone, tmp_path)
    async with await AsyncLLM.start(EngineArgs(**settings(tmp_path))) as llm:
        first = llm.engine_pid
        assert await tokens(llm.generate(PROMPT, GREEDY, "a")) == expected
        (rank,) = cluster_ranks(llm)
        assert await tokens(llm.generate(PROMPT, GREEDY, "b"), rank.kill) == expected
        assert llm.engine_pid != first
        (rank,) = cluster_ranks(llm)
        assert llm.engine_pid is not None
        assert await tokens(llm.generate(PROMPT, GREEDY, "c"), psutil.Process(llm.engine_pid).kill) == expected
        assert not rank.is_running()
        (rank,) = cluster_ranks(llm)
    await asyncio.to_thread(rank.wait, 20)


async def test_a_cluster_without_room_is_refused_by_the_names_of_its_hosts(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 4: needs 4 CPUs. The Ray cluster has 2: .+ has 1, .+ has 1\."):
        await AsyncLLM.start(EngineArgs(**settings(tmp_path, tensor_parallel_size=4)))


async def test_a_cluster_that_is_in_use_is_waited_for_and_then_refused(cluster: Any, tmp_path: Path) -> None:
    async with await AsyncLLM.start(EngineArgs(**settings(tmp_path))):
        began = time.monotonic()
        with pytest.raises(ConfigError, match=r"did not give 2 CPUs to this model within 3 s.*0 are free now"):
            await AsyncLLM.start(EngineArgs(**settings(tmp_path, node_timeout=3.0)))
        assert time.monotonic() - began < 30


async def test_an_address_without_a_cluster_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=127\.0\.0\.1:1: no Ray cluster answers there"):
        await AsyncLLM.start(EngineArgs(**settings(tmp_path)))
