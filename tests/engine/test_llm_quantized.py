"""Checkpoints of other tools through the whole engine, and a server's settings for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError, ConfigError
from tests.support.tiny_checkpoint import write_tiny_checkpoint

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


def made_up(folder: Path, quantization: dict[str, Any], **settings: Any) -> LLM:
    config = write_tiny_checkpoint(folder, max_model_len=128) / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "quantization_config": quantization}
    config.write_text(json.dumps(json.loads(config.read_text()) | sizes))
    return LLM(str(folder), load_format="dummy", **(SETTINGS | settings))


@pytest.mark.parametrize(("kernels", "group", "kept"), [("native", 32, None), ("native", 16, "float32, float16"), ("torch", 32, "float32")])
def test_what_low_bit_weights_are_kept_in_is_told(
    kernels: str, group: int, kept: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with made_up(tmp_path, {"quant_method": "awq", "bits": 4, "group_size": group}, cpu_kernels=kernels) as llm:
        output = llm.generate({"prompt_token_ids": [3, 4, 5]}, SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
        assert output[0].outputs[0].finish_reason == "length"
        report = llm.ready_report
        assert sum(report.weights_kinds.values()) == report.weights_bytes
        told = [w for w in report.warnings if w.startswith("Weights quantised with awq are kept")]
        assert [m for m in caplog.messages if m.startswith("Weights quantised with awq are kept")] == told
        if kept is None:
            assert not told and "4-bit groups" in report.weights_kinds
        else:
            assert f"dequantised ({kept})" in told[0] and "take the memory of unquantised ones" in told[0]


def test_a_config_without_a_method(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="its quantization_config has no quant_method"):
        made_up(tmp_path, {"bits": 4})
