"""Wishes as grammars: what is refused, and where a schema is said to be wrong."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.grammar.divisors import too_many_states
from octavo.grammar.effort import cheap
from octavo.grammar.json_schema import malformed, prepared
from octavo.grammar.pointers import pointer
from octavo.grammar.source import check_lenient, grammar_source
from octavo.protocol.params import StructuredOutputsParams
from tests.support.grammars import matches


def refusal(**wish: Any) -> str:
    with pytest.raises(InvalidRequest) as refused:
        grammar_source(StructuredOutputsParams(**wish))
    assert refused.value.param == "structured_outputs"
    return str(refused.value)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "objekt"}, "$: "),
        ({"properties": {"a": {"type": "array", "items": {"uniqueItems": True, "type": "array"}}}}, "$.properties.a.items: "),
        ({"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(?=a)"}]}, "$.anyOf[1]: "),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"not": {"type": "null"}}}}, "$.$defs.x: "),
        ({"$ref": "#/$defs/gone"}, "$: "),
        ({"$ref": "http://example.com/x.json"}, "$: "),
        ({"properties": {"b": {"type": "null"}, "a": {"$ref": "#/$defs/gone"}}}, "$.properties.a: "),
        ({"properties": {"a": {"items": {"$ref": "http://example.com/x.json"}}}}, "$.properties.a.items: "),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/gone"}]}}}, "$.$defs.x.anyOf[0]: "),
        ({"properties": {"a": {"$ref": "#/anyOf/" + "9" * 5000}}, "anyOf": [{"type": "object"}]}, "$: "),
        ({"properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"], "type": "object"}, "$.properties.a: "),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}}, "$.properties.a: "),
    ],
)
def test_a_schema_is_refused_where_it_is_wrong(schema: Any, place: str) -> None:
    assert f"at {place}" in refusal(json=schema)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"type": "integer", "multipleOf": 1_000_003}}}, "$.properties.a: its multipleOf has"),
        ({"items": {"type": "number", "multipleOf": 99999.99}}, "$.items: its multipleOf"),
        ({"type": "integer", "multipleOf": 999_910}, "$: its multipleOf"),
        ({"type": "integer", "multipleOf": 2**24}, "$: its multipleOf"),
        ({"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 1009}]}, "$.allOf[1]: its 2 different multipleOf"),
        ({"anyOf": [{"type": "integer", "multipleOf": 99_991}, {"type": "number", "multipleOf": 99_989}]}, "$.anyOf[1]: its 2"),
        (
            {
                "allOf": [{"properties": {"a": {"multipleOf": 997}}}, {"properties": {"a": {"$ref": "#/$defs/b"}}}],
                "$defs": {"b": {"multipleOf": 1009}},
            },
            "$.allOf[1].properties.a: its 2",
        ),
        ({"properties": {f"a{i}": {"type": "integer", "multipleOf": 99_900 + 2 * i + 1} for i in range(20)}}, "$.properties.a"),
    ],
)
def test_divisors_that_take_long_are_refused_at_once(schema: Any, place: str) -> None:
    """Each takes 5 seconds to a minute to compile."""
    begun = time.process_time()
    assert f"at {place}" in refusal(json=schema)
    assert time.process_time() - begun < 0.5
    assert place.partition(" ")[0] in refusal(grammar=f"start: %json {json.dumps(schema)}")


def test_usual_divisors_do() -> None:
    usual = [0.01, 0.001, 1e-05, 0.5, 0.25, 5, 15, 60, 100, 1024, 3600, 86_400, 604_800, 1_000_000, 10_007]
    schema = {"type": "object", "properties": {f"a{i}": {"type": "number", "multipleOf": n} for i, n in enumerate(usual)}}
    grammar_source(StructuredOutputsParams(json=schema))
    grammar_source(StructuredOutputsParams(json={"type": "integer", "multipleOf": 86_400_000}))
    assert cheap(StructuredOutputsParams(json={"properties": {"a": {"multipleOf": 0.01}, "b": {"anyOf": [{"multipleOf": 5}]}}}))
    assert not cheap(StructuredOutputsParams(json={"properties": {"a": {"multipleOf": 10_007}}}))


def test_an_anchor_is_not_the_whole_schema() -> None:
    """Taken for it, it would refer to itself without end."""
    grammar_source(StructuredOutputsParams(json={"$defs": {"x": {"$anchor": "q", "type": "string"}}, "allOf": [{"$ref": "#q"}]}))
    assert too_many_states({"multipleOf": 997, "$defs": {"x": {"multipleOf": 1009}}, "properties": {"a": {"$ref": "#q"}}}) is None


def test_values_that_refer_to_one_another_without_end_are_looked_at_once() -> None:
    node = {"multipleOf": 7, "properties": {"a": {"$ref": "#"}, "b": {"anyOf": [{"$ref": "#"}, {"multipleOf": 3}]}}}
    assert too_many_states({**node, "items": {"$ref": "#/properties/b"}}) is None


def test_limits() -> None:
    assert "characters" in refusal(regex="a" * (1 << 20) + "b")
    assert "10000 are allowed" in refusal(choice=["x"] * 10_001)
    assert "must be true" in refusal(json_object=False)
    with pytest.raises(InvalidRequest, match="nothing"):
        grammar_source(StructuredOutputsParams(json="false"))
    deep: Any = {"type": "string"}
    for _ in range(3000):
        deep = {"items": deep}
    assert "JSON schema cannot be used" in refusal(json=deep)


def test_a_costly_grammar_is_refused() -> None:
    schema = {
        "properties": {f"f{i}": {"enum": [f"v{i}_{j}" for j in range(200)]} for i in range(500)},
        "required": [f"f{i}" for i in range(500)],
    }
    assert "too big" in refusal(json=schema)


STRING = {"type": "string"}
REQUIRED = {"properties": {f"q{i}": STRING for i in range(1900)}, "required": [f"q{i}" for i in range(1900)]}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {f"q{i}": STRING for i in range(2001)}}, "at $: it has 2001 properties"),
        ({"properties": {"a": {"properties": {f"q{i}": STRING for i in range(2001)}}}}, "at $.properties.a: it has 2001 properties"),
        ({"properties": {f"p{j}": {"properties": {f"q{i}": STRING for i in range(100)}} for j in range(200)}}, "more than 100000 symbols"),
        ({"properties": {f"p{j}": REQUIRED for j in range(6)}}, "have too many properties"),
        (
            {"properties": {"a": {"properties": {f"q{i}": STRING for i in range(481)}}}},
            "at $.properties.a: 481 of its properties may be left",
        ),
        ({"items": {"enum": [[]] * 1901}}, "at $.items.enum: it holds 1901 lists and objects"),
        ({"items": {"anyOf": [{"enum": [[]] * 1500}] * 7}}, "at $.items.anyOf[0]: the values of enum and const hold more than 10000"),
        ({"const": [{"a": []}] * 6000}, "at $: the values of enum and const hold more than 10000"),
    ],
)
def test_what_takes_more_than_a_second_is_refused_before_it_takes_it(schema: dict[str, Any], message: str) -> None:
    begun = time.process_time()
    assert message in refusal(json=schema)
    if "symbols" not in message:
        assert message.removeprefix("at ") in refusal(grammar=f"start: A %json {json.dumps(schema)}\nA: /a/")
    assert message in refusal(structural_tag={"format": {"type": "json_schema", "json_schema": schema}})
    assert time.process_time() - begun < 3.0


def test_a_gbnf_grammar_that_is_nested_too_deep_says_so() -> None:
    assert "nested too deep" in refusal(grammar="root ::= " + "(" * 3000 + '"a"' + ")" * 3000)
    grammar_source(StructuredOutputsParams(grammar="root ::= " + "(" * 200 + '"a"' + ")" * 200))


def test_a_schema_in_a_structural_tag_is_named() -> None:
    bad = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
    fine = {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}
    older = {"structures": [fine, {"begin": "<g>", "schema": bad, "end": "</g>"}], "triggers": ["<f", "<g"]}
    assert "structural_tag: structures[1].schema: the JSON schema cannot be used: at $.properties.a:" in refusal(structural_tag=older)
    newer = {"format": {"type": "sequence", "elements": [{"type": "regex", "pattern": "x+"}, {"type": "json_schema", "json_schema": bad}]}}
    assert "structural_tag: format.elements[1].json_schema: the JSON schema cannot be used: at $.properties.a:" in refusal(
        structural_tag=newer
    )


def test_lenient_schemas_may_have_what_cannot_be_enforced() -> None:
    check_lenient({"type": "array", "uniqueItems": True}, "tools")
    with pytest.raises(InvalidRequest, match=r"tools: .*objekt"):
        check_lenient({"type": "objekt"}, "tools")


def test_what_is_prepared() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "int32"}, "format": {"type": "string"}}}
    assert prepared(schema)["properties"]["a"] == {"type": "string"}
    assert prepared(schema)["properties"]["format"] == {"type": "string"}
    assert prepared(schema, closed=True)["additionalProperties"] is False
    assert "additionalProperties" not in schema


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ([], "$"),
        ({"type": "objekt"}, "$.type"),
        ({"properties": []}, "$.properties"),
        ({"properties": {"a": 3}}, "$.properties.a"),
        ({"items": {"anyOf": {}}}, "$.items.anyOf"),
        ({"required": "a"}, "$.required"),
        ({"required": [1]}, "$.required"),
        ({"type": ["string", "nul"]}, "$.type"),
    ],
)
def test_what_is_no_schema(schema: Any, place: str) -> None:
    found = malformed(schema)
    assert found is not None
    assert pointer(found[0]) == place


def test_what_is_a_schema() -> None:
    for schema in (True, {}, {"type": ["string", "null"]}, {"properties": {"required": {"type": "array", "items": {}}}, "required": []}):
        assert malformed(schema) is None


TAG = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"type": "object"}}, "end": "</f>"}


@pytest.mark.parametrize(
    "tag",
    [
        {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]},
        {"format": {"type": "tag", **TAG}},
        {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG], "at_least_one": True, "stop_after_first": True}},
        {"format": {"type": "tags_with_separator", "tags": [TAG], "separator": ", "}},
        {"format": {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}},
        {"format": {"type": "or", "elements": [{"type": "const_string", "value": "a/b"}, {"type": "regex", "pattern": "a/[0-9]"}]}},
        {"format": {"type": "sequence", "elements": [{"type": "grammar", "grammar": 'start: "x"'}, {"type": "any_text"}]}},
    ],
)
def test_structural_tags(tag: dict[str, Any]) -> None:
    assert grammar_source(StructuredOutputsParams(structural_tag=tag))


@pytest.mark.parametrize(
    ("tag", "place"),
    [
        ({"structures": [], "triggers": ["<"]}, "structures"),
        ({"structures": [{"begin": "<f>", "schema": {}}], "triggers": ["["]}, "begin"),
        ({"format": {"type": "tag", **TAG, "begin": ""}}, "format.begin"),
        ({"format": {"type": "tag", **TAG, "end": 3}}, "format.end"),
        ({"format": {"type": "sequence", "elements": []}}, "format.elements"),
        ({"format": {"type": "json_schema", "json_schema": 3}}, "format.json_schema"),
        ({"format": {"type": "json_schema", "json_schema": {"type": "objekt"}}}, "objekt"),
    ],
)
def test_bad_structural_tags(tag: dict[str, Any], place: str) -> None:
    assert place in refusal(structural_tag=tag)


@pytest.mark.parametrize(
    ("tag", "place"),
    [
        ({"format": {"type": "any_text", "excludes": ["Paris"]}}, "format.excludes"),
        ({"format": {"type": "any_text", "foo": 1}}, "format.foo"),
        ({"format": {"type": "tag", **TAG, "foo": 1}}, "format.foo"),
        ({"format": {"type": "tag", **TAG, "content": {"type": "any_text", "foo": 1}}}, "format.content.foo"),
        ({"format": {"type": "tag", **TAG, "content": {"type": "any_text", "excludes": ["x"]}}}, "format.content.excludes"),
        ({"format": {"type": "const_string", "value": "a", "foo": 1}}, "format.foo"),
        ({"format": {"type": "regex", "pattern": "a", "excludes": ["b"]}}, "format.excludes"),
        ({"format": {"type": "regex", "pattern": "a\\"}}, "format.pattern"),
        ({"format": {"type": "grammar", "grammar": 'start: "a"', "syntax": "lark"}}, "format.syntax"),
        ({"format": {"type": "json_schema", "json_schema": {}, "style": "minimax_xml"}}, "format.style"),
        ({"format": {"type": "json_schema", "json_schema": {}, "any_order": True}}, "format.any_order"),
        ({"format": {"type": "qwen_xml_parameter", "json_schema": {"type": "object"}, "foo": 1}}, "format.foo"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}], "foo": 1}}, "format.foo"),
        ({"format": {"type": "or", "elements": [{"type": "any_text", "foo": 1}]}}, "format.elements[0].foo"),
        ({"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG], "excludes": ["x"]}}, "format.excludes"),
        ({"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG], "at_least_one": "no"}}, "format.at_least_one"),
        ({"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [{**TAG, "foo": 1}]}}, "format.tags[0].foo"),
        ({"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [{**TAG, "type": "or"}]}}, "format.tags[0].type"),
        ({"format": {"type": "tags_with_separator", "tags": [TAG], "separator": ",", "max": 3}}, "format.max"),
        ({"format": {"type": "any_text"}, "triggers": ["<"]}, "triggers"),
        ({"structures": [{"begin": "<f>", "schema": {}, "end": "", "foo": 1}], "triggers": ["<"]}, "structures[0].foo"),
        ({"structures": [{"begin": "<f>", "schema": {}}], "triggers": ["<"], "format": {"type": "any_text"}}, "format"),
    ],
)
def test_a_structural_tag_says_nothing_that_is_not_heeded(tag: dict[str, Any], place: str) -> None:
    assert f"structural_tag: at {place}: " in refusal(structural_tag=tag)


def test_keys_of_structural_tags_that_clients_send_unset_are_fine() -> None:
    elements: list[Any] = [
        {"type": "json_schema", "json_schema": {"type": "null"}, "style": "json"},
        {"type": "tag", **TAG, "content": {"type": "any_text", "excludes": []}},
        {"type": "any_text", "excludes": []},
    ]
    assert grammar_source(
        StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})
    )


def tagged(**form: Any) -> str:
    return grammar_source(StructuredOutputsParams(structural_tag={"format": form}))


def test_a_gbnf_grammar_in_a_structural_tag() -> None:
    form = {"type": "grammar", "grammar": 'root ::= "q" tail\ntail ::= [0-9]+'}
    for source in (tagged(**form), tagged(type="tag", begin="<", content=form, end="")):
        assert matches(source, "q12" if source == tagged(**form) else "<q12")
        assert not matches(source, "q")
    assert "format.grammar has more than 1000 rules" in refusal(structural_tag={"format": {**form, "grammar": 'a ::= "b"\n' * 1001}})


@pytest.mark.parametrize(
    ("pattern", "text"), [("a/b", "a/b"), (r"a\/b", "a/b"), (r"a\\/b", "a\\/b"), ("a\nb", "a\nb"), (r"[/\\]{2}", "/\\")]
)
def test_slashes_of_a_pattern_in_a_structural_tag(pattern: str, text: str) -> None:
    assert matches(tagged(type="regex", pattern=pattern), text)
    assert not matches(tagged(type="regex", pattern=pattern), text + "/")


XML = {
    "type": "object",
    "properties": {
        "q": {"type": "string"},
        "n": {"type": "integer", "minimum": 3},
        "unit": {"enum": ["c", "f"]},
        "at": {"$ref": "#/$defs/point"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["q", "n"],
    "$defs": {"point": {"type": "array", "items": {"$ref": "#/$defs/number"}, "minItems": 2}, "number": {"type": "number"}},
}
XML_FITS = [
    "<parameter=q>Paris</parameter><parameter=n>3</parameter>",
    '\n<parameter=q>\nParis, a "city" <b>\n</parameter>\n<parameter=n>\n12\n</parameter>\n',
    "<parameter=q></parameter><parameter=n>4</parameter><parameter=unit>\nc\n</parameter>",
    "<parameter=q>x</parameter><parameter=n>4</parameter><parameter=at>[1, 2.5]</parameter><parameter=note>null</parameter>",
]
XML_WRONG = [
    "hello",
    "",
    "<parameter=q>Paris</parameter>",
    "<parameter=n>3</parameter>",
    "<parameter=q>Paris</parameter><parameter=n>2</parameter>",
    "<parameter=q>Paris</parameter><parameter=n>three</parameter>",
    "<parameter=q>x</parameter><parameter=n>4</parameter><parameter=unit>k</parameter>",
    "<parameter=q>x</parameter><parameter=n>4</parameter><parameter=at>[1]</parameter>",
    "<parameter=q>x</parameter><parameter=n>4</parameter><parameter=other>1</parameter>",
]


def test_parameters_in_xml_are_held_to_their_schema() -> None:
    form = {"type": "qwen_xml_parameter", "json_schema": XML}
    alone = tagged(**form)
    call = {"begin": "<function=f>", "content": form, "end": "</function>"}
    in_tag = tagged(type="tag", **call)
    triggered = tagged(type="triggered_tags", triggers=["<function="], tags=[call], at_least_one=True)
    for fits, texts in ((True, XML_FITS), (False, XML_WRONG)):
        for text in texts:
            assert matches(alone, text) is fits, text
            assert matches(in_tag, f"<function=f>{text}</function>") is fits, text
            assert matches(triggered, f"I say <function=f>{text}</function> so") is fits, text


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (True, "$"),
        ({"type": "array"}, "$.type"),
        ({"properties": {}, "minProperties": 1}, "$.minProperties"),
        ({"properties": {"a": {"type": "string", "maxLength": 3}}}, "$.properties.a"),
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "$.properties.a"),
        ({"properties": {"a": {"enum": ["x", 1]}}}, "$.properties.a"),
        ({"properties": {"a": {"enum": ["x</parameter>"]}}}, "$.properties.a"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}}}, "$.properties.a"),
        ({"properties": {"a": {"minimum": 3}}}, "$.properties.a"),
        ({"properties": {"a": {"$ref": "#/$defs/gone"}}}, "$.properties.a"),
        ({"properties": {"a>": {"type": "string"}}}, "$.properties.a>"),
        ({"properties": {"a": False}, "required": ["a"]}, "$.properties.a"),
        ({"properties": {}, "required": ["a"]}, "$.required"),
    ],
)
def test_what_cannot_be_enforced_in_xml_is_refused_with_its_path(schema: Any, place: str) -> None:
    said = refusal(structural_tag={"format": {"type": "qwen_xml_parameter", "json_schema": schema}})
    assert f"structural_tag: at format.json_schema: the JSON schema cannot be used: at {place}: " in said


def test_values_in_xml_are_checked_as_any_schema_is() -> None:
    schema = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    said = refusal(structural_tag={"format": {"type": "qwen_xml_parameter", "json_schema": schema}})
    assert "format.json_schema.properties.a: the JSON schema cannot be used: at $: " in said


LINK = {"type": "object", "properties": {"next": {"$ref": "#/$defs/link"}}, "required": ["next"]}
MAYBE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]}}, "required": ["next"]}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"$ref": "#"}, "$"),
        ({"anyOf": [{"$ref": "#"}]}, "$.anyOf[0]"),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "$.allOf[0]"),
        ({"$ref": "#/$defs/link", "$defs": {"link": LINK}}, "$"),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, "$.properties.a"),
    ],
)
def test_schemas_that_need_themselves_without_end(schema: dict[str, Any], path: str) -> None:
    assert f"at {path}: no text can match it" in refusal(json=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}, "required": ["a"]},
        {"$ref": "#/$defs/link", "$defs": {"link": MAYBE}},
    ],
)
def test_recursive_schemas_that_end_are_fine(schema: dict[str, Any]) -> None:
    assert grammar_source(StructuredOutputsParams(json=schema))


def test_keywords_that_say_nothing_are_no_reason_to_refuse() -> None:
    idle = {"uniqueItems": False, "minContains": 1, "maxContains": 2, "then": False, "else": False}
    assert prepared({"type": "array", **idle, "maxItems": 2.0}) == {"type": "array", "maxItems": 2}
    assert prepared({"if": {"type": "null"}, "items": {"if": True}}) == {"items": {}}
    kept = {"uniqueItems": True, "contains": {}, "minContains": 1, "if": {}, "then": {}, "minItems": 1.5}
    assert prepared(kept) == kept
    assert prepared({"properties": {"then": {}, "else": {}}}) == {"properties": {"then": {}, "else": {}}}
