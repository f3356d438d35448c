"""The bundled model writes the same under its grammars whether tokens are drawn first and judged then, or drawn under masks."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.core.trial import MaskTrial
from octavo.worker.compiled_worker import CompiledWorker
from tests.support.bundled import bundled_model_path

pytestmark = pytest.mark.model

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0},
        "kind": {"enum": ["person", "place"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
WISHES: list[dict[str, Any]] = [
    {"json": {"type": "array", "items": RECORD, "minItems": 3, "maxItems": 5}},
    {"json": RECORD, "disable_any_whitespace": True},
    {"regex": r"(The|A) [a-z ,]{20,120}\."},
    {"choice": ["yes, of course", "yes", "no"]},
    {"json_object": True},
]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    {"temperature": 1.0, "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "top_p": 0.95},
    {"temperature": 0.7, "logprobs": 3},
    {"temperature": 0.9, "min_tokens": 6},
    {"temperature": 0.6, "logit_bias": {28: 3.0, 216: -4.0}, "bad_words": ["the"]},
    {"temperature": 1.3, "n": 2},
]


@pytest.fixture(scope="module", params=["raw_logprobs", "processed_logprobs"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def written(mode: str) -> list[Any]:
    params = [
        SamplingParams(seed=i, max_tokens=48, structured_outputs=StructuredOutputsParams(**wish), **setting)
        for i, (wish, setting) in enumerate((w, s) for w in WISHES for s in SETTINGS)
    ]
    prompts = [f"Write about {thing}." for thing in ("a town", "a friend", "rain", "bread", "the sea", "a dog", "music", "snow")] * len(
        WISHES
    )
    with LLM(bundled_model_path(), max_num_seqs=16, max_model_len=256, logprobs_mode=mode) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (
            o.error,
            list(o.token_ids),
            o.text,
            o.finish_reason,
            [{i: (p.rank, p.decoded_token) for i, p in row.items()} for row in o.logprobs or []],
        )
        for output in outputs
        for o in output.outputs
    ]


def test_the_same_texts(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = [0, 0]
    refused = MaskTrial.refused

    def counted(self: MaskTrial, slots: Any, tokens: Any) -> Any:
        masks = refused(self, slots, tokens)
        judged[0] += len(slots)
        judged[1] += 0 if masks is None else len(masks.slots)
        return masks

    monkeypatch.setattr(MaskTrial, "refused", counted)
    tried = written(mode)
    assert judged[1] < 0.6 * judged[0], judged
    monkeypatch.setattr(CompiledWorker, "tries", False)
    before = list(judged)
    assert written(mode) == tried
    assert judged == before
    assert len({text for _, _, text, _, _ in tried}) > len(tried) // 2
