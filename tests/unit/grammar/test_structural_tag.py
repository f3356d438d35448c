"""Structural tags: what a format says is what can be written, and every text of it can end."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.grammar.source import grammar_source
from octavo.protocol.params import StructuredOutputsParams
from tests.support.grammars import matches

ANY = {"type": "any_text"}
OBJECT = {"type": "json_schema", "json_schema": {"type": "object"}}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def seq(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def tag(content: Any, end: Any = "</a>") -> dict[str, Any]:
    return {"type": "tag", "begin": "<a>", "content": content, "end": end}


def triggered(**more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag(OBJECT)], **more}


def source_of(form: Any) -> str:
    return grammar_source(StructuredOutputsParams(structural_tag={"format": form}))


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (seq(ANY, const("END")), ["abc123 END", "END", "x END y END"], ["", "END x"]),
        (seq(ANY, tag(OBJECT)), ["hi <a>{}</a>", "<a>{}</a>"], ["hi", "<a>x</a>"]),
        (seq(ANY, const("!"), OBJECT), ["hi!{}", "!{}"], ["hi{}", "hi!x"]),
        (seq(OBJECT, const(";"), ANY), ["{};", "{}; any"], ["{}"]),
        (seq(regex("[a-z]*"), const("z")), ["abcz", "z"], ["abc"]),
        (seq(const("x"), one_of(const("y"), regex("z+")), ANY), ["xy", "xzzz", "xy any"], ["x", "y"]),
        (seq(const("x"), tag(const("y"))), ["x<a>y</a>"], ["xy", "x<a></a>"]),
        (tag(regex(".*")), ["<a>hello</a>", "<a></a>"], ["<a>hello", "<a>b</a>c"]),
        (tag(one_of(ANY, const("x"))), ["<a>hello</a>", "<a>x</a>"], ["<a>"]),
        (tag(seq(const("q"), ANY)), ["<a>qhello</a>", "<a>q</a>"], ["<a>hello</a>"]),
        (tag(regex("[0-9]+")), ["<a>12</a>"], ["<a></a>", "<a>x</a>"]),
        (tag(ANY, ""), ["<a>hello world", "<a>"], ["hello"]),
        (tag(ANY, ["</a>", "</b>"]), ["<a>hello</b>"], ["<a>hello"]),
        (tag(ANY, ["</a>", ""]), ["<a>hello</a>", "<a>hello"], ["hello"]),
        (tag(regex("[0-9]+"), ["</a>", ""]), ["<a>1</a>", "<a>1"], ["<a>", "<a>1</b>"]),
        (triggered(), ["hello", "", "a <a>{}</a> b <a>{}</a> c"], ["a <a>x</a>", "a <a>{}"]),
        (triggered(stop_after_first=True), ["hello", "", "hello <a>{}</a>"], ["hello <a>{}</a> x", "<a>"]),
        (triggered(stop_after_first=True, at_least_one=True), ["hello <a>{}</a>"], ["hello", "", "<a>{}</a> x"]),
    ],
)
def test_texts_of_a_format(form: Any, right: list[str], wrong: list[str]) -> None:
    source = source_of(form)
    assert [text for text in right if not matches(source, text)] == []
    assert [text for text in wrong if matches(source, text)] == []


def nested(form: Any, levels: int) -> Any:
    for _ in range(levels):
        form = seq(form)
    return form


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (seq(ANY, OBJECT), "format.elements[0]: any text has no end before what follows"),
        (seq(const("x"), ANY, one_of(OBJECT, const("y"))), "format.elements[1]: any text has no end"),
        (tag(regex("(")), "format.content.pattern: the regular expression cannot be read: unclosed group"),
        (seq(regex("["), OBJECT), "format.elements[0].pattern: the regular expression cannot be read: unclosed character class"),
        (nested(const("x"), 40), " … "),
        (nested(OBJECT, 40), "nested more than 32 levels deep"),
        (seq(const("")), "format.elements[0].value: must be a non-empty string"),
        (seq(const("x"), {**ANY, "foo": 1}), "format.elements[1].foo: there is no such key"),
    ],
)
def test_places_of_what_is_refused(form: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        source_of(form)
    assert message in str(error.value)
    assert len(str(error.value)) < 300
    assert "start:" not in str(error.value)
