"""Whether a text is a whole one of a grammar, byte by byte: no model, no vocabulary."""

from __future__ import annotations

from typing import Any

from octavo.grammar.library import llguidance

_BYTES: Any = llguidance().LLTokenizer("byte")


def matches(source: str, text: str) -> bool:
    """`text` is a whole text of a grammar, as `grammar_source` gives it."""
    matcher = llguidance().LLMatcher(_BYTES, source)
    assert not matcher.is_error(), matcher.get_error()
    tokens = _BYTES.tokenize_bytes(text.encode())
    return bool(matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting())
