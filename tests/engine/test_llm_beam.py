"""Beam search on the real engine: equal to transformers', for several widths and length penalties."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from octavo import LLM, AsyncLLM, BeamSearchParams, EngineArgs, SamplingParams
from octavo.protocol.engine import EngineStats
from tests.support.tiny_models import save_tiny

PROMPTS = [[5, 9, 17, 33], [8, 8, 100, 3, 64, 11, 90], [44]]
SETTINGS = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "threads": 1,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 200,
    "max_model_len": 128,
    "kv_cache_dtype": "float32",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def reference(folder: Path) -> transformers.PreTrainedModel:
    return save_tiny(folder, "llama")


@pytest.fixture(scope="module")
def llm(folder: Path, reference: transformers.PreTrainedModel) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as llm:  # type: ignore[arg-type]
        yield llm


def expected(
    model: transformers.PreTrainedModel, prompt: list[int], width: int, length: int, penalty: float, eos: int | None
) -> list[tuple[float, list[int]]]:
    """transformers' (score, generated tokens), best first."""
    model.generation_config.eos_token_id = eos
    found = model.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=length,
        length_penalty=penalty,
        early_stopping=False,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=eos,
        output_scores=True,
        return_dict_in_generate=True,
    )
    results = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        if eos is not None and eos in tokens:
            tokens = tokens[: tokens.index(eos) + 1]
        results.append((score, tokens))
    return results


@pytest.mark.parametrize("penalty", [0.0, 1.0, 1.5])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_equal_to_transformers(llm: LLM, reference: transformers.PreTrainedModel, width: int, penalty: float) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=12, length_penalty=penalty, include_stop_str_in_output=True)
    outputs = llm.beam_search(PROMPTS, params)
    ended = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        truth = expected(reference, prompt, width, 12, penalty, eos=2)
        found = [s.tokens[len(prompt) :] for s in output.sequences]
        assert found == [tokens for _, tokens in truth]
        for sequence, tokens, (score, _) in zip(output.sequences, found, truth, strict=True):
            assert sequence.cum_logprob / len(tokens) ** penalty == pytest.approx(score, abs=1e-4)
            ended += sequence.finish_reason == "stop"
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)


def test_some_beams_do_end(llm: LLM) -> None:
    """Otherwise the comparison above would say nothing about EOS."""
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=5, max_tokens=40, length_penalty=0.0))
    assert {s.finish_reason for output in outputs for s in output.sequences} >= {"stop"}


def test_ignoring_eos_is_equal_too(llm: LLM, reference: transformers.PreTrainedModel) -> None:
    [output] = llm.beam_search([PROMPTS[1]], BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True))
    truth = expected(reference, PROMPTS[1], 4, 10, 1.0, eos=None)
    assert [s.tokens[len(PROMPTS[1]) :] for s in output.sequences] == [tokens for _, tokens in truth]


def test_one_beam_is_greedy(llm: LLM) -> None:
    [output] = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=1, max_tokens=10, ignore_eos=True))
    [greedy] = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    assert output.sequences[0].tokens == PROMPTS[0] + list(greedy.outputs[0].token_ids)


def test_beams_share_their_blocks(llm: LLM) -> None:
    """A beam's token costs one computed token: parents' blocks are shared, never recomputed."""
    prompt = [7 + i % 50 for i in range(48)]
    before: EngineStats = llm.stats()
    llm.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True))
    after = llm.stats()
    assert after.cow_copies > before.cow_copies
    assert after.recomputed_tokens == before.recomputed_tokens
    assert after.step - before.step <= 8 + 2


async def test_the_async_engine_agrees(llm: LLM, folder: Path) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    [offline] = llm.beam_search([PROMPTS[0]], params)
    async with await AsyncLLM.start(EngineArgs(model=str(folder), **SETTINGS)) as engine:  # type: ignore[arg-type]
        online = await engine.beam_search(PROMPTS[0], params)
        assert [PROMPTS[0] + list(o.token_ids) for o in online.outputs] == [s.tokens for s in offline.sequences]
        assert [o.cumulative_logprob for o in online.outputs] == pytest.approx([s.cum_logprob for s in offline.sequences])
        assert (await engine.ping()).kv_blocks_used == 0
        assert engine.live_requests() == 0
