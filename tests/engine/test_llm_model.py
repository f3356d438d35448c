"""`LLM` and `AsyncLLM` over the bundled model: sensible words, the same ones every way they can be asked for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import LLM, AsyncLLM, BeamSearchParams, EngineArgs, RequestOutputKind, SamplingParams

MODEL = Path(os.environ.get("OCTAVO_TEST_MODEL") or Path.home() / ".cache/octavo/models/SmolLM2-135M-Instruct.Q4_1.gguf")
SETTINGS = {"device": "cpu", "threads": 1, "max_model_len": 1024, "num_gpu_blocks_override": 512, "cpu_activations": "float32"}
"""float32: some of the answers below are near ties, which rounding may decide either way."""
GREEDY = SamplingParams(temperature=0, max_tokens=16)
PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time"]

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not MODEL.exists(), reason=f"the bundled model is not at {MODEL} (set OCTAVO_TEST_MODEL)"),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(MODEL), **SETTINGS) as llm:  # type: ignore[arg-type]
        yield llm


def texts(llm: LLM, params: SamplingParams) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, params)]


def test_it_knows_what_it_should(llm: LLM) -> None:
    paris, numbers, _ = texts(llm, GREEDY)
    assert "Paris" in paris
    assert numbers.startswith(" 5, 6, 7")
    [output] = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0, max_tokens=32))
    assert "Paris" in output.outputs[0].text


def test_alone_or_together_again_or_cached_the_same(llm: LLM) -> None:
    together = texts(llm, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in PROMPTS]
    assert together == alone == texts(llm, GREEDY)
    assert llm.reset_prefix_cache()
    assert texts(llm, GREEDY) == together


def test_seeds_decide(llm: LLM) -> None:
    def sample(seed: int) -> list[str]:
        return texts(llm, SamplingParams(temperature=1.0, seed=seed, max_tokens=12))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    [output] = llm.generate(PROMPTS[2], SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=12))
    assert len({o.text for o in output.outputs}) == 3
    assert output.outputs[0].text == sample(1)[2]


def test_a_stop_string_cuts_what_would_have_come(llm: LLM) -> None:
    [whole] = llm.generate(PROMPTS[1], GREEDY)
    [cut] = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=16, stop=" 7"))
    assert cut.outputs[0].text == whole.outputs[0].text.partition(" 7")[0]
    assert cut.outputs[0].stop_reason == " 7"


def test_logprobs_are_those_of_the_tokens(llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=0))
    [completion] = output.outputs
    assert completion.logprobs is not None
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(position)) == token_id
        assert position[token_id].rank == 1
        assert position[token_id].logprob == max(p.logprob for p in position.values())
    shown = [position[token_id].decoded_token for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert "".join(text or "" for text in shown) == completion.text
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids or [])


def test_the_best_beam_is_at_least_as_likely_as_greedy(llm: LLM) -> None:
    [greedy] = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0))
    [beams] = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True))
    assert greedy.outputs[0].cumulative_logprob is not None
    assert beams.sequences[0].cum_logprob >= greedy.outputs[0].cumulative_logprob - 1e-3
    assert len({tuple(s.tokens) for s in beams}) == 4
    assert beams.sequences[0].text is not None
    assert beams.sequences[0].text.startswith(PROMPTS[0])


async def test_a_killed_engine_goes_on_with_the_same_words(llm: LLM) -> None:
    """Sampled, not greedy: the random numbers must be the same too."""
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    expected = texts(llm, params)
    async with await AsyncLLM.start(EngineArgs(model=str(MODEL), **SETTINGS)) as engine:  # type: ignore[arg-type]
        seen = 0

        async def read(prompt: str) -> str:
            nonlocal seen
            text = ""
            async for output in engine.generate(prompt, params):
                text += output.outputs[0].text
                seen += 1
            return text

        async def kill() -> None:
            while seen < 15:
                await asyncio.sleep(0.01)
            assert engine.engine_pid is not None
            os.kill(engine.engine_pid, signal.SIGKILL)

        killing = asyncio.create_task(kill())
        assert await asyncio.gather(*(read(prompt) for prompt in PROMPTS)) == expected
        await killing
        assert engine.restarts == 1
