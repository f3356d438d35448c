"""The whole engine with the FlashInfer package on a GPU: the tokens of Octavo's own kernels, with both caches, and with windows."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams

from .test_engine_cuda import SETTINGS, SHAPE, agreement, generated, params, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer-python"),
]

CHUNKED: dict[str, Any] = {**SETTINGS, "dtype": "float16", "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 1 << 28}
"""Prompts of up to 300 tokens come in several steps, beside decodes."""


def shared(a: list[list[int]], b: list[list[int]]) -> float:
    """Mean share of a sequence before its first difference: kernels that add up in other orders flip a near tie now and then."""
    equal = [
        next((i for i, (x, y) in enumerate(zip(one, other, strict=True)) if x != y), len(one)) for one, other in zip(a, b, strict=True)
    ]
    return sum(n / len(one) for n, one in zip(equal, a, strict=True)) / len(a)


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_tokens_are_those_of_the_own_kernels(tmp_path: Path, cache: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    tokens = []
    for more in ({"attention_backend": "FLASHINFER"}, {"attention_backend": "TRITON_ATTN", "enforce_eager": True}):
        with LLM(str(tmp_path), kv_cache_dtype=cache, **CHUNKED, **more) as llm:
            assert llm.ready_report.attention == ("flashinfer" if "enforce_eager" not in more else "triton")
            tokens.append(generated(llm, params()))
            assert agreement(generated(llm, params()), tokens[-1]) > 0.9, "with the prefix cache"
    # A float8 cache makes a step of its own out of a difference in rounding.
    assert shared(*tokens) > (0.85 if cache == "auto" else 0.7)
    assert len({t for row in tokens[0] for t in row}) > 300


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{k: v for k, v in SHAPE.items() if k not in ("architectures", "model_type")}, initializer_range=0.1)
    model = transformers.Qwen3ForCausalLM(config).eval().half()
    model.save_pretrained(tmp_path)
    # The reference computes in float32, with the weights of the 16-bit model: what differs is rounding, which seldom flips a choice.
    reference = model.float().cuda()
    batch, expected = prompts()[:12], []
    for prompt in batch:
        ids = torch.tensor([prompt["prompt_token_ids"]], device="cuda")
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        expected.append(out[0, ids.shape[1] :].tolist())
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(str(tmp_path), attention_backend="FLASHINFER", **{**CHUNKED, "load_format": "auto"}) as llm:
        got = [o.outputs[0].token_ids for o in llm.generate(batch, sampling, use_tqdm=False)]  # type: ignore[arg-type]
    assert shared(got, expected) > 0.7
    assert sum(row[0] != other[0] for row, other in zip(got, expected, strict=True)) <= 1


def test_steps_never_wait_for_the_device(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with LLM(str(tmp_path), attention_backend="FLASHINFER", **CHUNKED) as llm:
        first = generated(llm, params())
        llm.reset_prefix_cache()
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert agreement(generated(llm, params()), first) > 0.9
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_layers_that_slide(tmp_path: Path) -> None:
    """Every token is kept here, and the window is the package's own: against plain torch."""
    shape = SHAPE | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 16, "query_pre_attn_scalar": 64,
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    tokens = []
    for backend in ("FLASHINFER", "TORCH_SDPA"):
        with LLM(str(tmp_path), max_model_len=400, attention_backend=backend, **CHUNKED) as llm:
            tokens.append(generated(llm, params()))
    assert shared(*tokens) > 0.8
