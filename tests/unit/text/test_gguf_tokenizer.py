"""Tokenizers built from GGUF vocabularies, against the merge algorithms written down plainly."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
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
        ("minimax-m2", ["ab", "Ġ", "123", "'s", "Ġ!"]),
        ("bloom", ["ab", "Ġ123's", "Ġ!"]),
        ("default", ["ab", "Ġ", "123", "'", "s", "Ġ", "!"]),
        ("kimi-k2", ["ab", "Ġ", "123", "'s", "Ġ!"]),
        ("seed-coder", ["ab", "Ġ", "1", "2", "3", "'s", "Ġ!"]),
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


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s", "##ly", "wor", "##ld", "cafe", "1", "##2", "!", ","]


def word_piece_metadata() -> dict[str, Any]:
    """As converters write BERT's: a word begins with U+2581, what continues one has lost its ##."""
    tokens = [t if t.startswith("[") else t[2:] if t.startswith("##") else "▁" + t for t in WORDS]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "jina-v2-en",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t.startswith("[") else 1 for t in WORDS],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
    }


@pytest.mark.parametrize("text", ["Hello worlds!", "café, WORLDLY", "hello 12 unknownword", "日本 hello", "", "hello[MASK]world"])
def test_word_pieces_equal_berts(text: str) -> None:
    expected = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    expected.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    expected.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    expected.add_special_tokens([w for w in WORDS if w.startswith("[")])
    vocabulary = gguf_vocabulary(word_piece_metadata(), "x")
    assert vocabulary.tokenizer.encode(text, add_special_tokens=False).ids == expected.encode(text).ids
    assert (vocabulary.prefix, vocabulary.suffix) == ([2], [3])
    pair = vocabulary.tokenizer.encode(text, "world")
    assert pair.ids == [2, *expected.encode(text).ids, 3, 6, 3]
    assert pair.type_ids[-2:] == [1, 1]


REAL = os.environ.get("OCTAVO_REAL_TOKENIZERS", "")
"""A folder with folders of real tokenizer.json files, named as below; they are too large to be kept with the tests."""
HARD_PARTS = [
    "a", "Z", "é", "ß", "İ", "ǅ", "日", "本", "한", "안", "ไ", "ท", "ย", "ا", "ל", "1", "23", "4567", " ", "  ", "\t", "\n", "\r\n", "\n\n",
    "'", "'s", "'LL", "’s", "!", "...", "--", "/", "://", "<", "{", "😀", "👩‍👩‍👧", "\u0301", "\u200d", "\u3000", "\xa0", "_", "==",
    "Hello", "WORLD", "camelCase", "ing", "٣", "Ⅷ", "½", "²",
]  # fmt: skip


def test_blooms_words_are_those_of_its_own_tokenizer() -> None:
    published = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(r" ?[^(\s|[.,!?…。，、।۔،])]+"), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    ours = gguf_vocabulary(byte_level_metadata(**{"tokenizer.ggml.pre": "bloom"}), "x").tokenizer.pre_tokenizer
    rng = random.Random(2)
    for _ in range(500):
        text = "".join(rng.choice([*HARD_PARTS, "(", ")", "|", ",", "।", "۔"]) for _ in range(rng.randint(1, 25)))
        assert [word for word, _ in ours.pre_tokenize_str(text)] == [word for word, _ in published.pre_tokenize_str(text)], text


@pytest.mark.skipif(not REAL, reason="OCTAVO_REAL_TOKENIZERS names no folder of real tokenizers")
@pytest.mark.parametrize(
    ("name", "pre"), [("qwen3", "qwen2"), ("llama3_1", "llama-bpe"), ("gptoss", "gpt-4o"), ("deepseek_v3", "deepseek-v3"), ("gemma3", "")]
)
def test_real_vocabularies_give_the_ids_of_their_own_tokenizers(name: str, pre: str) -> None:
    path = Path(REAL) / name / "tokenizer.json"
    expected = tokenizers.Tokenizer.from_file(str(path))
    metadata = gguf_metadata_of(json.loads(path.read_text()), pre)
    ours = gguf_vocabulary(metadata, "x").tokenizer
    rng = random.Random(1)
    for _ in range(3000):
        text = "".join(rng.choice(HARD_PARTS) for _ in range(rng.randint(1, 25)))
        ids = expected.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids) == expected.decode(ids), text


def gguf_metadata_of(written: dict[str, Any], pre: str) -> dict[str, Any]:
    """What a converter makes of a tokenizer.json; with `pre` "", of one that was made from SentencePiece."""
    model, added = written["model"], written["added_tokens"]
    vocab = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
    tokens = [f"[PAD{i}]" for i in range(max(vocab.values()) + 1)]
    types = [5] * len(tokens)
    for token, i in vocab.items():
        tokens[i], types[i] = token, 6 if re.fullmatch("<0x[0-9A-F]{2}>", token) else 1
    for token in added:
        types[token["id"]] = 3 if token["special"] else 4
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    metadata: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    if pre:
        return {
            **metadata,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        }
    scores = [0.0] * len(tokens)
    for rank, (left, right) in enumerate(merges, 1):
        scores[vocab[left + right]] = scores[vocab[left + right]] or -float(rank)
    return {
        **metadata,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": vocab[model["unk_token"]],
        "tokenizer.ggml.add_space_prefix": False,
    }


def test_superbpe_cuts_digits_alone_in_threes_from_the_end() -> None:
    metadata = byte_level_metadata(**{"tokenizer.ggml.pre": "superbpe"})
    cutter = gguf_vocabulary(metadata, "x").tokenizer.pre_tokenizer
    assert [word for word, _ in cutter.pre_tokenize_str("a b 1234567 c")] == ["aĠbĠ", "1", "234", "567", "Ġc"]
