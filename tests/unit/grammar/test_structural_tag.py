"""Structural tags: every part ends where the next begins, or the tag is refused."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.grammar.source import grammar_source
from octavo.protocol.params import StructuredOutputsParams
from tests.support.grammars import matches

ANY = {"type": "any_text"}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
OBJECT = {"type": "json_schema", "json_schema": {"type": "object", "additionalProperties": False}}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def tag(content: dict[str, Any], begin: str = "<a>", end: Any = "</a>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<"], "tags": list(tags), **options}


def separated(*tags: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": list(tags), "separator": ",", **options}


def source_of(form: dict[str, Any]) -> str:
    return grammar_source(StructuredOutputsParams(structural_tag={"format": form}))


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (sequence(ANY, const("END")), ["END", "abc123 END", "END and END"], ["abc", "END more"]),
        (sequence(ANY, ANY), ["", "hello"], []),
        (sequence(ANY, const("X"), NUMBER), ["X5", "ab X-12"], ["ab", "X", "aXbX5"]),
        (sequence(ANY, tag(NUMBER)), ["<a>1</a>", "so: <a>1</a>"], ["so: <a>x</a>", "<a>1</a>!"]),
        (sequence(ANY, tag(ANY), NUMBER), ["so: <a>x</a>5"], ["so: <a>x</a>", "<a>x</a>y</a>5"]),
        (sequence(regex("[a-z]*"), const("z")), ["z", "abcz", "zzz"], ["abc", ""]),
        (sequence(regex("[a-z]+"), regex("[a-z0-9]+")), ["ab", "abc9"], ["a", "9"]),
        (sequence(regex("[a-z]*"), const("z"), NUMBER), ["abcz7", "z7"], ["abc7"]),
        (sequence(regex("[a-z]+"), OBJECT), ["abc{}"], ["abc", "{}"]),
        (tag(ANY), ["<a></a>", "<a>hello</a>"], ["<a>hello", "<a>x</a></a>"]),
        (tag(ANY, end=""), ["<a>", "<a>hello world"], ["hello"]),
        (tag(ANY, end=["</a>", "</b>"]), ["<a>x</a>", "<a>x</b>"], ["<a>x</c>"]),
        (tag(ANY, end=["</a>", ""]), ["<a>x</a>", "<a>x"], ["x"]),
        (tag(NUMBER, end=["</a>", ""]), ["<a>5</a>", "<a>5"], ["<a>5</b>"]),
        (tag(regex(".*")), ["<a>hello</a>"], ["<a>hello", "<a>x</a>y"]),
        (tag(either(ANY, const("x"))), ["<a>x</a>", "<a>hello</a>"], ["<a>hello", "<a>x</a></a>"]),
        (tag(sequence(const("q"), ANY)), ["<a>qhello</a>"], ["<a>hello</a>", "<a>q</a>."]),
        (tag(sequence(NUMBER, ANY)), ["<a>5 hello</a>"], ["<a>hello</a>", "<a>5</a>."]),
        (tag(either(NUMBER, tag(ANY, "<b>", "</b>"))), ["<a>5</a>", "<a><b>x</b></a>"], ["<a>x</a>"]),
        (either(ANY, const("X")), ["", "X", "hello"], []),
        (either(NUMBER, sequence(ANY, const("."))), ["5", "five."], ["five"]),
        (either(tag(ANY), tag(regex("[0-9]+"), "<b>", "</b>")), ["<a>x</a>", "<b>5</b>"], ["<b>x</b>", "<a>x</a>y</a>"]),
        (sequence(tag(ANY, "<think>", "</think>"), NUMBER), ["<think>hm</think>5"], ["<think>hm5"]),
        (sequence(tag(ANY), ANY), ["<a>x</a>", "<a>x</a>rest of it"], ["<a>x"]),
        (triggered(tag(ANY), tag(ANY, "<ab>", "</ab>")), ["", "x", "x <ab>q</a></ab> y <a>1</a>"], ["<c>", "<a>1"]),
        (triggered(tag(ANY), at_least_one=True), ["x <a>1</a> y"], ["", "x"]),
        (triggered(tag(ANY), stop_after_first=True), ["", "hello", "hello <a>1</a>"], ["hello <a>1", "<a>1</a>."]),
        (triggered(tag(ANY), stop_after_first=True, at_least_one=True), ["hello <a>1</a>"], ["", "hello", "<a>1</a>."]),
        (sequence(triggered(tag(ANY)), const("Z")), ["Z", "x <a>q</a>Z"], ["x <a>q</a>"]),
        (sequence(triggered(tag(ANY), stop_after_first=True, at_least_one=True), NUMBER), ["x <a>q</a>5"], ["5"]),
        (separated(tag(ANY)), ["", "<a>1</a>", "<a>1</a>,<a>2</a>"], ["<a>1</a><a>2</a>"]),
        (separated(tag(ANY), stop_after_first=True, at_least_one=True), ["<a>1</a>"], ["", "<a>1</a>,<a>2</a>"]),
        (sequence(separated(tag(NUMBER), at_least_one=True), const(".")), ["<a>1</a>."], ["."]),
    ],
)
def test_parts_end_where_the_next_begin(form: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    source = source_of(form)
    assert [text for text in right if not matches(source, text)] == []
    assert [text for text in wrong if matches(source, text)] == []


@pytest.mark.parametrize(
    ("form", "place"),
    [
        (sequence(ANY, OBJECT), "format.elements[0]: any text may stand here, so that what follows (format.elements[1])"),
        (sequence(const("x"), sequence(NUMBER, ANY), triggered(tag(ANY))), "format.elements[1].elements[1]: any text"),
        (sequence(either(NUMBER, ANY), const("X")), "format.elements[0].elements[1]: any text"),
        (tag(either(ANY, OBJECT)), "format.content.elements[0]: any text may stand here, so that what follows (format.end)"),
        (sequence(regex(".*"), NUMBER), "format.elements[0]: the pattern takes what follows (format.elements[1]) for more"),
        (sequence(regex("a.*"), const("b"), regex("[^;]*"), OBJECT), "format.elements[2]: the pattern takes"),
        (sequence(regex("[^<]+"), NUMBER), "format.elements[0]: the pattern takes what follows (format.elements[1])"),
        (sequence(regex("[a-z0-9-]*"), either(NUMBER, tag(NUMBER, "7"))), "format.elements[0]: the pattern takes"),
        (sequence(tag(ANY, end=""), OBJECT), "format.elements[0].content: any text"),
        (triggered(tag(ANY, end="")), "format.tags[0].content: any text may stand here"),
        (separated(tag(ANY, end="")), "format.tags[0].content: any text may stand here, so that what follows (format.separator)"),
        (sequence(triggered(tag(ANY), stop_after_first=True), NUMBER), "format.elements[0]: any text"),
    ],
)
def test_parts_that_would_never_end_are_refused(form: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        source_of(form)
    assert f"structural_tag: at {place}" in str(refused.value)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (sequence(ANY, regex("(")), "at format.elements[1].pattern: invalid regex"),
        (tag({"type": "grammar", "grammar": "start: undefined"}), "at format.content.grammar: "),
        (
            tag({"type": "grammar", "grammar": 'start: "a"\n  | %json {"properties": {"a": {"const": -9223372036854775808}}}'}),
            "at format.content.grammar: the JSON schema in line 2, at $.properties.a.const: -9223372036854775808",
        ),
        (tag({"type": "grammar", "grammar": 'root ::= "a"{3,2}'}), "at format.content.grammar: in the rule 'root' (line 1): "),
    ],
)
def test_errors_are_about_what_was_written(form: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        source_of(form)
    said = str(refused.value)
    assert message in said
    assert "TEXT" not in said
    assert "part_" not in said


def test_a_long_path_is_cut() -> None:
    deep = ANY
    for _ in range(40):
        deep = sequence(deep)
    with pytest.raises(InvalidRequest, match=r"at format\.elements\[0\]\..* \.\.\. .*\.elements\[0\]: nested more than 32") as refused:
        source_of(deep)
    assert len(str(refused.value)) < 250
