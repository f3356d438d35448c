"""Families whose attention no fused kernel computes as a whole: the same tokens with and without graphs, and those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.support.tiny_models import save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
GROWTH = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 16.0, "original_max_position_embeddings": 16, "mscale": 1.0,
          "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "ministral3": {**SHAPE, "rope_parameters": GROWTH},
    "hunyuan_v1_dense": SHAPE,
    "bloom": {"hidden_size": 256, "num_attention_heads": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family, **FAMILIES[family])
    generator = torch.Generator().manual_seed(3)
    prompts: list[Any] = [{"prompt_token_ids": torch.randint(3, 128, (n,), generator=generator).tolist()} for n in (3, 40, 90, 7)]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    found = []
    for how in ({"device": "cpu"}, {"enforce_eager": True, "gpu_memory_utilization": 0.05}, {"gpu_memory_utilization": 0.05}):
        with LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_num_seqs=8, max_model_len=256, **how) as llm:
            found.append([list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)])
    for tokens in found[1:]:
        same = sum(a == b for one, two in zip(found[0], tokens, strict=True) for a, b in zip(one, two, strict=True))
        assert same >= 0.9 * 24 * len(prompts), found
