"""The whole engine on a GPU: the same tokens with and without graphs and overlap, parity with transformers, and no waiting."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

VOCAB = 3000
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
SETTINGS: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 48, "gpu_memory_utilization": 0.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shape")
    (path / "config.json").write_text(json.dumps(SHAPE))
    return str(path)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")
    gc.collect()
    torch.cuda.empty_cache()


def prompts() -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(0)
    return [{"prompt_token_ids": rng.integers(0, VOCAB, int(n)).tolist()} for n in rng.integers(1, 300, 40)]


def params() -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8}, {"top_p": 0.9, "top_k": 50}, {"min_p": 0.05}]
    return [SamplingParams(seed=i, max_tokens=20 + i, ignore_eos=True, **kinds[i % 4]) for i in range(40)]


def generated(llm: LLM, sampling: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(), sampling, use_tqdm=False)]  # type: ignore[arg-type]


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """Share of sequences that are equal. bf16 sums in other orders flip a near tie now and then, so not all need be."""
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def test_graphs_and_overlap_do_not_change_tokens(folder: str) -> None:
    with LLM(folder, dtype="float16", **SETTINGS) as llm:
        assert llm.ready_report.attention == "triton"
        first = generated(llm, params())
        assert generated(llm, params()) == first, "a second run, with the prefix cache, repeats the first"
    assert len({t for tokens in first for t in tokens}) > 300
    with LLM(folder, dtype="float16", async_scheduling=False, **SETTINGS) as llm:
        assert generated(llm, params()) == first, "one step at a time gives the same"
    with LLM(folder, dtype="float16", enforce_eager=True, **SETTINGS) as llm:
        assert agreement(generated(llm, params()), first) > 0.9


def test_steps_never_wait_for_the_device(folder: str) -> None:
    with LLM(folder, dtype="bfloat16", **SETTINGS) as llm:
        sampling = params()
        sampling[3] = SamplingParams(logprobs=3, presence_penalty=0.5, seed=1, max_tokens=20, ignore_eos=True)
        generated(llm, sampling)
        llm.reset_prefix_cache()
        torch.cuda.set_sync_debug_mode("error")
        tokens = generated(llm, sampling)
        torch.cuda.set_sync_debug_mode("default")
    assert all(len(t) >= 20 for t in tokens)


def test_closing_gives_the_memory_to_other_processes(folder: str) -> None:
    with LLM(folder, dtype="float16", **SETTINGS) as llm:
        generated(llm, params())
        cache = llm.ready_report.cache_bytes
        assert torch.cuda.memory_reserved() > cache
    assert torch.cuda.memory_reserved() < cache // 4


def test_float32_greedy_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{k: v for k, v in SHAPE.items() if k not in ("architectures", "model_type")}, initializer_range=0.1)
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    reference = model.cuda()
    batch = prompts()[:6]
    expected = []
    for prompt in batch:
        ids = torch.tensor([prompt["prompt_token_ids"]], device="cuda")
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        expected.append(out[0, ids.shape[1] :].tolist())
    settings = {**SETTINGS, "load_format": "auto"}
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(str(tmp_path), dtype="float32", **settings) as llm:
        got = [o.outputs[0].token_ids for o in llm.generate(batch, sampling, use_tqdm=False)]  # type: ignore[arg-type]
    assert got == expected
    # The same weights in bf16, through the Triton kernels: log-probabilities of the prompt stay near those of float32.
    ids = batch[0]["prompt_token_ids"]
    with torch.no_grad():
        logprobs = reference(torch.tensor([ids], device="cuda")).logits[0].float().log_softmax(-1)
    wanted = [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]
    with LLM(str(tmp_path), dtype="bfloat16", **settings) as llm:
        scored = llm.generate([batch[0]], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)[
            0
        ].prompt_logprobs  # type: ignore[list-item]
    assert scored is not None
    errors = [abs(row[token].logprob - want) for row, token, want in zip(scored[1:], ids[1:], wanted, strict=True) if row is not None]
    assert len(errors) == len(ids) - 1
    assert float(np.mean(errors)) < 0.05
    assert max(errors) < 0.4
