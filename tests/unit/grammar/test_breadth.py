"""Objects with many properties that may be left out: written to their end, or refused before they are begun."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from octavo.errors import InvalidRequest
from octavo.grammar.breadth import MAX_OPTIONAL, breadth, too_broad
from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.source import grammar_source
from octavo.protocol.engine import Vocabulary
from octavo.protocol.params import StructuredOutputsParams

EOS = 256
CLOSINGS = ['"', '",', '", "', '","', '",\n', '"},', '"},"', '"}, {"', '"]', '"],', '"],"', '"}}', '"]}', '"}]}']
"""What the tokens of large vocabularies have behind a character of a string: each is another way to go on behind it."""
ENDINGS = [f"{letter}{closing}".encode() for letter in "abcdefgh.!?)" for closing in CLOSINGS]
VOCABULARY = Vocabulary([bytes([i]) for i in range(256)] + [b"<eos>", *ENDINGS], [EOS], [EOS])
TEXT = {"type": "string"}


def optional(count: int, value: Any = TEXT, name: str = "p") -> dict[str, Any]:
    return {"type": "object", "properties": {f"{name}{i}": value for i in range(count)}, "additionalProperties": False}


def problem_on_the_way(schema: Any, text: str) -> str:
    """What goes wrong while `text` is written, with a mask before each byte."""
    compiler = GrammarCompiler()
    compiler.set_vocabulary(VOCABULARY)
    try:
        compiled: Future[Any] = compiler.compile(grammar_source(StructuredOutputsParams(json=schema)))
        matcher = compiler.matcher(compiled)
        words = np.zeros(compiler.num_words, np.int32)
        for byte in text.encode():
            matcher.fill(words)
            if matcher.problem() or not matcher.accept(byte):
                return matcher.problem() or f"{byte} is not allowed"
        return "" if matcher.complete else "it has no end"
    finally:
        compiler.close()


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (optional(120), {"p0": "a", "p119": "b"}),
        (optional(MAX_OPTIONAL), {"p0": "a", "p1": "", "p479": "b"}),
        (optional(MAX_OPTIONAL, {}), {"p0": {"a": ["b"]}, "p7": 1.5, "p9": None}),
        ({**optional(MAX_OPTIONAL), "additionalProperties": True}, {"p0": "a", "p470": "c", "free": [1]}),
        (optional(2, optional(MAX_OPTIONAL)), {"p0": {"p0": "a", "p3": "b"}, "p1": {"p0": "a"}}),
        ({"type": "array", "items": optional(MAX_OPTIONAL)}, [{"p0": "a"}, {"p1": "b"}]),
        ({"anyOf": [optional(MAX_OPTIONAL // 4, name=name) for name in "abcd"]}, {"d1": "x", "d100": "y"}),
    ],
)
def test_what_is_accepted_can_be_written_in_every_state(schema: Any, value: Any) -> None:
    assert problem_on_the_way(schema, json.dumps(value)) == ""


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (optional(MAX_OPTIONAL + 1), "at $: 481 of its properties may be left out"),
        ({"items": optional(2000)}, "at $.items: 2000 of its properties"),
        ({"items": {"anyOf": [{"type": "null"}, optional(481)]}}, "at $.items.anyOf[1]: 481 of its properties"),
        (
            {"properties": {"a": {"anyOf": [optional(300), optional(300)]}}},
            "at $.properties.a: 600 of the properties of its 2 alternatives",
        ),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": optional(300)}}, "at $: 600 of the properties of its 2"),
        ({**optional(300), "anyOf": [{"required": ["p0"]}, {"required": ["p1"]}]}, "at $: 600 of the properties of its 2 alternatives"),
        ({"allOf": [optional(300), {"properties": {f"q{i}": TEXT for i in range(200)}}]}, "at $: 500 of its properties"),
    ],
)
def test_what_could_not_be_followed_is_refused_at_once(schema: Any, words: str) -> None:
    """The engine says so of the root only; elsewhere a reply would break off."""
    with pytest.raises(InvalidRequest, match="at most 480") as refused:
        grammar_source(StructuredOutputsParams(json=schema))
    assert words in str(refused.value)


def test_properties_required_elsewhere_are_none_that_may_be_left_out() -> None:
    names = [f"p{i}" for i in range(600)]
    assert breadth({"allOf": [optional(600), {"required": names}]}) == 1
    assert breadth({"required": names, "$ref": "#/$defs/a", "$defs": {"a": {"required": ["b"], "properties": {"b": {}, "c": {}}}}}) == 2
    assert breadth({"anyOf": [optional(7), {"type": "null"}, {"enum": [[], {}, 1]}]}) == 7 + 4


def test_references_in_circles_end() -> None:
    node: dict[str, Any] = {"$ref": "#/$defs/a"}
    assert breadth({"anyOf": [node, {"type": "null"}], "$defs": {"a": {"anyOf": [node, {"properties": {"next": node}}]}}}) >= 2


def test_what_is_no_schema_is_counted_all_the_same() -> None:
    odd: list[Any] = [True, 3, None, [], "x", {"type": True}, {"type": 3, "properties": []}, {"required": 3, "properties": {"a": 1}}]
    odd += [{"anyOf": 3}, {"anyOf": [3, None]}, {"allOf": {}}, {"$ref": 3}, {"enum": 3}, {"enum": [3, {}]}, {"required": [3]}]
    for schema in odd:
        assert breadth(schema) <= 3
        assert too_broad(schema) is None
