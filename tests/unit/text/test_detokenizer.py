"""Incremental text equals the text of the whole, at every split, and no piece ends inside a character."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.text.detokenizer import IncrementalDetokenizer
from octavo.frontend.text.tokenizer import Tokenizer
from tests.unit.text import small_tokenizers

BYTE_LEVEL = small_tokenizers.wrap(small_tokenizers.byte_level())
BYTE_FALLBACK = small_tokenizers.wrap(small_tokenizers.byte_fallback())
WORD_PIECE = small_tokenizers.wrap(small_tokenizers.word_piece())
TEXTS = [
    "hello world",
    "héllo 😀 wörld",
    "日本語のテキスト",
    "👨‍👩‍👧‍👦 family",
    "  two  spaces ",
    "a\n\n\tb",
    "x<s>y</s>",
    "\ufffd!",
    "é",
    " ",
]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, also ones outside the vocabulary, as an untrained model samples them."""
    return st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=24)


def splits(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({min(c, len(ids)) for c in cuts} | {0, len(ids)})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def shown(whole: str, joined: str) -> str:
    """Decoded text as it is shown: without what stands for a character at its end that is not complete. (Bytes that can be none stay.)"""
    return (
        whole.removesuffix("\ufffd") if (whole.endswith("\ufffd") and not whole.endswith(joined)) or whole == joined + "\ufffd" else whole
    )


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
@given(data=st.data())
def test_pieces_put_together_are_what_the_output_adds_to_the_prompt(tokenizer: Tokenizer, data: st.DataObject) -> None:
    prompt, output = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer))
    skip = data.draw(st.booleans())
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    pieces = [detokenizer.push(part) for part in splits(output, data.draw(st.lists(st.integers(0, 24), max_size=8)))]
    joined = "".join(pieces) + detokenizer.flush()

    whole = shown(tokenizer.decode(prompt + output, skip), joined)
    # The prompt's own text, without the beginning of a character that only the output makes whole.
    before = whole[: len(whole) - len(joined)]
    assert whole == before + joined
    assert tokenizer.decode(prompt, skip).rstrip("\ufffd") == before.rstrip("\ufffd")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
@given(data=st.data())
def test_without_a_prompt_pieces_put_together_are_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    output, skip = data.draw(ids_of(tokenizer)), data.draw(st.booleans())
    detokenizer = IncrementalDetokenizer(tokenizer, (), skip)
    joined = "".join(detokenizer.push([i]) for i in output) + detokenizer.flush()
    assert joined == shown(tokenizer.decode(output, skip), joined)


@pytest.mark.parametrize(
    ("tail", "shown_of_it"), [("e697", ""), ("e6", ""), ("f09f98", ""), ("eda0", "\ufffd\ufffd"), ("ed9f", ""), ("a0", "\ufffd")]
)
def test_of_a_character_that_is_cut_nothing_is_shown_and_bytes_that_can_be_none_stay(tail: str, shown_of_it: str) -> None:
    byte_of = {
        BYTE_FALLBACK.token_bytes(i): i for i in range(BYTE_FALLBACK.vocab_size) if (BYTE_FALLBACK.backend.token(i) or "").startswith("<0x")
    }
    ids = [0, *(byte_of[bytes([b])] for b in bytes.fromhex(tail))]
    detokenizer = IncrementalDetokenizer(BYTE_FALLBACK, (), False)
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == BYTE_FALLBACK.decode([0], False) + shown_of_it


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def test_no_piece_ends_inside_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
    pieces = [detokenizer.push([i]) for i in ids]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert detokenizer.flush() == ""
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


def test_an_emoji_of_four_byte_tokens_comes_out_whole() -> None:
    ids = [BYTE_FALLBACK.backend.id_of(f"<0x{b:02X}>") for b in "😀".encode()]
    detokenizer = IncrementalDetokenizer(BYTE_FALLBACK, BYTE_FALLBACK.encode("hello"))
    assert [detokenizer.push([i]) for i in ids if i is not None] == ["", "", "", "😀"]


def test_output_completes_a_character_that_the_prompt_began() -> None:
    ids = BYTE_LEVEL.encode("é😀")
    head, tail = ids[:-1], ids[-1:]
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, head)
    assert detokenizer.push(tail) == "😀"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def test_nothing_is_shown_of_a_character_that_a_sequence_ends_inside_of(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀", add_special_tokens=False)
    for cut in range(1, len(ids)):
        detokenizer = IncrementalDetokenizer(tokenizer)
        text = detokenizer.push(ids[:-cut]) + detokenizer.flush()
        assert text == tokenizer.decode(ids[:-cut]).rstrip("\ufffd")
        assert text in ("a", "")


def test_first_space_counts_after_a_prompt_only() -> None:
    world = BYTE_FALLBACK.backend.id_of("▁world")
    assert world is not None
    assert IncrementalDetokenizer(BYTE_FALLBACK).push([world]) == "world"
    assert IncrementalDetokenizer(BYTE_FALLBACK, BYTE_FALLBACK.encode("hello")).push([world]) == " world"
    only_special = [1, 1]  # a prompt without text: <s><s>
    assert IncrementalDetokenizer(BYTE_FALLBACK, only_special).push([world]) == "world"
    assert IncrementalDetokenizer(BYTE_FALLBACK, only_special, skip_special_tokens=False).push([world]) == " world"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip: bool) -> None:
    ids = BYTE_LEVEL.encode("<s>hello</s><tool call>", add_special_tokens=False)
    assert IncrementalDetokenizer(BYTE_LEVEL, (), skip).push(ids) == ("hello<tool call>" if skip else "<s>hello</s><tool call>")


@given(data=st.data())
def test_other_decoders_go_through_a_window(data: st.DataObject) -> None:
    prompt, output = data.draw(ids_of(WORD_PIECE)), data.draw(ids_of(WORD_PIECE))
    detokenizer = IncrementalDetokenizer(WORD_PIECE, prompt)
    joined = "".join(detokenizer.push(part) for part in splits(output, data.draw(st.lists(st.integers(0, 24), max_size=8))))
    assert WORD_PIECE.decode(prompt + output) == WORD_PIECE.decode(prompt) + joined + detokenizer.flush()


def test_window_stays_short(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    decode = WORD_PIECE.backend.decode

    def measured(ids: Sequence[int], skip: bool, spaces: bool) -> str:
        lengths.append(len(ids))
        return decode(ids, skip, spaces)

    monkeypatch.setattr(WORD_PIECE.backend, "decode", measured)
    detokenizer = IncrementalDetokenizer(WORD_PIECE)
    for _ in range(500):
        detokenizer.push([2])
    assert 0 < max(lengths) <= 8
