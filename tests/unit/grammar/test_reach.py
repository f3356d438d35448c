"""Grammars without any text are told from those that have one."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.errors import InvalidRequest
from octavo.frontend.structured import GrammarDoor
from octavo.grammar.check import Checker
from octavo.grammar.compiler import engine_tokenizer
from octavo.grammar.reach import emptiness, first_tokens
from octavo.grammar.source import grammar_source
from octavo.protocol.engine import Vocabulary
from octavo.protocol.params import StructuredOutputsParams

NOTHING = r"[^\s\S]"
LETTERS = [bytes([i]) for i in range(256)] + [b"<eos>"]
VOCABULARY = Vocabulary([*LETTERS, *(b"a" * n for n in range(2, 60)), b'{"', b'": "', b'"na', b"name"], [256], [256])


@pytest.mark.parametrize(
    ("wish", "problem"),
    [
        ({"regex": NOTHING}, "no text"),
        ({"regex": f"abc{NOTHING}"}, "no text"),
        ({"regex": "((a{1,1000}){1,1000}){1,1000}"}, "too complex"),
        ({"grammar": f'start: "ab" X\nX: /{NOTHING}/'}, "no text"),
        ({"grammar": f'start: ("ab" | "cd") X\nX: /{NOTHING}/'}, "no text"),
        ({"grammar": 'start: "a" X "b"\nX: /x/ & /y/'}, "no text"),
        ({"grammar": f'start: "ab" (X | "c")\nX: /{NOTHING}/'}, ""),
        ({"grammar": "start: <zork>"}, "no special token <zork>"),
        ({"grammar": 'start: "a" <[999999999]>'}, "no token 999999999: ids go from 0 to 318"),
        ({"grammar": 'start: ""'}, ""),
        ({"regex": "a{1,1000}"}, ""),
        ({"regex": ".*"}, ""),
        ({"choice": ["a" * 300]}, ""),
        ({"choice": [f"choice {i}" for i in range(10_000)]}, ""),
        ({"json": {"enum": [f"choice {i}" for i in range(5_000)]}}, ""),
        ({"json": {"type": "object"}}, ""),
        ({"json": {"properties": {"name": {"type": "string"}}, "required": ["name"], "type": "object"}}, ""),
    ],
)
def test_what_a_grammar_leads_to(wish: dict[str, Any], problem: str) -> None:
    tokenizer = engine_tokenizer(VOCABULARY)
    found = emptiness(grammar_source(StructuredOutputsParams(**wish)), tokenizer, VOCABULARY)
    assert problem in found
    assert bool(found) == bool(problem)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "patternProperties": {f"^{NOTHING}": {}}, "additionalProperties": False, "minProperties": 1},
        {"type": "object", "properties": {"name": {"type": "string", "pattern": NOTHING}}, "required": ["name"]},
        {"type": "array", "items": {"type": "string", "minLength": 3, "pattern": "^ab$"}, "minItems": 1},
        {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 5}}, "required": ["n"]},
    ],
)
def test_a_schema_that_nothing_fits_is_refused(schema: dict[str, Any]) -> None:
    door = GrammarDoor(lambda: VOCABULARY)
    with pytest.raises(InvalidRequest, match="the JSON schema cannot be used"):
        door.check(StructuredOutputsParams(json=schema))


def test_the_check_takes_no_time_worth_speaking_of() -> None:
    schema = {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(100)}}
    wish = StructuredOutputsParams(json={**schema, "required": list(schema["properties"])})
    door = GrammarDoor(lambda: VOCABULARY)
    door.check(msgspec.structs.replace(wish, json={"type": "object"}))  # the tokenizer
    begin = time.perf_counter()
    door.check(wish)
    assert time.perf_counter() - begin < 0.5  # some 10 ms on a machine with nothing else to do


@pytest.mark.parametrize(
    ("wish", "usual", "any_tokens"),
    [
        ({"regex": "yes"}, {b"yes"}, {b"y", b"ye", b"yes"}),
        ({"choice": ["yes"]}, {b"yes"}, {b"y", b"ye", b"yes"}),
        ({"json": {"const": "yes"}}, {b'"'}, {b'"', b'"y'}),
        ({"grammar": 'root ::= "yes"'}, {b"yes"}, {b"y", b"ye", b"yes"}),
        ({"grammar": '%llguidance {}\nstart: "yes"'}, {b"yes"}, {b"y", b"ye", b"yes"}),
    ],
)
def test_texts_in_any_tokens(tokenizers_json: str, wish: dict[str, Any], usual: set[bytes], any_tokens: set[bytes]) -> None:
    """Where lists forbid tokens, a text may be written in those that its tokenizer would not choose."""
    tokens = [b"y", b"e", b"s", b'"', b"ye", b"yes", b'"y', b"<eos>"]
    checker = Checker(Vocabulary(tokens, [7], [7], tokenizers_json))

    def begins(*, first: bool) -> set[bytes]:
        source = checker.check(StructuredOutputsParams(**wish), first=first).source
        found = np.frombuffer(first_tokens(source, checker._tokenizer, checker._vocabulary), np.uint8)  # type: ignore[arg-type]
        return {tokens[i] for i in np.flatnonzero(np.unpackbits(found, bitorder="little"))}

    assert begins(first=True) == any_tokens
    assert begins(first=False) == usual


@pytest.fixture(scope="module")
def tokenizers_json() -> str:
    import tokenizers
    from tokenizers import models

    vocab = {"y": 0, "e": 1, "s": 2, '"': 3, "ye": 4, "yes": 5, '"y': 6, "<eos>": 7}
    made = tokenizers.Tokenizer(models.BPE(vocab, [("y", "e"), ("ye", "s"), ('"', "y")]))
    made.add_special_tokens(["<eos>"])
    return str(made.to_str())
