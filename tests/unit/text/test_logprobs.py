"""Tokens as logprobs show them, and their offsets in the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.text.logprobs import TextOffsets, display_token, token_label
from tests.unit.text import small_tokenizers

TOKENIZER = small_tokenizers.wrap(small_tokenizers.byte_level())
FALLBACK = small_tokenizers.wrap(small_tokenizers.byte_fallback())


def test_offsets_rise_by_each_tokens_own_length() -> None:
    text = "hello\n\nworld 123\n4"
    ids = TOKENIZER.encode(text)
    labels = [token_label(TOKENIZER, i) for i in ids]
    offsets = TextOffsets(TOKENIZER).push(ids)
    assert "".join(labels) == text
    assert offsets[0] == 0
    for label, offset in zip(labels, offsets, strict=True):
        assert text[offset : offset + len(label)] == label


@given(text=st.text(max_size=30), start=st.integers(0, 50))
def test_offsets_point_into_the_text_and_end_at_its_end(text: str, start: int) -> None:
    ids = TOKENIZER.encode(text)
    counter = TextOffsets(TOKENIZER, start=start)
    offsets = counter.push(ids)
    assert offsets == sorted(offsets)
    assert counter.offset == start + len(TOKENIZER.decode(ids))


def test_parts_of_a_character_move_the_offset_once() -> None:
    assert TextOffsets(TOKENIZER).push(TOKENIZER.encode("a日b")) == [0, 1, 1, 1, 2]


def test_tokens_that_are_not_in_the_text_have_no_length() -> None:
    ids = TOKENIZER.encode("<s>hello</s>")
    assert TextOffsets(TOKENIZER).push(ids) == [0, 0, 5]
    assert TextOffsets(TOKENIZER, skip_special_tokens=False).push(ids) == [0, 3, 8]


def test_offsets_after_a_prompt_that_is_not_shown() -> None:
    world = FALLBACK.encode("hello world")[-1:]
    assert TextOffsets(FALLBACK, FALLBACK.encode("hello")).push(world * 2) == [0, len(" world")]


def test_part_of_a_character_is_shown_as_bytes() -> None:
    ids = TOKENIZER.encode("日")
    assert [token_label(TOKENIZER, i) for i in ids] == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5"]
    assert bytes(b for i in ids for b in display_token(TOKENIZER, i).bytes).decode() == "日"


def test_tokens_as_ids() -> None:
    (hello,) = TOKENIZER.encode("hello")
    assert display_token(TOKENIZER, hello).token == "hello"
    shown = display_token(TOKENIZER, hello, as_id=True)
    assert (shown.token, bytes(shown.bytes)) == (f"token_id:{hello}", b"hello")
    assert display_token(None, 7).token == "token_id:7"
    assert display_token(None, 7).bytes == []
