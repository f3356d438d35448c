"""A look at one token says what its bit in the mask says, wherever a text has come to: all of a small vocabulary, and some of a real one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from octavo.checkpoint.local import open_gguf
from octavo.config.args import EngineArgs
from octavo.core.constraint import Constraint
from octavo.core.reasoning import Reasoning
from octavo.frontend.structured import engine_vocabulary
from octavo.frontend.text.tokenizer import load_tokenizer
from octavo.grammar.compiler import GrammarCompiler, Matcher
from octavo.grammar.lark import json_options
from octavo.grammar.source import grammar_source, json_source
from octavo.protocol.engine import Vocabulary
from octavo.protocol.params import OutputConstraint, StructuredOutputsParams
from tests.support.bundled import bundled_model_path
from tests.unit.grammar.test_compiler import SCHEMAS, VOCABULARY, allowed, compiler

SOURCES = [
    *(json_source(schema, json_options(), "x") for schema in SCHEMAS),
    json_source(SCHEMAS[0], {"whitespace_flexible": False}, "x"),
    grammar_source(StructuredOutputsParams(regex="[a-z]{1,9}-(caf\u00e9|name|true)*")),
    grammar_source(StructuredOutputsParams(choice=["name", "named", "true", "tr"])),
    grammar_source(StructuredOutputsParams(grammar='start: e\ne: "(" e ")" | "name" | e "+" e')),
    grammar_source(
        StructuredOutputsParams(json={"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]})
    ),
]


def agrees(grammars: GrammarCompiler, source: str, vocabulary: Vocabulary, chance: random.Random, look: int, steps: int) -> int:
    """Walk through a grammar; compare `look` random tokens (and as many that are allowed) at every step. Returns the steps made."""
    matcher: Matcher = grammars.matcher(grammars.compile(source))
    spec = OutputConstraint(grammar=source)
    follower = Constraint(spec, matcher, vocabulary.eos, Reasoning(spec, vocabulary.tokens, None, None))
    size = len(vocabulary.tokens)
    for step in range(steps):
        right = allowed(matcher, grammars.num_words)
        bits = set(right)
        asked = [*chance.sample(range(size), min(look, size)), *chance.sample(right, min(look, len(right)))]
        wrong = [(token, token in bits) for token in asked if follower._allows(token) != (token in bits)]
        assert not wrong, (step, [(vocabulary.tokens[t], bit) for t, bit in wrong][:5], follower.forced_tokens())
        assert not matcher.problem()
        plain = [t for t in right if t not in vocabulary.eos]
        if not plain:
            return step
        follower.accept(chance.choice(plain))
    return steps


@pytest.mark.parametrize("number", range(len(SOURCES)))
def test_a_small_vocabulary(number: int) -> None:
    grammars, chance = compiler(), random.Random(number)
    steps = [agrees(grammars, SOURCES[number], VOCABULARY, chance, len(VOCABULARY.tokens), 60) for _ in range(6)]
    assert max(steps) > 1


@pytest.fixture(scope="module")
def bundled() -> tuple[GrammarCompiler, Vocabulary]:
    tokenizer = load_tokenizer(open_gguf(Path(bundled_model_path()), "bundled", None), EngineArgs())
    vocabulary = engine_vocabulary(tokenizer, tokenizer.vocab_size + 20, [])
    grammars = GrammarCompiler()
    grammars.set_vocabulary(vocabulary)
    return grammars, vocabulary


@pytest.mark.parametrize("number", range(len(SOURCES)))
def test_the_bundled_vocabulary(bundled: tuple[GrammarCompiler, Vocabulary], number: int) -> None:
    grammars, vocabulary = bundled
    chance = random.Random(number)
    steps = [agrees(grammars, SOURCES[number], vocabulary, chance, 400, 40) for _ in range(4)]
    assert max(steps) > 1


def test_looking_changes_nothing(bundled: tuple[GrammarCompiler, Vocabulary]) -> None:
    grammars, vocabulary = bundled
    one, other = (grammars.matcher(grammars.compile(SOURCES[0])) for _ in range(2))
    chance, words = random.Random(1), np.zeros((2, grammars.num_words), np.int32)
    for _ in range(12):
        for token in chance.sample(range(len(vocabulary.tokens)), 50):
            one.allows(token)
        one.fill(words[0])
        other.fill(words[1])
        assert (words[0] == words[1]).all()
        token = chance.choice(allowed(other, grammars.num_words))
        assert one.accept(token) == other.accept(token)
