"""Checkpoints of other tools through the whole engine, and a server's settings for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantized"
SETTINGS: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 32, "skip_tokenizer_init": True}


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("name", ["auto_awq", "auto_gptq", "w4a16_gptq", "w8a8_int8", "fp8_dynamic"])
def test_prompt_scores_are_those_of_the_tool(name: str, kernels: str) -> None:
    logits = load_file(FIXTURES / "logits.safetensors")
    ids = logits["ids"].tolist()
    expected = logits[name].log_softmax(-1)[:-1].gather(1, logits["ids"][1:, None])[:, 0]
    with LLM(str(FIXTURES / name), cpu_kernels=kernels, cpu_activations="float32", **SETTINGS) as llm:
        outputs = llm.generate(
            {"prompt_token_ids": ids}, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False), use_tqdm=False
        )
    rows = outputs[0].prompt_logprobs
    assert rows is not None
    ours = torch.tensor([row[token].logprob for token, row in zip(ids[1:], rows[1:], strict=True) if row is not None])
    # Tools round inputs of 8-bit layers too; the CPU's kernels here do not.
    assert float((ours - expected).abs().mean()) < (0.3 if name in ("w8a8_int8", "fp8_dynamic") else 0.005)


def test_the_option_must_agree() -> None:
    with pytest.raises(ConfigError, match="are quantised with awq"):
        LLM(str(FIXTURES / "auto_awq"), quantization="gptq", **SETTINGS)
    with LLM(str(FIXTURES / "auto_awq"), quantization="awq", **SETTINGS) as llm:
        assert llm.config.model.quantization == "awq"
