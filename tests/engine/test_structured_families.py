"""Small random models of many families, held to schemas and calls in one batch with free rows, prompts longer than a step: every reply
ends, and ends valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from benchmarks.schema_generation import biases

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.frontend.parsing.formats import TOOL_FORMATS
from octavo.frontend.parsing.grammar import required_calls
from octavo.frontend.parsing.reply import ReplyFormat, read_whole
from tests.models.test_parity import CASES
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_models import save_tiny

NAMES = ["llama", "qwen3", "gemma3", "gpt2", "falcon-40b", "cohere2", "mixtral", "deepseek-v3", "gpt-oss"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_hangs_and_all_is_valid(tmp_path: Path, name: str) -> None:
    family, overrides = CASES.get(name, (name, {}))
    checkpoint = write_tiny_checkpoint(tmp_path / "tokenizer")
    vocab = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    more: dict[str, Any] = {"vocab_size": vocab, "max_position_embeddings": 1024}
    if rope := overrides.get("rope_parameters"):
        more["rope_parameters"] = {**rope, "original_max_position_embeddings": 256} if "factor" in rope else rope
    save_tiny(tmp_path / "model", family, **{**overrides, **more})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / file).write_bytes((checkpoint / file).read_bytes())
    form = TOOL_FORMATS["json"]
    assert form.syntax is not None
    calls = StructuredOutputsParams(grammar=required_calls(form.syntax, [t["function"] for t in TOOLS], {}, most=2))
    wishes = [StructuredOutputsParams(json=SCHEMA), calls, None, StructuredOutputsParams(choice=["yes", "no"])] * 3
    params = [
        SamplingParams(
            temperature=float(i % 2), seed=i, max_tokens=180, logit_bias=None if wish is None else biases(6.0), structured_outputs=wish
        )
        for i, wish in enumerate(wishes)
    ]
    conversation: Any = [{"role": "user", "content": "hi"}]
    with LLM(
        str(tmp_path / "model"),
        device="cpu",
        threads=1,
        num_gpu_blocks_override=400,
        max_num_seqs=8,
        max_model_len=600,
        max_num_batched_tokens=128,
    ) as llm:
        outputs = llm.chat([conversation] * len(params), params, tools=TOOLS, use_tqdm=False)
    for i, output in enumerate(outputs):
        reply = output.outputs[0]
        assert reply.error is None
        assert reply.finish_reason in ("stop", "length")
        if i % 4 == 0 and reply.finish_reason == "stop":
            jsonschema.validate(json.loads(reply.text), SCHEMA)
        if i % 4 == 1 and reply.finish_reason == "stop":
            found = read_whole(ReplyFormat(form, {"f": SCHEMA}), reply.text)
            assert found.text == ""
            assert 1 <= len(found.calls) <= 2
            for call in found.calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMA)
        if i % 4 == 3:
            assert (reply.text in ("yes", "no"), reply.finish_reason) == (True, "stop")
    assert sum(o.outputs[0].finish_reason == "stop" for i, o in enumerate(outputs) if i % 4 < 2) >= 3, "most come to an end"
