"""A model on several ranks gives what it gives on one: by ranks of a layer, by stages, by experts, with and without graphs; replicas; and
ranks that are killed or stopped. Where there are fewer GPUs than ranks, these share them (`parallel/shared_gpu.py`): no case for NCCL."""

from __future__ import annotations

import asyncio
import functools
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.config.args import EngineArgs
from tests.support.tiny_models import save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

T = TypeVar("T")

PROMPTS = [
    {"prompt_token_ids": torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist()}
    for n in (3, 40, 21, 7, 60, 1, 12)
]
LENGTHS = (24, 9, 24, 17, 2, 30, 24)
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
SIZES["max_position_embeddings"] = 4096
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", SIZES),
    "experts": ("mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
AWQ = Path(__file__).parents[1] / "fixtures" / "quantized" / "auto_awq"
TENSOR, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.fixture(autouse=True)
def shared_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_SHARE_GPUS", "1")


def shared(ranks: int = 2) -> bool:
    return torch.cuda.device_count() < ranks


@functools.cache
def model(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"octavo-{name}-"))
    family, sizes = MODELS[name]
    save_tiny(folder, family, **sizes)
    return folder


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(folder), "dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 256, "max_num_seqs": 8,
        "max_model_len": 128, **more,
    }  # fmt: skip


def tokens(folder: Path, **more: Any) -> list[list[int]]:
    with LLM(**settings(folder, **more)) as llm:
        params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in LENGTHS]
        outputs = llm.generate(PROMPTS, params)
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    return [output.outputs[0].token_ids for output in outputs]


@functools.cache
def of_one(name: str, dtype: str = "float32", *, eager: bool = False) -> list[list[int]]:
    return tokens(model(name), dtype=dtype, enforce_eager=eager)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("parallel", [TENSOR, STAGES])
def test_two_ranks_give_the_tokens_of_one(parallel: dict[str, Any], eager: bool) -> None:
    assert tokens(model("dense"), enforce_eager=eager, **parallel) == of_one("dense", eager=eager)


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("dense", {**TENSOR, **STAGES}),
        ("experts", TENSOR),
        ("experts", {**TENSOR, "enable_expert_parallel": True}),
        ("dense", {**TENSOR, "disable_custom_all_reduce": True}),
    ],
)
def test_ranks_with_captured_steps_give_the_tokens_of_one(name: str, parallel: dict[str, Any]) -> None:
    assert tokens(model(name), **parallel) == of_one(name)


@pytest.mark.parametrize("parallel", [TENSOR, STAGES])
def test_in_bfloat16_ranks_give_nearly_what_one_gives(parallel: dict[str, Any]) -> None:
    """Stages compute with the kernels of one rank in the same order; ranks of a layer add up in another."""
    expected, got = of_one("dense", "bfloat16"), tokens(model("dense"), dtype="bfloat16", **parallel)
    if "pipeline_parallel_size" in parallel:
        assert got == expected
    else:
        assert [len(found) for found in got] == list(LENGTHS)
        assert sum(a[:4] == b[:4] for a, b in zip(got, expected, strict=True)) >= 4, (got, expected)


def test_a_low_bit_checkpoint_is_divided() -> None:
    ids = torch.randint(3, 270, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=1)
    found = []
    for parallel in ({}, TENSOR):
        with LLM(**settings(AWQ, dtype="bfloat16", **parallel)) as llm:
            (output,) = llm.generate({"prompt_token_ids": ids}, params)
            assert "4-bit groups" in llm.ready_report.weights_kinds
        assert output.prompt_logprobs is not None and len(output.outputs[0].token_ids) == 8
        found.append(torch.tensor([row[t].logprob for t, row in zip(ids[1:], output.prompt_logprobs[1:], strict=True) if row is not None]))
    assert float((found[0] - found[1]).abs().mean()) < 0.1


def together(work: Callable[[AsyncLLM], Awaitable[T]], **more: Any) -> T:
    """What `work` gives with an engine of its own process."""

    async def run() -> T:
        async with await AsyncLLM.start(EngineArgs(**settings(model("dense"), **more))) as llm:
            return await work(llm)

    return asyncio.run(run())


def test_small_sums_go_through_symmetric_memory_and_it_is_said() -> None:
    async def said(llm: AsyncLLM) -> str:
        return llm.ready_report.sums

    otherwise = "the shared GPU's memory" if shared() else "NCCL"
    words = together(said, **TENSOR)
    assert words.startswith("symmetric memory")
    assert f", {otherwise} above; self-test passed in " in words
    if torch.cuda.get_device_capability() == (9, 0):
        assert "; with the norm behind it in one kernel up to " in words
    off = together(said, **TENSOR, disable_custom_all_reduce=True)
    assert off == f"{otherwise} for all sizes: turned off by --disable-custom-all-reduce or --batch-invariant"


def test_replicas_are_on_gpus_of_their_own_or_share_one() -> None:
    gpus = min(2, torch.cuda.device_count())
    before = [torch.cuda.mem_get_info(i)[0] for i in range(gpus)]

    async def first_tokens(llm: AsyncLLM) -> list[list[int]]:
        taken = [free - torch.cuda.mem_get_info(i)[0] for i, free in enumerate(before)]
        assert shared() or min(taken) > 0.5 * max(taken) > 0
        got = []
        for number, prompt in enumerate(PROMPTS[:4]):
            async for output in llm.generate(prompt, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True), str(number)):
                last = output
            got.append(list(last.outputs[0].token_ids))
        return got

    assert together(first_tokens, data_parallel_size=2) == [found[:2] for found in of_one("dense")[:4]]


def rank_processes(parent: int | None) -> list[psutil.Process]:
    return [child for child in psutil.Process(parent).children() if "octavo.engine.rank" in child.cmdline()]


@pytest.mark.parametrize(("parallel", "loss"), [(TENSOR, "kill"), (TENSOR, "suspend"), (STAGES, "kill")])
def test_offline_requests_fail_with_the_reason_when_a_rank_is_lost_and_a_new_engine_works(parallel: dict[str, Any], loss: str) -> None:
    """The first engine's kernels wait for a rank that will not come: they have to be ended, or everything here waits for ever."""
    with LLM(**settings(model("dense"), **parallel, max_model_len=2048, num_gpu_blocks_override=600)) as llm:
        (rank,) = rank_processes(None)
        timer = threading.Timer(1.0, getattr(rank, loss))
        timer.start()
        began = time.monotonic()
        outputs = llm.generate(PROMPTS[:4], SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True))
        timer.join()
        assert time.monotonic() - began < 40
        assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
    assert not rank.is_running()
    if loss == "kill":
        assert tokens(model("dense"), **parallel) == of_one("dense")


@pytest.mark.parametrize("loss", ["kill", "suspend"])
def test_a_lost_rank_is_a_pause_for_streams(loss: str, caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=400, temperature=0.8, seed=3, ignore_eos=True)

    async def stream(llm: AsyncLLM, name: str, then: Callable[[], object] | None = None) -> list[int]:
        async for output in llm.generate(PROMPTS[1], params, name):
            if then is not None and len(output.outputs[0].token_ids) >= 20:
                then()
                then = None
        return list(output.outputs[0].token_ids)

    async def twice(llm: AsyncLLM) -> psutil.Process:
        whole = await stream(llm, "before")
        (rank,) = rank_processes(llm.engine_pid)
        async with asyncio.timeout(120):
            assert await stream(llm, "after", getattr(rank, loss)) == whole
        return rank

    rank = together(twice, **TENSOR, max_model_len=512)
    assert ("Rank 1 was ended by SIGKILL" if loss == "kill" else "has been stopped for ") in caplog.text
    assert not rank.is_running()
