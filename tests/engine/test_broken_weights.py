"""A model whose numbers are none: the request ends with an error that names the layer, and the engine goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from tests.support.tiny_models import save_tiny

CASES = {
    "model.layers.0.self_attn.q_proj.weight": "in layer 0, before the attention of layer 0",
    "model.layers.1.mlp.up_proj.weight": "in layer 1 or 2, before the attention of layer 2",
    "model.layers.2.mlp.down_proj.weight": "in layer 2, behind its attention",
    "lm_head.weight": "in the head",
}


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_named(name: str, kernels: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", num_hidden_layers=3)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name][5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"device": "cpu", "cpu_kernels": kernels, "num_gpu_blocks_override": 32, "skip_tokenizer_init": True}
    with LLM(str(tmp_path), **settings) as llm:
        for _ in range(2):
            outputs = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=3, temperature=0.0), use_tqdm=False)
            assert outputs[0].outputs[0].finish_reason == "error"
            assert CASES[name] in (outputs[0].outputs[0].error or "")
