"""A model divided among processes gives the tokens of one process; tests/models/test_divided.py has every family, in threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.models.test_parity import CASES
from tests.support.tiny_models import save_tiny

PROMPTS = [torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 40, 21)]


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    with LLM(
        str(folder), device="cpu", threads=1, cpu_kernels="torch", skip_tokenizer_init=True, num_gpu_blocks_override=64,
        max_num_batched_tokens=16, max_num_seqs=4, max_model_len=128, kv_cache_dtype="float32", **settings,
    ) as llm:  # fmt: skip
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"tensor_parallel_size": 2}),
        ("llama-tied", {"pipeline_parallel_size": 2}),
        ("gemma3", {"pipeline_parallel_size": 2}),
        ("mixtral", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("deepseek-v3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ],
)
def test_ranks_give_the_tokens_of_one_process(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    family, overrides = CASES[name]
    save_tiny(tmp_path, family, **overrides)
    assert tokens(tmp_path, **settings) == tokens(tmp_path)
