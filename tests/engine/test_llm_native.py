"""The bundled model on the compiled CPU kernels with int8 activations, a float16 cache, several threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.ops.cpu import abi
from tests.support.bundled import bundled_model_path

pytestmark = [pytest.mark.model, pytest.mark.skipif(abi.library() is None, reason="the compiled kernels were not built")]

PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time, in a land far away, there lived a king who", "def fibonacci(n):"]
PARAMS = SamplingParams(temperature=0, max_tokens=20, logprobs=2)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        str(bundled_model_path()), device="cpu", threads=2, max_model_len=1024, num_gpu_blocks_override=512, cpu_activations="int8"
    ) as llm:
        yield llm


def test_the_first_question_of_the_readme(llm: LLM) -> None:
    """Two first tokens are 0.08 nats apart."""
    [output] = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0, max_tokens=50))
    assert output.outputs[0].text == "The capital of France is Paris."


def numbers(output: RequestOutput) -> list[list[float]]:
    assert output.outputs[0].logprobs is not None
    return [[entry.logprob for entry in position.values()] for position in output.outputs[0].logprobs]


def test_sensible_words(llm: LLM) -> None:
    paris, counting, *_ = llm.generate(PROMPTS, PARAMS)
    assert "Paris" in paris.outputs[0].text
    assert counting.outputs[0].text.startswith(" 5, 6, 7")


def test_alone_together_and_cached_the_same(llm: LLM) -> None:
    """Logits are the same bits (tests/models/test_native_batches.py); torch's log-softmax over more rows rounds differently."""
    outputs = llm.generate(PROMPTS * 3, PARAMS)
    together = [numbers(output) for output in outputs]
    assert together[:4] == together[4:8] == together[8:]
    assert llm.reset_prefix_cache()
    for prompt, expected, logprobs in zip(PROMPTS, outputs, together[:4], strict=False):
        [alone] = llm.generate(prompt, PARAMS)
        assert alone.outputs[0].token_ids == expected.outputs[0].token_ids
        assert numbers(alone) == [pytest.approx(position, abs=2e-5) for position in logprobs]


def test_the_torch_kernels_can_be_chosen() -> None:
    settings = {"device": "cpu", "max_model_len": 256, "num_gpu_blocks_override": 64}
    with LLM(str(bundled_model_path()), cpu_kernels="torch", **settings) as llm:  # type: ignore[arg-type]
        [output] = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=2))
    assert output.outputs[0].text.startswith(" Paris")
