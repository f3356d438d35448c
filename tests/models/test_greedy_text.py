"""Greedy text of the bundled model on the compiled kernels against torch's float32 path, for twenty prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.ops.cpu import abi
from tests.support.bundled import bundled_model_path

pytestmark = [pytest.mark.model, pytest.mark.skipif(abi.library() is None, reason="the compiled kernels were not built")]

PROMPTS = """The capital of France is|Once upon a time|Write a haiku about rain.|Explain photosynthesis simply.|def fibonacci(n):
The three laws of motion are|My favourite recipe is|In 1969, humans|List five animals:|The meaning of life|Why is the sky blue?
Translate to French: good morning|A short story about a dog|How do computers store numbers?|The largest ocean is|To make tea, first
Dear Sir or Madam,|The stock market|Water boils at|If I were a bird""".replace("\n", "|").split("|")
TOKENS = 32
TIE = 0.4
"""Likelihoods of two tokens that 4-bit weights themselves cannot tell apart, as the difference of their logarithms."""


def texts(**settings: Any) -> list[tuple[list[int], list[int]]]:
    """(prompt's tokens, reply's tokens) of each prompt."""
    with LLM(bundled_model_path(), device="cpu", max_model_len=512, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return [(list(o.prompt_token_ids or []), list(o.outputs[0].token_ids)) for o in outputs]


@pytest.fixture(scope="module")
def reference() -> Iterator[LLM]:
    with LLM(bundled_model_path(), device="cpu", max_model_len=512, cpu_kernels="torch") as llm:
        yield llm


def gap(llm: LLM, context: list[int], other: int) -> float:
    """How much less likely than the likeliest token `other` is after `context`."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    first = llm.generate({"prompt_token_ids": context}, params, use_tqdm=False)[0].outputs[0].logprobs
    assert first is not None
    found = {token: entry.logprob for token, entry in first[0].items()}
    return max(found.values()) - found[other] if other in found else float("inf")


@pytest.mark.parametrize(("activations", "tie", "identical"), [("float32", 1e-3, 19), ("int16", 1e-2, 19), ("int8", TIE, 8)])
def test_twenty_prompts(reference: LLM, activations: str, tie: float, identical: int) -> None:
    """The same text, or text that parts where the reference itself was all but undecided."""
    assert len(PROMPTS) == 20
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    wanted = [list(o.outputs[0].token_ids) for o in reference.generate(PROMPTS, params, use_tqdm=False)]
    gaps = []
    for (prompt, found), expected in zip(texts(cpu_activations=activations), wanted, strict=True):
        place = next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), None)
        if place is not None:
            gaps.append(gap(reference, prompt + expected[:place], found[place]))
    print(f"{activations}: {20 - len(gaps)} of 20 identical, the others part at gaps of {[round(g, 3) for g in sorted(gaps)]}")
    assert 20 - len(gaps) >= identical
    assert all(g < tie for g in gaps)
