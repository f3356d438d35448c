"""Families with unusual layers through the whole engine: paged cache, chunked prompts, shared batches; tokens equal `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.models.test_parity import CASES
from tests.support.tiny_models import save_tiny

PROMPTS = [torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 40, 21)]
NAMES = ["gemma3", "gpt2", "falcon-40b", "cohere2", "mixtral", "deepseek-v3", "gpt-oss"]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_generate(tmp_path: Path, name: str) -> None:
    family, overrides = CASES[name]
    reference: Any = save_tiny(tmp_path, family, **overrides)
    with LLM(
        str(tmp_path), device="cpu", threads=1, skip_tokenizer_init=True, num_gpu_blocks_override=64, max_num_batched_tokens=16,
        max_num_seqs=4, max_model_len=128, kv_cache_dtype="float32",
    ) as llm:  # fmt: skip
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in PROMPTS], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        )
    for ids, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            out = reference.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert output.outputs[0].token_ids == out[0, len(ids) :].tolist()
