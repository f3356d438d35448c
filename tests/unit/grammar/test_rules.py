"""What is said of grammars that users wrote: rules that never end, places in GBNF, schemas inside."""

from __future__ import annotations

import pytest

from octavo.errors import InvalidRequest
from octavo.grammar.rules import never_ends, parts_of
from octavo.grammar.source import grammar_source
from octavo.protocol.params import StructuredOutputsParams


@pytest.mark.parametrize(
    "text",
    [
        'start: "a" start',
        'start: start "a"',
        'start: "a" start | start "b"',
        'start: x\nx: y "b"\ny: "c" x | "d" y',
        'start: ("x" start)+',
        'start: ("x" | "y") (start "z" | start)',
        "start: x{2,3}\nx: x",
    ],
)
def test_rules_that_need_themselves(text: str) -> None:
    assert never_ends(text) == "start"


@pytest.mark.parametrize(
    "text",
    [
        'start: "a" start | "b"',
        'start: "a" start?',
        'start: "a" [start]',
        'start: ("a" start)*',
        'start: "a" (start | "b")',
        'start: "a" start{0,3}',
        'start: x\nx: y "b"\ny: "c" x | "d"',
        'start: "start: start"',
        "start: /start|\\/start/ // start",
        'start: %json {"properties": {"start": {}}}',
        'start: "a" unused_is_fine\nunused_is_fine: "b"\nloop: loop',
        'start[capture]: "a"\n%ignore / /',
        "start: ???",
        'start: "a" missing',
        "",
    ],
)
def test_rules_that_may_end_or_cannot_be_told(text: str) -> None:
    assert never_ends(text) == ""


def test_schemas_are_found_with_their_lines() -> None:
    parts = parts_of('start: "a" b\n\nb: %json {"type": "object"} | %json {"type": 5\n')
    assert parts.schemas == [(3, {"type": "object"})]
    assert '%json {"type": 5' in parts.rest
    assert "object" not in parts.rest


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a" root', "the rule 'root' needs itself without end"),
        ('root ::= "a"{3,2}', "in the rule 'root' (line 1): range end must be"),
        ('# b ::= "x"\nroot ::= my-part "x"\n\n# c\nmy-part ::= [z-a]\n', "in the rule 'my-part' (line 5): invalid regex"),
        (
            'start: "a" b\n\nb: %json {"properties": {"x": {"uniqueItems": true}}}',
            "line 3: the JSON schema cannot be used: at $.properties.x:",
        ),
    ],
)
def test_messages_are_about_what_was_given(grammar: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar_source(StructuredOutputsParams(grammar=grammar))
    assert message in str(refused.value)
    assert "%llguidance" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json_object": True, "whitespace_pattern": "[ ]" * 100}, "whitespace_pattern has 300 characters; 256 are allowed"),
        ({"choice": ["x" * 600_000, "y" * 600_000]}, "choice has 1200000 characters in all; 1048576 are allowed"),
    ],
)
def test_sizes(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        grammar_source(StructuredOutputsParams(**fields))  # type: ignore[arg-type]
