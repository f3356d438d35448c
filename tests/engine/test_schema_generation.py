"""A random model held to a schema writes nothing that does not validate: every keyword that is accepted is kept, in every draft.

benchmarks/schema_generation.py does the same with the whole public JSON-Schema test suite.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from benchmarks.schema_generation import DIALECTS, biases, problem
from jsonschema import validators

from octavo import LLM, SamplingParams, StructuredOutputsParams
from tests.support.tiny_checkpoint import write_tiny_checkpoint

NAME = {"type": "string", "minLength": 1, "maxLength": 6}
TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}}}
SCHEMAS: list[Any] = [
    True,
    {},
    {"type": "null"},
    {"type": ["boolean", "integer"]},
    {"enum": ["a", 1, 2.5, None, True, {"b": [1]}, ["x"]]},
    {"const": {"a": "é\n\"\\"}},
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 4, "multipleOf": 3},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"multipleOf": 0.01, "type": "number", "minimum": 0, "maximum": 5},
    {"type": "string", "minLength": 2.0, "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]{2}-[0-9]+$"},
    {"type": "string", "pattern": "b", "maxLength": 5},
    *({"type": "string", "format": f} for f in ("date", "time", "date-time", "duration", "ipv4", "ipv6", "uuid", "email", "hostname", "uri")),
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, NAME], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "boolean"}, "maxItems": 3},
    {"type": "object", "properties": {"a": NAME, "b": {"type": "integer"}}, "required": ["b"], "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"k": {"const": "v"}}, "required": ["k", "other"]},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 5, "maximum": 7}]},
    {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "object", "properties": {"a": NAME}, "required": ["a"]}]},
    {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 7}]},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": n}, "v": NAME}, "required": ["k"]} for n in (1, 2, None)]},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": {"type": "boolean"}, "minProperties": 2},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]},
    {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"b": NAME}, "required": ["b"]}], "type": "object"},
    {"$defs": {"n": NAME}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
    {"definitions": {"p": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}}, "$ref": "#/definitions/p"},
    TREE,
    {"type": "object", "properties": {"": {"type": "null"}, "$id": {"type": "null"}, "a\"b": {"type": "null"}}, "required": ["", "$id", "a\"b"]},
    {"type": "array", "uniqueItems": False, "minContains": 3, "then": False, "items": {"type": "null"}, "maxItems": 2},
]  # fmt: skip
DRAFT_7: list[Any] = [
    {"type": "array", "items": [{"type": "integer"}, NAME], "additionalItems": False, "minItems": 2},
    {"type": "array", "items": [{"type": "integer"}], "additionalItems": {"type": "null"}, "maxItems": 3},
    {"$ref": "#/definitions/a", "definitions": {"a": {"type": "string", "maxLength": 2}}, "maxLength": 0},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("m"))
    with LLM(str(folder), load_format="dummy", device="cpu", dtype="float32") as llm:
        yield llm


def draws(schema: Any, count: int) -> list[SamplingParams]:
    wish = StructuredOutputsParams(json=schema if isinstance(schema, dict) else "true")
    return [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=250, logit_bias=biases((5.0, 2.0, 0.0)[seed % 3]), structured_outputs=wish)
        for seed in range(count)
    ]


@pytest.mark.parametrize(
    ("draft", "schemas"),
    [("draft2020-12", SCHEMAS), ("draft7", [s for s in SCHEMAS if "prefixItems" not in str(s)] + DRAFT_7)],
)
def test_whatever_is_written_validates(llm: LLM, draft: str, schemas: list[Any]) -> None:
    dialect: Any = validators.validator_for({"$schema": DIALECTS[draft]})
    named = [{"$schema": DIALECTS[draft], **s} if isinstance(s, dict) else s for s in schemas]
    params = [(schema, p) for schema in named for p in draws(schema, 6)]
    outputs = llm.generate(["x"] * len(params), [p for _, p in params], use_tqdm=False)
    finished: dict[str, int] = {}
    for (schema, _), output in zip(params, outputs, strict=True):
        choice = output.outputs[0]
        assert choice.error is None
        finished.setdefault(str(schema), 0)
        if choice.finish_reason == "stop":
            finished[str(schema)] += 1
            assert problem(choice.text, schema, dialect) == "", (schema, choice.text)
    assert not [schema for schema, count in finished.items() if not count], "every schema can be finished"
