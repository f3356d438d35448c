"""Low-bit models on a GPU through the whole engine: captured steps, prompts of any length, and the tools' own logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantized"
MADE = ("auto_awq", "auto_gptq", "w4a16_gptq", "w8a8_int8", "fp8_dynamic")
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 48, "gpu_memory_utilization": 0.05}


@pytest.mark.parametrize("name", MADE)
def test_prompt_scores_are_those_of_the_tool(name: str) -> None:
    logits = load_file(FIXTURES / "logits.safetensors")
    ids = logits["ids"].tolist()
    expected = logits[name].log_softmax(-1)[:-1].gather(1, logits["ids"][1:, None])[:, 0]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
    with LLM(str(FIXTURES / name), **SETTINGS) as llm:
        rows = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].prompt_logprobs
    assert rows is not None
    ours = torch.tensor([row[token].logprob for token, row in zip(ids[1:], rows[1:], strict=True) if row is not None])
    assert float((ours - expected).abs().mean()) < (0.4 if name in ("w8a8_int8", "fp8_dynamic") else 0.1)  # bf16, on a model of noise


@pytest.mark.parametrize("name", MADE)
def test_graphs_change_nothing(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    prompts = [{"prompt_token_ids": torch.randint(3, 270, (n,), generator=generator).tolist()} for n in (3, 40, 150, 200)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    found = []
    for eager in (False, True):
        with LLM(str(FIXTURES / name), enforce_eager=eager, **SETTINGS) as llm:
            found.append([list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)])
    same = sum(a == b for one, two in zip(*found, strict=True) for a, b in zip(one, two, strict=True))
    assert same >= 24, found  # of 32: graphs pad rows, which may choose another kernel


@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_rounded_while_loading_takes_half(method: str, tmp_path: Path) -> None:
    shape = json.loads((FIXTURES / "auto_awq" / "config.json").read_text())
    del shape["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(shape | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}))
    sizes = []
    for asked in (None, method):
        with LLM(str(tmp_path), load_format="dummy", quantization=asked, **SETTINGS) as llm:
            out = llm.generate({"prompt_token_ids": list(range(3, 200))}, SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False)
            assert out[0].outputs[0].finish_reason == "length"
            sizes.append(llm.ready_report.weights_bytes)
    assert sizes[1] < 0.6 * sizes[0]
