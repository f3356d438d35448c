"""Models with sliding windows through the whole engine: tokens past the window equal transformers', and old blocks are let go of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.loop import EngineCore
from octavo.frontend.client import InProcessClient
from octavo.ops.cpu import abi
from octavo.protocol.step import window_blocks
from octavo.worker.worker import Worker
from tests.support.core_engine import check_core
from tests.support.tiny_models import save_tiny

BLOCK = 4
LENGTH = 200
MIXED = ["sliding_attention", "full_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "every layer slides": ("mistral", {"sliding_window": 9}),
    "every layer slides, sinks": ("gpt_oss", {"sliding_window": 10, "layer_types": ["sliding_attention"] * 2}),
    "some slide, sinks and experts": ("gpt_oss", {"sliding_window": 10, "layer_types": MIXED}),
    "some slide, another norm": ("cohere2", {"sliding_window": 6, "layer_types": MIXED}),
    "some slide, ropes differ": ("gemma3", {"sliding_window": 13, "layer_types": MIXED}),
    "some slide, soft caps": ("gemma2", {"sliding_window": 7, "layer_types": MIXED, "attn_logit_softcapping": 5.0}),
}
COMPILED = ("gemma2", "gemma3", "mistral")
"""Families whose steps are one call into the compiled CPU kernels, where those were built."""
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def core_of(llm: LLM) -> EngineCore:
    client = llm._client
    assert isinstance(client, InProcessClient)
    core = client._core
    assert isinstance(core, EngineCore)
    return core


def worker_of(core: EngineCore) -> Worker:
    worker = core.executor._worker  # type: ignore[attr-defined]
    assert isinstance(worker, Worker)
    return worker


def make(folder: Path, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True, "dtype": "float32", "block_size": BLOCK, "max_model_len": LENGTH, "max_num_seqs": 4,
        "max_num_batched_tokens": 16, "num_gpu_blocks_override": 120, "target_step_ms": None,
    }  # fmt: skip
    return LLM(str(folder), **(settings | options))


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, 128, (25,), generator=generator).tolist()
    return [shared + torch.randint(3, 128, (length + i,), generator=generator).tolist() for i in range(count)]


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("name", MODELS)
def test_tokens_past_the_window_equal_transformers(tmp_path: Path, name: str) -> None:
    """In steps of few tokens, several requests with a common beginning, the same again from the cache, and siblings."""
    family, options = MODELS[name]
    model = save_tiny(tmp_path, family, **options, **(EXPERTS if family == "gpt_oss" else {}))
    asked = prompts(3, 12)
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = [generated(model, prompt, 40) for prompt in asked]
    with make(tmp_path) as llm:
        core = core_of(llm)
        assert core.kv.slides
        if abi.library() is not None:
            assert (worker_of(core)._native is not None) == (family in COMPILED)
        assert len(core.kv.kinds) == (2 if "some" in name else 1)
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": p} for p in asked], greedy)
            assert [list(o.outputs[0].token_ids) for o in outputs] == expected
            check_core(core)
        assert outputs[0].num_cached_tokens >= (24 if "some" in name else len(asked[0]) - 1)
        longer = asked[0] + expected[0]
        again = llm.generate({"prompt_token_ids": longer[:70]}, SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True))[0]
        assert list(again.outputs[0].token_ids) == longer[70:77]
        assert again.num_cached_tokens >= 64
        several = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=30, ignore_eos=True)
        one = llm.generate({"prompt_token_ids": asked[1]}, several)[0]
        check_core(core)
        assert core.stats().kv_blocks_used == 0
    with make(tmp_path, enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = llm.generate({"prompt_token_ids": asked[1]}, several)[0]
    assert [o.token_ids for o in one.outputs] == [o.token_ids for o in alone.outputs]


def test_a_long_sequence_needs_no_more_blocks_than_its_window(tmp_path: Path) -> None:
    """A cache that holds 56 tokens serves a request of 200, whose layers see 9."""
    model = save_tiny(tmp_path, "mistral", sliding_window=9)
    prompt = prompts(1, 60)[0]
    blocks = 1 + 2 * window_blocks(9, BLOCK) + 2
    with make(tmp_path, num_gpu_blocks_override=blocks, max_num_seqs=2) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt}] * 2, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
        assert core_of(llm).stats().preemptions == 0
    assert blocks * BLOCK < len(prompt)
    expected = generated(model, prompt, 100)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [expected] * 2


def test_the_second_kind_takes_what_its_windows_need(tmp_path: Path) -> None:
    """In the memory that two layers' whole cache would take, a model of which one layer slides keeps almost twice the tokens."""
    save_tiny(tmp_path / "full", "gemma3", sliding_window=LENGTH, layer_types=MIXED)
    save_tiny(tmp_path / "some", "gemma3", sliding_window=6, layer_types=MIXED)
    capacities = []
    for name in ("full", "some"):
        with make(tmp_path / name, num_gpu_blocks_override=None, kv_cache_memory_bytes=500 * 1024, max_num_seqs=2) as llm:
            capacities.append(core_of(llm).kv.capacity)
    assert capacities[1] > 1.8 * capacities[0]
