"""A model on two GPUs gives what it gives on one: by ranks of a layer, by stages, with and without graphs; and replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, AsyncLLM, RequestOutput, SamplingParams
from octavo.config.args import EngineArgs
from tests.support.tiny_models import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 NVIDIA GPUs, there are {torch.cuda.device_count()}"),
]

PROMPTS = [{"prompt_token_ids": torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist()} for n in (3, 40, 21, 7)]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(folder), "dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 256, "max_num_seqs": 8,
        "max_model_len": 128, **more,
    }  # fmt: skip


def tokens(folder: Path, **more: Any) -> list[list[int]]:
    with LLM(**settings(folder, **more)) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("parallel", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_two_gpus_give_the_tokens_of_one(tmp_path: Path, parallel: dict[str, Any], eager: bool) -> None:
    save_tiny(tmp_path, "qwen3", **SIZES)
    assert tokens(tmp_path, enforce_eager=eager, **parallel) == tokens(tmp_path, enforce_eager=eager)


@pytest.mark.parametrize("parallel", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_two_gpus_with_captured_steps_give_nearly_what_one_gives(tmp_path: Path, parallel: dict[str, Any]) -> None:
    """Stages compute with the kernels of one rank in the same order; ranks of a layer add up in another."""
    save_tiny(tmp_path, "qwen3", **SIZES)
    expected, got = tokens(tmp_path, dtype="bfloat16"), tokens(tmp_path, dtype="bfloat16", **parallel)
    if "pipeline_parallel_size" in parallel:
        assert got == expected
    else:
        assert [len(found) for found in got] == [24] * len(PROMPTS)
        assert sum(a[:4] == b[:4] for a, b in zip(got, expected, strict=True)) >= 2, (got, expected)


def test_small_sums_go_through_symmetric_memory_and_change_nothing(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", **SIZES)
    assert tokens(tmp_path, tensor_parallel_size=2) == tokens(tmp_path, tensor_parallel_size=2, disable_custom_all_reduce=True)

    async def words(off: bool) -> str:
        args = EngineArgs(**settings(tmp_path, tensor_parallel_size=2, disable_custom_all_reduce=off))
        async with await AsyncLLM.start(args) as llm:
            return llm.ready_report.sums

    said = {off: asyncio.run(words(off)) for off in (False, True)}
    assert said[False].startswith("symmetric memory")
    if torch.cuda.get_device_capability() == (9, 0):
        assert "; with the norm behind it in one kernel up to " in said[False]
    assert said[True] == "NCCL for all sizes: turned off by --disable-custom-all-reduce or --batch-invariant"


def test_two_replicas_are_on_two_gpus(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", **SIZES)
    before = [torch.cuda.mem_get_info(i)[0] for i in range(2)]

    async def last_output() -> RequestOutput:
        async with await AsyncLLM.start(EngineArgs(**settings(tmp_path, data_parallel_size=2))) as llm:
            taken = [free - torch.cuda.mem_get_info(i)[0] for i, free in enumerate(before)]
            assert min(taken) > 0.5 * max(taken) > 0
            async for output in llm.generate(PROMPTS[0], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True), "one"):
                last = output
        return last

    last = asyncio.run(last_output())
    assert last.outputs[0].token_ids == tokens(tmp_path)[0][:5]
