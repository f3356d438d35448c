"""Parts of a oneOf that exclude one another."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from octavo.errors import InvalidRequest
from octavo.grammar.overlap import Overlap
from octavo.grammar.source import grammar_source
from octavo.protocol.params import StructuredOutputsParams
from tests.support.grammars import matches


def kind(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"k": value, **more}, "required": ["k"], "additionalProperties": False}


NUMBER = {"type": "number"}
APART: list[list[Any]] = [
    [kind({"const": 1}), kind({"const": 2})],
    [kind({"const": True}), kind({"const": False})],
    [kind({"const": 1}), kind({"const": True})],
    [kind({"const": None}), kind({"const": 0})],
    [kind({"const": "a"}), kind({"enum": ["b", "c"]})],
    [kind({"enum": [1, 2]}), kind({"enum": [3]}), kind({"const": 4.5})],
    [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 6}],
    [{"type": "integer", "exclusiveMaximum": 5}, {"type": "integer", "minimum": 5}],
    [{"type": "number", "exclusiveMinimum": 0}, {"type": "number", "maximum": 0}],
    [{"const": 3}, {"type": "integer", "minimum": 4, "maximum": 9}],
    [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3, "maxLength": 4}],
    [{"type": "array", "maxItems": 1, "items": NUMBER}, {"type": "array", "minItems": 2, "items": NUMBER}],
    [{"type": "integer"}, {"type": "string"}, {"type": "null"}, {"type": "boolean"}],
    [kind({"type": "integer"}), kind({"type": "string"})],
    [kind(True), {"type": "object", "properties": {"z": True}, "additionalProperties": False}],
    [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}],
    [{"anyOf": [kind({"const": 1}), kind({"const": 2})]}, kind({"const": 3})],
    [{"allOf": [kind({"const": 1})]}, kind({"const": 3})],
    [kind(kind({"const": 1})), kind(kind({"const": 2}))],
]
OVERLAPPING: list[list[Any]] = [
    [{"type": "integer"}, NUMBER],
    [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 5}],
    [{"maximum": 5}, {"minimum": 6}],
    [{"properties": {"k": {"const": 1}}, "required": ["k"]}, {"properties": {"k": {"const": 2}}, "required": ["k"]}],
    [{"type": "object", "properties": {"k": {"const": 1}}}, {"type": "object", "properties": {"k": {"const": 2}}}],
    [kind({"const": 1}), kind({"const": 1.0})],
    [kind({"enum": [1, 2]}), kind({"enum": [2, 3]})],
    [kind({"const": [1]}), kind({"const": [1.0]})],
    [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 3}],
    [{"type": ["integer", "null"]}, {"type": ["string", "null"]}],
    [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/one"}],
    [{"$ref": "#/$defs/gone"}, {"type": "integer"}],
    [{"pattern": "^a", "type": "string"}, {"pattern": "^b", "type": "string"}],
    [True, {"type": "integer"}],
]
DEFINITIONS = {"one": kind({"const": 1}), "two": kind({"const": 2})}


def with_definitions(parts: list[Any]) -> dict[str, Any]:
    return {"oneOf": parts, "$defs": DEFINITIONS}


SCALARS: list[Any] = [None, True, False, 0, 1, 1.0, 2, 3, 4, 4.5, 5, 6, 9, -1, "", "a", "b", "abc", "abcd", [], [1], [1, 2]]
VALUES = [*SCALARS, {}, *({"k": v} for v in SCALARS), *({"k": {"k": v}} for v in (1, 2)), {"z": 1}, {"k": 1, "z": 1}]


@pytest.mark.parametrize("parts", APART)
def test_parts_that_exclude_one_another_are_taken(parts: list[Any]) -> None:
    schema = with_definitions(parts)
    assert Overlap(schema).none(parts)
    source = grammar_source(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    validator = Draft202012Validator(schema)
    valid = [value for value in VALUES if validator.is_valid(value)]
    assert valid
    for value in VALUES:
        if matches(source, json.dumps(value, separators=(",", ":"))):
            assert validator.is_valid(value), value


@pytest.mark.parametrize("parts", OVERLAPPING)
def test_parts_that_may_overlap_are_not_said_to_exclude_one_another(parts: list[Any]) -> None:
    assert not Overlap(with_definitions(parts)).none(parts)


def test_no_value_is_in_two_of_those_that_exclude_one_another() -> None:
    """Every pair of all the parts above, against all the values above."""
    parts = [part for group in (*APART, *OVERLAPPING) for part in group if part != {"$ref": "#/$defs/gone"}]
    validators = [Draft202012Validator({"allOf": [part], "$defs": DEFINITIONS}) for part in parts]
    overlap = Overlap({"$defs": DEFINITIONS})
    apart = 0
    for (one, first), (other, second) in itertools.combinations(zip(parts, validators, strict=True), 2):
        if overlap.none([one, other]):
            apart += 1
            assert not [value for value in VALUES if first.is_valid(value) and second.is_valid(value)], (one, other)
    assert apart > 500


def test_what_may_overlap_is_refused_in_words_of_a_request() -> None:
    schema = {"type": "object", "properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}
    with pytest.raises(InvalidRequest, match=r"at \$\.properties\.a: the parts of this oneOf may overlap") as refused:
        grammar_source(StructuredOutputsParams(json=schema))
    assert "coerce" not in str(refused.value)


def test_a_one_of_beside_an_any_of_stays_beside_it() -> None:
    schema = {
        "anyOf": [{"type": "integer", "minimum": 3}, {"type": "string"}],
        "oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 7, "maximum": 8}],
    }
    source = grammar_source(StructuredOutputsParams(json=schema))
    assert [n for n in range(12) if matches(source, str(n))] == [3, 4, 5, 7, 8]


def test_many_parts_do_not_take_long() -> None:
    deep: Any = {"const": 1}
    for _ in range(30):
        deep = {"anyOf": [deep, deep], "oneOf": [deep, deep]}
    assert not Overlap({}).none([deep, deep, deep])
    assert not Overlap({}).none([{"type": "integer", "const": n} for n in range(500)])
