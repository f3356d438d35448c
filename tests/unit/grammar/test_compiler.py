"""Matchers: what they let through validates, whatever is sampled; vocabularies of every kind."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from octavo.grammar.compiler import PARALLEL_FROM, GrammarCompiler, GrammarError, Matcher
from octavo.grammar.lark import choices, json_options, literal
from octavo.grammar.source import grammar_source, json_source
from octavo.protocol.engine import Vocabulary
from octavo.protocol.params import StructuredOutputsParams

EOS = 256
WORDS = [b'{"', b'":', b'"}', b"true", b"name", b"</think>", b"caf\xc3\xa9"]
VOCABULARY = Vocabulary([bytes([i]) for i in range(256)] + [b"<eos>", *WORDS, b"", b""], [EOS], [EOS])

SCHEMAS: list[Any] = [
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["x", 3, None, {"k": []}]}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "string", "pattern": "^[a-c]{2,4}$"}, {"type": "number", "minimum": -1, "maximum": 2}]},
    {"type": "string", "format": "date"},
    {"type": "string", "maxLength": 3, "format": "int32"},
    {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
    },
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": k}, k: {"type": "integer", "maximum": 9}},
                "required": ["kind", k],
                "additionalProperties": False,
            }
            for k in ("p", "q")
        ]
    },
    {
        "type": "object",
        "properties": {"t": {"type": "array", "prefixItems": [{"type": "null"}, {"const": 1}], "items": False, "minItems": 2}},
        "required": ["t"],
        "additionalProperties": False,
    },
    True,
]


def compiler(vocabulary: Vocabulary = VOCABULARY) -> GrammarCompiler:
    result = GrammarCompiler()
    result.set_vocabulary(vocabulary)
    return result


def allowed(matcher: Matcher, words: int) -> list[int]:
    mask = np.zeros(words, np.int32)
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(matcher: Matcher, words: int, chance: random.Random, most: int = 400) -> bytes | None:
    """A random text of the grammar; None if it got too long."""
    text = b""
    for _ in range(most):
        tokens = allowed(matcher, words)
        assert tokens
        if EOS in tokens and (len(tokens) == 1 or chance.random() < 0.3):
            assert matcher.complete
            return text
        # Printable ASCII mostly: random bytes would make endless strings of odd characters.
        plain = [t for t in tokens if t != EOS and (t > EOS or 32 <= t < 127)] or tokens
        closing = [t for t in plain if VOCABULARY.tokens[t][:1] in b'"}]']
        token = chance.choice(closing if closing and chance.random() < 0.4 else plain)
        assert matcher.accept(token)
        text += VOCABULARY.tokens[token]
    return None


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_what_is_written_validates(number: int) -> None:
    grammars = compiler()
    compiled = grammars.compile(json_source(SCHEMAS[number], json_options(), "x"))
    chance = random.Random(number)
    texts = [text for _ in range(25) if (text := walk(grammars.matcher(compiled), grammars.num_words, chance)) is not None]
    assert len(texts) > 5
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMAS[number])


def test_masks_together_are_masks_alone() -> None:
    grammars = compiler()
    compiled = grammars.compile(grammar_source(StructuredOutputsParams(regex="[a-z]{1,9}")))
    matchers = [grammars.matcher(compiled) for _ in range(PARALLEL_FROM + 1)]
    for i, matcher in enumerate(matchers):
        for _ in range(i):
            assert matcher.accept(ord("a") + i)
    words = np.zeros((len(matchers) + 1, grammars.num_words), np.int32)
    grammars.fill([(matcher, row + 1) for row, matcher in enumerate(matchers)], words)
    alone = np.zeros_like(words)
    for row, matcher in enumerate(matchers):
        matcher.fill(alone[row + 1])
    assert (words == alone).all()
    assert words[1:].any(axis=1).all()


def test_copies_go_their_own_ways_and_grammars_are_kept() -> None:
    grammars = compiler()
    source = choices(["ab", "cd"])
    assert grammars.compile(source) is grammars.compile(source)
    one, other = (grammars.matcher(grammars.compile(source)) for _ in range(2))
    assert one.accept(ord("a"))
    assert other.accept(ord("c"))
    assert not one.accept(ord("c"))
    assert "satisfy" in one.problem()
    assert other.problem() == ""
    assert other.accept(ord("d"))
    assert other.complete


def test_a_bad_grammar_says_so() -> None:
    grammars = compiler()
    with pytest.raises(GrammarError, match="nothing"):
        grammars.matcher(grammars.compile("start: nothing"))


def test_special_tokens_are_no_text_and_can_be_named() -> None:
    grammars = compiler()
    anything = grammars.matcher(grammars.compile("start: /(.|\\n)*/"))
    assert EOS in allowed(anything, grammars.num_words)  # as the end
    special = {"<eos>": EOS}
    assert literal("a<eos>b", special) == f'"a" <[{EOS}]> "b"'
    assert literal("a<eos>b") == '"a<eos>b"'
    named = grammars.matcher(grammars.compile(f"start: {literal('a<eos>b', special)}"))
    for token in (ord("a"), EOS, ord("b")):
        assert allowed(named, grammars.num_words) == [token]
        assert named.accept(token)


def test_a_tokenizer_that_cannot_be_sent_gets_longest_matches() -> None:
    grammars = compiler()
    forced = grammars.matcher(grammars.compile('start: "name" /x+/'))
    tokens = allowed(forced, grammars.num_words)
    assert VOCABULARY.tokens.index(b"name") in tokens


@pytest.mark.parametrize("wrap", [lambda source: source, lambda source: f"start: {source}"])
@pytest.mark.parametrize("count", [120, 480])
def test_as_many_optional_properties_as_are_taken_can_be_written(count: int, wrap: Any) -> None:
    """Tokens that end one property and go on with the next meet each of the others: more steps of the parser than a grammar has by itself."""
    texts = [f'{a}{b}"' for a in ('":', '": ', '":"') for b in ("", "a", "x")] + [
        f'"{c}"p{n}' for c in (",", ", ", "},") for n in range(10)
    ]
    tokens = [*VOCABULARY.tokens, *(text.encode() for text in texts), *(f'",{" " * n}"'.encode() for n in range(20))]
    grammars = compiler(Vocabulary(tokens, [EOS], [EOS]))
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}, "additionalProperties": False}
    whole = json_source(schema, json_options(), "x")
    source = whole if wrap("x") == "x" else grammar_source(StructuredOutputsParams(grammar=wrap(f"%json {json.dumps(schema)}")))
    compiled, chance = grammars.compile(source), random.Random(count)
    for _ in range(4):
        matcher = grammars.matcher(compiled)
        for _ in range(60):
            right = [t for t in allowed(matcher, grammars.num_words) if t != EOS]
            assert not matcher.problem()
            if not right:
                break
            quotes = [t for t in right if b'"' in tokens[t]]
            assert matcher.accept(chance.choice(quotes if quotes and chance.random() < 0.8 else right))
