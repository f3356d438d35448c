"""Whether a grammar has any text at all: a short walk through it, so that one without is refused before a model is held to it.

A grammar may be well formed and empty: a part that must come matches nothing, or needs itself without end. The walk follows what may
come first, token by token, as long as there is little to choose from. It proves emptiness or gives up: a grammar with a dead end that
can be avoided passes, and a reply that runs into it ends with an error.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from octavo.grammar.compiler import engine_tokenizer, fresh_matcher
from octavo.grammar.effort import FULL, Effort
from octavo.grammar.lark import ANY_TEXT, pattern_literal
from octavo.grammar.library import TOO_COMPLEX, llguidance
from octavo.grammar.stack import on_deep_stack
from octavo.protocol.engine import Vocabulary

MAX_STEPS = 64
"""Places that are looked at; a mask each."""
MAX_CHOICES = 24
"""With more tokens to choose from, one of them is taken to lead on."""


def emptiness(source: str, tokenizer: Any, vocabulary: Vocabulary, effort: Effort = FULL) -> str:
    """What is wrong with a grammar whose form is fine; "" if nothing is known to be.

    Args:
        tokenizer: of `compiler.engine_tokenizer`, for `vocabulary`.
    """
    tokens = vocabulary.tokens
    words = np.zeros(-(-len(tokens) // 32), np.int32)
    start = on_deep_stack(fresh_matcher, tokenizer, source, effort)
    if start.is_error() and (unknown := _unknown_token(str(start.get_error()), len(tokens))):
        return unknown
    places: list[tuple[Any, tuple[int, ...] | bytes]] = [(start, b"")]
    seen: set[Any] = set()
    for _ in range(MAX_STEPS):
        if not places:
            break
        matcher, text = places.pop()
        if not matcher.is_error():
            if matcher.is_accepting():
                return ""
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.size * 4)
        if matcher.is_error():
            if runs_dead(str(matcher.get_error())):
                continue
            return TOO_COMPLEX  # there may be other ways, but a model that took this one would get no further
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        if len(allowed) > MAX_CHOICES:
            return ""
        # Where a text stands does not depend on how it was cut into tokens. The longest token goes first.
        for token in sorted(allowed, key=lambda token: len(tokens[token])):
            longer = text + tokens[token] if isinstance(text, bytes) and tokens[token] else (*text, token)
            if longer not in seen:
                seen.add(longer)
                after = matcher.deep_copy()
                after.consume_token(token)
                places.append((after, longer))
    return "" if places else "no text can match it."


def first_tokens(source: str, tokenizer: Any, vocabulary: Vocabulary) -> bytes:
    """A bit for each token that a text of a grammar may begin with, lowest first; nothing if the grammar has an error."""
    words = np.zeros(-(-len(vocabulary.tokens) // 32), np.int32)
    matcher = on_deep_stack(fresh_matcher, tokenizer, source, FULL)
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.size * 4)
    return b"" if matcher.is_error() else words.tobytes()


_NO_SPECIAL = re.compile(r'unknown special token: "([^"]*)"')
_NO_ID = re.compile(r"Token range end too large: (\d+)")


def _unknown_token(error: str, vocabulary_size: int) -> str:
    """What to say of a grammar that names a token which the model does not have; "" for any other error."""
    if (found := _NO_SPECIAL.search(error)) is not None:
        return f"this model has no special token {found.group(1)[:100]}."
    if (found := _NO_ID.search(error)) is not None:
        return f"this model has no token {found.group(1)[:30]}: ids go from 0 to {vocabulary_size - 1}."
    return ""


def other_than_blanks(pattern: str) -> str:
    """The grammar of what a regular expression matches besides JSON's blanks."""
    text: str = llguidance().LLMatcher.grammar_from_lark(f"start: OTHER\nOTHER: {pattern_literal(pattern)} & ~/[ \\t\\n\\r]*/")
    return text


def takes_all(expression: str, following: str = "") -> bool:
    """Whether whatever an expression matches, with a character behind it that the following text may begin with, is again matched: then it
    never has to end, and the engine, which reads as much as it can, will not let it.

    Args:
        expression: part of a terminal.
        following: a grammar; without it, it may begin with anything on the same line.
    """
    vocabulary = Vocabulary([*(bytes([i]) for i in range(256)), b""], [256], [256])
    tokenizer = engine_tokenizer(vocabulary)
    first = np.unpackbits(np.frombuffer(first_tokens(following, tokenizer, vocabulary), np.uint8), bitorder="little") if following else ()
    characters = "".join(f"\\x{byte:02x}" for byte in np.flatnonzero(first).tolist() if byte < 128)
    behind = f"[{characters}]" if characters else "."
    text = f"start: OTHER\nOTHER: (({expression}) /{behind}/) & ~({expression})\nTEXT: {ANY_TEXT}"
    return emptiness(text, tokenizer, vocabulary).startswith("no text")


def runs_dead(error: str) -> bool:
    """The engine found no way on: a part of the grammar that matches nothing."""
    return "NoExtension" in error
