"""`batch_invariant` on a GPU: a request's logprobs and tokens are the same bits however the engine came to compute them."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

VOCAB = 3001
"""Odd, so that rows of logits start at every alignment."""
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "sliding_window": 300,
    },
}
COMMON: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_num_seqs": 48,
    "kv_cache_memory_bytes": 2**28,
    "batch_invariant": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "one step at a time": {"async_scheduling": False},
    "small chunks": {"max_num_batched_tokens": 96},
    "no prefix caching": {"enable_prefix_caching": False, "max_num_batched_tokens": 700},
    "little memory": {"num_gpu_blocks_override": 150, "max_model_len": 2048},
}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def folder(shape: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shape")
    (path / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))
    return str(path)


def prompts() -> list[dict[str, list[int]]]:
    """Two long ones with a beginning in common, and many short ones."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB, 700).tolist()
    lengths = [400, 90, *rng.integers(1, 250, 28).tolist()]
    own = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
    return [{"prompt_token_ids": (shared if i < 2 else []) + ids} for i, ids in enumerate(own)]


def params(*, logprobs: bool) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8}, {"top_p": 0.9, "top_k": 50}]
    asked = {"logprobs": 5} if logprobs else {}
    return [SamplingParams(seed=i, max_tokens=24 + i, ignore_eos=True, **asked, **kinds[i % 3]) for i in range(30)]


Answer = list[tuple[int, dict[int, float]]]


def answers(outputs: list[RequestOutput]) -> list[Answer]:
    """Each request's tokens, with the exact logprobs of the likeliest at each place."""
    result = []
    for output in outputs:
        completion = output.outputs[0]
        rows = completion.logprobs or [{} for _ in completion.token_ids]
        result.append([(t, {i: lp.logprob for i, lp in row.items()}) for t, row in zip(completion.token_ids, rows, strict=True)])
    return result


def generated(llm: LLM, *, logprobs: bool, only: list[int] | None = None) -> list[Answer]:
    wanted = range(30) if only is None else only
    batch, sampling = prompts(), params(logprobs=logprobs)
    return answers(llm.generate([batch[i] for i in wanted], [sampling[i] for i in wanted], use_tqdm=False))  # type: ignore[arg-type]


def tokens(found: list[Answer]) -> list[list[int]]:
    return [[token for token, _ in answer] for answer in found]


@pytest.mark.parametrize(("shape", "cache"), [("qwen3", "auto"), ("mistral", "fp8")])
def test_bits_do_not_depend_on_how_a_request_was_computed(folder: str, cache: str) -> None:
    settings = SETTINGS | {"kv_cache_dtype": cache}
    with LLM(folder, **settings) as llm:
        assert llm.ready_report.attention == "triton-invariant"
        first = generated(llm, logprobs=True)
        assert generated(llm, logprobs=True) == first, "with the prefix cache warm"
        # Without logprobs decodes replay as graphs; their tokens are all there is to compare.
        assert tokens(generated(llm, logprobs=False)) == tokens(first)
        for one in (0, 3, 11):
            llm.reset_prefix_cache()
            assert generated(llm, logprobs=True, only=[one]) == [first[one]], "alone"
            assert tokens(generated(llm, logprobs=False, only=[one])) == tokens([first[one]]), "alone, in graphs"
    assert len({token for answer in first for token, _ in answer}) > 200
    for name, variant in VARIANTS.items():
        with LLM(folder, **(settings | variant)) as llm:
            assert generated(llm, logprobs=True) == first, name
            assert tokens(generated(llm, logprobs=False)) == tokens(first), name


@pytest.mark.parametrize("shape", ["qwen3"])
def test_prompt_logprobs_do_not_depend_on_chunks(folder: str) -> None:
    found = []
    for budget in (8192, 50):
        with LLM(folder, **(SETTINGS | {"max_num_batched_tokens": budget})) as llm:
            sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
            outputs = llm.generate(prompts()[:6], sampling, use_tqdm=False)  # type: ignore[arg-type]
            found.append(
                [[None if row is None else {i: lp.logprob for i, lp in row.items()} for row in o.prompt_logprobs or []] for o in outputs]
            )
    assert all(len(rows) > 1 for rows in found[0])
    assert found[0] == found[1]


@pytest.mark.parametrize("shape", ["qwen3"])
def test_a_float8_cache_stays_near_a_16_bit_one(folder: str) -> None:
    """Logprobs of the same prompt, token by token, and twice the tokens in the same memory."""
    found, blocks = {}, {}
    for cache in ("auto", "fp8"):
        with LLM(folder, **(SETTINGS | {"kv_cache_dtype": cache, "batch_invariant": False, "max_num_batched_tokens": 128})) as llm:
            assert llm.ready_report.attention == "triton"
            blocks[cache] = llm.ready_report.num_blocks
            assert any("1.0" in w for w in llm.ready_report.warnings) == (cache == "fp8")
            sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
            output = llm.generate([prompts()[0]], sampling, use_tqdm=False)[0]  # type: ignore[list-item]
            ids = prompts()[0]["prompt_token_ids"]
            rows = (output.prompt_logprobs or [])[1:]
            found[cache] = np.array([row[token].logprob for row, token in zip(rows, ids[1:], strict=True) if row is not None])
    assert abs(blocks["fp8"] - 2 * blocks["auto"]) <= 2
    assert len(found["auto"]) == len(prompts()[0]["prompt_token_ids"]) - 1
    error = np.abs(found["fp8"] - found["auto"])
    assert 0 < error.mean() < 0.05
    assert error.max() < 0.5
