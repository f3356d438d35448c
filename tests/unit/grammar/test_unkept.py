"""What the engine would take and not keep: names written twice, names in another spelling, expressions that are none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.grammar.check import check_parameters
from octavo.grammar.json_schema import prepared
from octavo.grammar.lark import json_options
from octavo.grammar.library import TOO_COMPLEX, one_line
from octavo.grammar.source import grammar_source, json_source
from octavo.protocol.params import StructuredOutputsParams
from tests.support.grammars import matches

INTEGER = {"type": "integer"}
FREE: dict[str, Any] = {"type": "object", "additionalProperties": INTEGER}
NAMED: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]}


def source(schema: Any) -> str:
    return grammar_source(StructuredOutputsParams(json=schema))


def refusal(**wish: Any) -> str:
    with pytest.raises(InvalidRequest) as refused:
        grammar_source(StructuredOutputsParams(**wish))
    return str(refused.value)


UNCOUNTED: list[tuple[Any, str]] = [
    ({**FREE, "minProperties": 2, "maxProperties": 3}, "$"),
    ({**FREE, "minProperties": 2.0}, "$"),
    ({"type": "object", "minProperties": 2}, "$"),
    ({"minProperties": 2}, "$"),
    ({"type": "object", "patternProperties": {"^x": INTEGER}, "additionalProperties": False, "minProperties": 2}, "$"),
    ({**NAMED, "minProperties": 4}, "$"),
    ({**NAMED, "required": ["a", "b", "a"], "minProperties": 4}, "$"),
    ({"type": "array", "items": {**FREE, "minProperties": 5}}, "$.items"),
    ({"properties": {"x": {"anyOf": [{"type": "null"}, {**FREE, "minProperties": 2}]}}}, "$.properties.x.anyOf[1]"),
    ({"allOf": [FREE, {"minProperties": 2}]}, "$.allOf[1]"),
    ({**FREE, "anyOf": [{"minProperties": 2}, {"minProperties": 1}]}, "$.anyOf[0]"),
    ({"properties": {"x": {"$ref": "#/$defs/d"}}, "$defs": {"d": {**FREE, "minProperties": 2}}}, "$.$defs.d"),
    ({"properties": {"x": {"$ref": "#d"}}, "$defs": {"d": {"$anchor": "d", **FREE, "minProperties": 2}}}, "$.$defs.d"),
    ({"properties": {"x": {"$ref": "#/$defs/o", "required": ["a"], "minProperties": 2}}, "$defs": {"o": FREE}}, "$.properties.x"),
    ({"$ref": "#/definitions/d", "additionalProperties": False, "definitions": {"d": {**FREE, "minProperties": 2}}}, "$.definitions.d"),
]


@pytest.mark.parametrize(("schema", "place"), UNCOUNTED)
def test_a_count_that_one_name_written_twice_would_meet_is_refused(schema: Any, place: str) -> None:
    assert f"at {place}: minProperties " in refusal(json=schema)
    assert f"at {place}: minProperties " in refusal(grammar=f"start: %json {json.dumps(schema)}")
    assert f"at {place}: minProperties " in refusal(structural_tag={"format": {"type": "json_schema", "json_schema": schema}})
    # Where a schema is kept as far as can be, it is left out.
    assert json_source(schema, json_options(lenient=True), "tools")


def test_parameters_of_a_strict_tool_are_held_to_the_same() -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": {**FREE, "minProperties": 2}}}}
    check_parameters([tool])
    with pytest.raises(InvalidRequest, match=r"at \$\.properties\.x: minProperties 2 cannot"):
        check_parameters([{**tool, "strict": True}])


@pytest.mark.parametrize(
    ("schema", "fits", "wrong"),
    [
        ({**FREE, "minProperties": 1}, ['{"x":1}', '{"x":1,"x":2}'], ["{}"]),
        ({**FREE, "maxProperties": 2}, ["{}", '{"x":1,"x":2}'], ['{"x":1,"y":2,"z":3}']),
        ({**NAMED, "minProperties": 3}, ['{"a":1,"b":2,"c":3}'], ['{"a":1,"b":2}', '{"a":1,"b":2,"a":3}']),
        ({**NAMED, "additionalProperties": False, "minProperties": 2}, ['{"a":1,"b":2}'], ['{"a":1,"a":2}']),
        ({"allOf": [{**NAMED, "additionalProperties": False}, {"minProperties": 2}]}, ['{"a":1,"b":2}'], ['{"a":1,"a":2}']),
        (
            {"type": "object", "required": ["a", "b"]},
            ['{"a":1,"b":2,"c":3,"c":4}'],
            ['{"a":1,"a":2}', '{"a":1,"b":2,"b":3}', '{"c":1,"c":2}'],
        ),
        (
            {"type": "object", "required": ["xa"], "patternProperties": {"^x": INTEGER}},
            ['{"xa":1,"xb":2}'],
            ['{"xa":1,"xb":2,"xa":3}', '{"xb":1,"xb":2}', '{"xa":null}'],
        ),
    ],
)
def test_counts_that_can_be_kept_are(schema: Any, fits: list[str], wrong: list[str]) -> None:
    for text in fits:
        assert matches(source(schema), text), text
    for text in wrong:
        assert not matches(source(schema), text), text


TEXTS: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": {"type": "string"}}


@pytest.mark.parametrize(
    "schema",
    [
        TEXTS,
        {"type": "object", "patternProperties": {"^a$": INTEGER}, "additionalProperties": {"type": "string"}},
        {"type": "object", "required": ["a"], "properties": {"a": INTEGER}},
    ],
)
def test_a_name_has_one_spelling(schema: Any) -> None:
    r"""{"a": 1, "\u0061": "x"} is {"a": "x"}."""
    sources = [
        source(schema),
        grammar_source(StructuredOutputsParams(grammar=f"start: %json {json.dumps(schema)}")),
        grammar_source(StructuredOutputsParams(structural_tag={"format": {"type": "json_schema", "json_schema": schema}})),
    ]
    for one in sources:
        assert matches(one, '{"a":1,"b":"x"}')
        assert matches(one, '{"a":1,"\\n\\"é":"x\\t"}')
        for name in (r"\u0061", "a"):
            assert not matches(one, f'{{"a":1,"{name}":"x"}}')


def test_strings_of_closed_objects_have_all_spellings() -> None:
    assert matches(
        source({**NAMED, "properties": {"a": {"type": "string"}, "b": True}, "additionalProperties": False}), r'{"a":"\u001b","b":1}'
    )


@pytest.mark.parametrize("pattern", ["\\", "abc\\", "^\\", "a\\\\\\"])
def test_an_expression_that_ends_in_a_backslash_is_refused(pattern: str) -> None:
    assert "regex cannot be used: the regular expression ends in a backslash" in refusal(regex=pattern)
    assert "at $.items: the regular expression ends" in refusal(json={"items": {"type": "string", "pattern": pattern}})
    assert "at $: the regular expression ends" in refusal(json={"patternProperties": {pattern: INTEGER}})
    assert "whitespace_pattern cannot be used: the regular" in refusal(json={"type": "object"}, whitespace_pattern=pattern)
    grammar_source(StructuredOutputsParams(regex=pattern + "\\"))


def test_what_the_engine_says_of_its_inside_is_said_in_our_words() -> None:
    for theirs in (
        "lexer error: too many expressions constructed <non-verbose/>",
        "Unable to determine if regex is empty: (And (Regex /a/))",
    ):
        assert one_line(theirs) == TOO_COMPLEX
    assert one_line("rule\n  not found <non-verbose/>") == "rule not found"
    assert "too complex" in refusal(json={"type": "string", "minLength": 100_000, "pattern": "(a|b|ab){1000}"})


def test_counts_are_left_out_only_where_they_cannot_be_kept() -> None:
    kept = {**NAMED, "minProperties": 3, "maxProperties": 4}
    assert prepared(kept, lenient=True) == kept
    assert "minProperties" not in prepared({**NAMED, "minProperties": 4}, lenient=True)
    assert prepared({**NAMED, "minProperties": 2}, lenient=True, closed=True)["minProperties"] == 2
    assert prepared({"minProperties": 9}) == {"minProperties": 9}
