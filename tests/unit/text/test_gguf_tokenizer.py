"""Tokenizers built from GGUF vocabularies, against the merge algorithms written down plainly."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.frontend.text.gguf_tokenizer import GgufVocabulary, gguf_vocabulary
from octavo.frontend.text.token_bytes import byte_level_alphabet
from tests.unit.text.small_tokenizers import MERGES


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    tokens = [*byte_level_alphabet(), *(m.replace(" ", "") for m in MERGES), "<|end|>", "<tool>"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


PIECES = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "aa", "aaa", "cab", "b▁"]


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(len(PIECES))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


def encode(vocabulary: GgufVocabulary, text: str) -> list[str]:
    tokens: list[str] = vocabulary.tokenizer.encode(text, add_special_tokens=False).tokens
    return tokens


def sentencepiece_by_hand(text: str) -> list[str]:
    """Again and again merge the neighbours whose joint piece has the best score, the leftmost of equals."""
    parts = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        joins = [(PIECES.index(a + b), i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in PIECES]
        if not joins:
            return parts
        _, i = min(joins)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@given(st.text("abc ", max_size=16))
def test_sentencepiece_merges_by_score(text: str) -> None:
    assert encode(gguf_vocabulary(sentencepiece_metadata(), "x"), text) == sentencepiece_by_hand(text)


def test_sentencepiece_spells_unknown_characters_in_bytes() -> None:
    vocabulary = gguf_vocabulary(sentencepiece_metadata(), "x")
    assert encode(vocabulary, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert encode(vocabulary, "\n") == ["▁", "<0x0A>"]
    assert (vocabulary.prefix, vocabulary.suffix) == ([1], [])


def test_space_prefix_can_be_off() -> None:
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    assert encode(gguf_vocabulary(metadata, "x"), "ab") == ["ab"]


def test_byte_level_merges_and_special_tokens() -> None:
    vocabulary = gguf_vocabulary(byte_level_metadata(), "x")
    assert encode(vocabulary, "hello world") == ["hello", "Ġworld"]
    assert encode(vocabulary, "<|end|>hello<tool>") == ["<|end|>", "hello", "<tool>"]
    ids = vocabulary.tokenizer.encode("<|end|>hello<tool>").ids
    assert vocabulary.tokenizer.decode(ids, skip_special_tokens=True) == "hello<tool>"
    assert vocabulary.special_tokens == {"bos_token": "<|end|>", "eos_token": "<|end|>"}
    assert vocabulary.tokenizer.token_to_id("<tool>") == len(byte_level_metadata()["tokenizer.ggml.tokens"]) - 1


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["ab", "Ġ123", "'s", "Ġ!"]),
        ("smollm", ["ab", "Ġ", "1", "2", "3", "'s", "Ġ!"]),
        ("llama-bpe", ["ab", "Ġ", "123", "'s", "Ġ!"]),
        ("qwen2", ["ab", "Ġ", "1", "2", "3", "'s", "Ġ!"]),
        ("tekken", ["ab", "Ġ", "1", "2", "3", "'s", "Ġ!"]),
        ("gpt-4o", ["ab", "Ġ", "123", "'s", "Ġ!"]),
        ("default", ["ab", "Ġ", "123", "'", "s", "Ġ", "!"]),
    ],
)
def test_pre_tokenizers_cut_words(pre: str, words: list[str]) -> None:
    metadata = byte_level_metadata(**{"tokenizer.ggml.pre": pre})
    cutter = gguf_vocabulary(metadata, "x").tokenizer.pre_tokenizer
    assert [word for word, _ in cutter.pre_tokenize_str("ab 123's !")] == words


def test_bos_follows_the_file_then_the_kind() -> None:
    end = byte_level_metadata()["tokenizer.ggml.bos_token_id"]
    assert gguf_vocabulary(byte_level_metadata(), "x").prefix == []
    assert gguf_vocabulary(byte_level_metadata(**{"tokenizer.ggml.pre": "llama-bpe"}), "x").prefix == [end]
    asked = byte_level_metadata(**{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    assert (gguf_vocabulary(asked, "x").prefix, gguf_vocabulary(asked, "x").suffix) == ([end], [end])
    refused = byte_level_metadata(**{"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False})
    assert gguf_vocabulary(refused, "x").prefix == []


def test_chat_templates_by_name() -> None:
    metadata = byte_level_metadata(
        **{"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B", "tokenizer.chat_templates": ["tool_use"]}
    )
    assert gguf_vocabulary(metadata, "x").chat_templates == {"default": "A", "tool_use": "B"}


def test_merges_of_tokens_that_are_not_there_are_left_out() -> None:
    vocabulary = gguf_vocabulary(byte_level_metadata(**{"tokenizer.ggml.merges": [*MERGES, "zz top"]}), "x")
    assert encode(vocabulary, "hello") == ["hello"]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"tokenizer.ggml.tokens": None}, CheckpointError, "has no vocabulary"),
        ({"tokenizer.ggml.tokens": [1, 2]}, CheckpointError, "has no vocabulary"),
        ({"tokenizer.ggml.merges": None}, CheckpointError, "without merges"),
        ({"tokenizer.ggml.token_type": [1]}, CheckpointError, "token types"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, CheckpointError, "outside the vocabulary"),
        ({"tokenizer.ggml.pre": "from-the-future"}, UnsupportedModel, "'from-the-future'.*--tokenizer"),
        ({"tokenizer.ggml.model": "rwkv"}, UnsupportedModel, "'rwkv'"),
    ],
)
def test_what_cannot_be_read_is_said(changes: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        gguf_vocabulary(byte_level_metadata(**changes), "m.gguf")


def test_sentencepiece_needs_scores() -> None:
    with pytest.raises(CheckpointError, match="score"):
        gguf_vocabulary(sentencepiece_metadata(**{"tokenizer.ggml.scores": None}), "m.gguf")
