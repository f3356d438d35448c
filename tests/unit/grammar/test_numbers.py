"""Numbers that a double cannot hold: kept exactly or refused, never another number."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidRequest
from octavo.frontend.structured import GrammarDoor
from octavo.grammar.check import check_parameters
from octavo.grammar.source import grammar_source
from octavo.protocol.params import StructuredOutputsParams
from tests.support.grammars import matches


def source_of(schema: Any, **options: Any) -> str:
    return grammar_source(StructuredOutputsParams(json=schema, **options))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": 1234567890123456789}, "$.const: 1234567890123456789 has more digits"),
        ({"const": -1234567890123456789}, "$.const"),
        ({"enum": [9007199254740993, "x"]}, "$.enum[0]"),
        ({"enum": ["x", {"a": [1, 9007199254740993]}]}, "$.enum[1].a[1]"),
        ({"const": 12345678901234567890123}, "$.const"),
        ({"const": 10**50 + 1}, "$.const: a number of more than 40 digits"),
        ({"const": 2**64}, "$.const"),
        ({"const": 123456789.12345679}, "$.const: 123456789.12345679"),
        ({"properties": {"a": {"type": "integer", "minimum": 9007199254740993}}}, "$.properties.a.minimum"),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "$.maximum: 18446744073709551615 is out of the range"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 0}, "$.minimum: -9223372036854775808 is out of the range"),
        ({"type": "number", "maximum": 1.7976931348623157e308}, "$.maximum: 1.7976931348623157e+308 is out of"),
        ({"type": "integer", "exclusiveMinimum": 9007199254740992}, "$.exclusiveMinimum: 9007199254740992 is too large"),
        ({"type": "integer", "exclusiveMaximum": -(10**17)}, "Use maximum instead"),
        ({"type": "number", "minimum": 70447811526100952}, "$.minimum"),
        ({"type": "number", "multipleOf": 0.30000000000000004}, "$.multipleOf"),
        ({"type": "integer", "minimum": 10**18}, "at $: the range of this number is too large"),
    ],
)
def test_what_would_be_rounded_is_refused_with_its_path(schema: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        source_of(schema)
    assert place in str(refused.value)
    assert "Some(" not in str(refused.value)
    with pytest.raises(InvalidRequest, match=r"tools\[0\]"):
        check_parameters([{"strict": True, "parameters": {"type": "object", "properties": {"a": schema}}}])
    check_parameters([{"strict": False, "parameters": {"type": "object", "properties": {"a": schema}}}])


def test_the_least_number_of_64_bits_does_not_end_the_process() -> None:
    """The engine would negate it without end, and overflow its stack."""
    door = GrammarDoor()
    least: list[dict[str, Any]] = [{"const": -(2**63)}, {"enum": [-(2**63)]}, {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}]
    older = "http://json-schema.org/draft-07/schema#"
    for schema in least:
        hidden = [{"$ref": "#/x", "x": schema}, {"$ref": "#/x/0/y", "x": [{"y": schema}]}, {"$schema": older, "items": [schema]}]
        hidden += [
            {"$schema": older, "items": [True], "additionalItems": schema},
            {"$ref": "http://a/b", "x": {"$id": "http://a/b", **schema}},
        ]
        for one in (schema, *hidden):
            with pytest.raises(InvalidRequest, match=r"-9223372036854775808|a number below|cannot be used"):
                door.check(StructuredOutputsParams(json=one))
            try:
                door.check(StructuredOutputsParams(json=one, best_effort=True))
            except InvalidRequest:
                continue
    door.close()


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"const": 9007199254740992}, "9007199254740992", "9007199254740993"),
        ({"const": 2**63 - 1}, "9223372036854775807", "9223372036854775808"),
        ({"const": 10**20}, "100000000000000000000", "100000000000000000001"),
        ({"const": 0.1}, "0.1", "0.10000000000000001"),
        ({"const": 1e-7}, "0.0000001", "0.0000002"),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, "9223372036854775807", "9223372036854775808"),
        ({"type": "integer", "minimum": 1 - 2**53, "maximum": 2**53 - 1}, "-9007199254740991", "-9007199254740992"),
        ({"type": "integer", "multipleOf": 10, "minimum": 9007199254740985}, "9007199254740990", "9007199254740980"),
    ],
)
def test_what_a_double_holds_is_kept(schema: Any, right: str, wrong: str) -> None:
    source = source_of(schema)
    assert matches(source, right)
    assert not matches(source, wrong)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"const": 1234567890123456789}, "1234567890123456789", '"x"'),
        ({"enum": [9007199254740993, "x", 7]}, "9007199254740993", '"y"'),
        ({"enum": [9007199254740993, "x"]}, '"x"', "1.5"),
        ({"enum": [[9007199254740993], 1], "anyOf": [{"type": "array"}, {"type": "null"}]}, "[9007199254740993]", "null"),
        ({"type": "integer", "minimum": 9007199254740993, "maximum": 10**17}, "9007199254740993", "100000000000000001"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-9223372036854775808", "1.5"),
    ],
)
def test_where_keywords_may_be_left_out_the_right_number_can_be_written(schema: Any, right: str, wrong: str) -> None:
    source = source_of(schema, best_effort=True)
    assert matches(source, right)
    assert not matches(source, wrong)


NUMBERS = st.one_of(
    st.integers(-(2**66), 2**66),
    st.integers(-(10**6), 10**6),
    st.builds(lambda n, zeros: n * 10**zeros, st.integers(-99, 99), st.integers(0, 18)),
    st.floats(-1e6, 1e6).map(lambda x: round(x, 6)),
    st.floats(allow_nan=False, allow_infinity=False),
)


@given(NUMBERS)
@settings(max_examples=150, deadline=None)
def test_a_constant_is_itself_or_refused(number: float) -> None:
    try:
        source = source_of({"const": number})
    except InvalidRequest as refused:
        assert "$.const" in str(refused)
        return
    text = format(Decimal(repr(number)), "f")
    assert matches(source, text.rstrip("0").rstrip(".") if "." in text else text)


@given(st.sampled_from(["integer", "number"]), st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), NUMBERS)
@settings(max_examples=200, deadline=None)
def test_a_bound_is_where_it_is_or_refused(kind: str, key: str, bound: float) -> None:
    try:
        source = source_of({"type": kind, key: bound})
    except InvalidRequest:
        return
    for number in (int(bound) + step for step in (-1000, -1, 0, 1, 1000)):
        within = {
            "minimum": number >= bound,
            "maximum": number <= bound,
            "exclusiveMinimum": number > bound,
            "exclusiveMaximum": number < bound,
        }[key]
        assert matches(source, str(number)) == within


@pytest.mark.parametrize(("one", "other"), [(240_000, 120_000), (99_999, 66_666), (0.5, 240_000), (1.5, 60), (0.01, 86_400), (12, 18)])
def test_two_divisors_of_one_value_are_kept_or_refused(one: float, other: float) -> None:
    """The engine works out what both divide in 32 bits."""
    scale = 1000
    both = math.lcm(round(one * scale), round(other * scale)) // scale
    try:
        source = source_of({"allOf": [{"type": "number", "multipleOf": one}, {"multipleOf": other}]})
    except InvalidRequest as refused:
        assert max(one, other) > 60_000
        assert "at $.allOf[" in str(refused)
        return
    assert [matches(source, str(number)) for number in (both, 3 * both, both + 1, both // 2)] == [True, True, False, False]


def test_divisors_of_alternatives_do_not_count_together() -> None:
    source = source_of({"anyOf": [{"type": "integer", "multipleOf": 100_000}, {"type": "integer", "multipleOf": 60_000}]})
    assert matches(source, "60000")
    assert not matches(source, "90000")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False, "minProperties": 2},
            "asks for more",
        ),
        ({"type": "number", "minimum": "x"}, "minimum must be a number"),
        ({"type": "number", "multipleOf": 0}, "multipleOf must be above 0"),
        ({"enum": []}, "its list of values or alternatives is empty"),
    ],
)
def test_what_the_engine_says_of_a_wrong_schema_is_put_into_words(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        source_of(schema)
