"""The bundled model, a real one, on a GPU: transformers' and the CPU's greedy text in float32, and sensible text in 16 bits.

Its file does not travel with the tree: `octavo models pull`, or OCTAVO_TEST_MODEL=FILE.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.support.bundled import bundled_model_path

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GOLDEN = json.loads((Path(__file__).parents[1] / "models" / "golden.json").read_text())
CLEAR = 1e-2
"""Between the best two logits: beyond what float32 sums in another order make of thirty layers."""
SETTINGS: dict[str, Any] = {"max_model_len": 512, "gpu_memory_utilization": 0.1, "max_num_seqs": 32}


def test_float32_greedy_text_is_that_of_the_cpu() -> None:
    """Of the cases that transformers decides clearly: on the CPU these are `tests/models/test_bundled.py`'s."""
    cases = [case for case in GOLDEN["cases"] if min(case["margins"]) > CLEAR]
    assert len(cases) >= 10
    params = SamplingParams(temperature=0.0, max_tokens=len(cases[0]["greedy_ids"]), ignore_eos=True)
    prompts = [{"prompt_token_ids": case["prompt_ids"]} for case in cases]
    outputs = {}
    for device in ("cuda", "cpu"):
        with LLM(bundled_model_path(), device=device, dtype="float32", cpu_activations="float32", **SETTINGS) as llm:
            outputs[device] = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
    for found in outputs.values():
        assert [list(o.token_ids) for o in found] == [case["greedy_ids"] for case in cases]
    assert [o.text for o in outputs["cuda"]] == [o.text for o in outputs["cpu"]]


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_text_is_sensible(cache: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40)
    with LLM(bundled_model_path(), device="cuda", kv_cache_dtype=cache, **SETTINGS) as llm:
        questions = ["What is the capital of France?", "Name the planet we live on."]
        replies = llm.chat([[{"role": "user", "content": question}] for question in questions], params, use_tqdm=False)
    for reply, word in zip(replies, ("paris", "earth"), strict=True):
        assert word in reply.outputs[0].text.lower(), reply.outputs[0].text
