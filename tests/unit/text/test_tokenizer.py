"""Encoding, decoding and the one rule for BOS."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidRequest
from octavo.frontend.text import backend
from octavo.frontend.text.tokenizer import Tokenizer
from tests.unit.text import small_tokenizers

PLAIN = small_tokenizers.wrap(small_tokenizers.byte_level())
WITH_BOS = small_tokenizers.wrap(
    small_tokenizers.byte_level(bos=True),
    {
        "default": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "bare": "{% for m in messages %}{{ m.content }}{% endfor %}",
    },
)
FALLBACK = small_tokenizers.wrap(small_tokenizers.byte_fallback())
MESSAGES = [{"role": "user", "content": "hello"}]


def bos_count(tokenizer: Tokenizer, ids: list[int]) -> int:
    return ids.count(tokenizer.bos_token_id or -1)


@pytest.mark.parametrize("text", ["hello", "", " hello", "<s>hello", "<s>"])
def test_plain_prompts_begin_with_exactly_one_bos(text: str) -> None:
    ids = WITH_BOS.encode(text)
    assert ids[0] == WITH_BOS.bos_token_id
    assert bos_count(WITH_BOS, ids) == 1


def test_rendered_templates_keep_the_bos_they_wrote_and_get_no_other() -> None:
    rendered = WITH_BOS.apply_chat_template(MESSAGES)
    assert rendered == "<s>hello"
    assert WITH_BOS.encode_chat(rendered) == WITH_BOS.encode(rendered) == WITH_BOS.encode("hello")
    assert WITH_BOS.encode_chat(rendered, add_special_tokens=True) == WITH_BOS.encode("hello")


def test_a_template_without_bos_gets_one_only_when_asked() -> None:
    rendered = WITH_BOS.apply_chat_template(MESSAGES, chat_template="bare")
    assert bos_count(WITH_BOS, WITH_BOS.encode_chat(rendered)) == 0
    assert bos_count(WITH_BOS, WITH_BOS.encode_chat(rendered, add_special_tokens=True)) == 1


def test_a_tokenizer_that_adds_no_bos_never_gets_one() -> None:
    assert PLAIN.encode("hello") == PLAIN.encode("hello", add_special_tokens=False) == PLAIN.encode_chat("hello", add_special_tokens=True)
    assert PLAIN.encode("") == []


def test_suffix_is_added_once() -> None:
    tokenizer = Tokenizer(PLAIN.backend, templates=PLAIN.templates, special_tokens={"eos_token": "</s>"}, suffix=[PLAIN.eos_token_id or 0])
    assert tokenizer.encode("hello") == [*PLAIN.encode("hello"), tokenizer.eos_token_id] == tokenizer.encode("hello</s>")


def test_ids_of_roles() -> None:
    assert PLAIN.backend.token(PLAIN.bos_token_id or 0) == "<s>"
    assert PLAIN.backend.token(PLAIN.eos_token_id or 0) == "</s>"
    assert Tokenizer(PLAIN.backend, templates=PLAIN.templates, special_tokens={}).eos_token_id is None


@given(st.text(max_size=60))
def test_byte_level_round_trip(text: str) -> None:
    """Any text, half surrogate pairs aside, comes back as it was."""
    assert PLAIN.decode(PLAIN.encode(text), skip_special_tokens=False) == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_half_a_surrogate_pair_becomes_a_replacement_character() -> None:
    assert PLAIN.decode(PLAIN.encode("a\ud83d b")) == "a\ufffd b"


def test_a_prompt_must_be_text() -> None:
    with pytest.raises(InvalidRequest, match="must be a string, got int") as caught:
        PLAIN.encode(3)  # type: ignore[arg-type]
    assert caught.value.param == "prompt"


@given(ids=st.lists(st.integers(-2, 400), max_size=20), skip=st.booleans())
def test_decode_equals_the_library_for_ids_in_the_vocabulary(ids: list[int], skip: bool) -> None:
    inside = [i for i in ids if 0 <= i < PLAIN.vocab_size]
    assert PLAIN.decode(ids, skip) == PLAIN.decode(inside, skip) == PLAIN.backend.decode(inside, skip, True)


@given(st.text("hello wrd é日😀", max_size=40))
def test_byte_fallback_decodes_what_it_encoded(text: str) -> None:
    ids = FALLBACK.encode(text)
    assert FALLBACK.decode(ids) == FALLBACK.backend.decode(ids, True, True) == text


def test_token_text_and_bytes() -> None:
    world = PLAIN.encode(" world")
    assert [PLAIN.token_text(i) for i in world] == [" world"]
    assert PLAIN.token_bytes(world[0]) == b" world"
    assert PLAIN.token_text(PLAIN.bos_token_id or 0) == "<s>"
    assert PLAIN.token_text(10**9) == PLAIN.token_text(-1) == ""
    assert [PLAIN.token_text(i) for i in PLAIN.encode("日")] == ["\ufffd"] * 3
    pieces = small_tokenizers.wrap(small_tokenizers.word_piece())
    assert (pieces.token_text(2), pieces.token_bytes(2), pieces.made_of_bytes) == ("hello", b"hello", False)


def test_extent_of_the_vocabulary() -> None:
    assert PLAIN.backend.token(PLAIN.vocab_size - 1) is not None
    assert PLAIN.backend.token(PLAIN.vocab_size) is None
    assert PLAIN.longest_token == len("<tool call>")


def test_padding_and_truncation_of_the_training_do_not_apply() -> None:
    trained = small_tokenizers.byte_level()
    trained.enable_truncation(4)
    trained.enable_padding(length=64)
    assert small_tokenizers.wrap(trained).encode("hello world hello") == PLAIN.encode("hello world hello")


def test_many_threads_get_the_same_ids() -> None:
    texts = [f"hello world {n} é😀" * 20 for n in range(64)]
    tokenizer = small_tokenizers.wrap(small_tokenizers.byte_level())
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(tokenizer.encode, texts))
        assert list(pool.map(tokenizer.decode, ids)) == texts
    assert ids == [PLAIN.encode(text) for text in texts]


@pytest.mark.parametrize("tokenizer", [PLAIN, WITH_BOS, FALLBACK])
@pytest.mark.parametrize("piece", ["hello world ", "é😀\n", "<s>x", "\ud800y"])
def test_a_long_text_is_encoded_like_a_short_one(tokenizer: Tokenizer, piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts go another way through the library."""
    text = piece * (backend.LONG_TEXT // len(piece) + 1)
    long = tokenizer.encode(text)
    monkeypatch.setattr(backend, "LONG_TEXT", len(text) + 1)
    assert long == tokenizer.encode(text)


def test_others_can_work_while_a_long_text_is_encoded() -> None:
    gaps: list[float] = []
    with ThreadPoolExecutor() as pool:
        encoding = pool.submit(PLAIN.encode, "hello world " * 300_000)
        begun = last = time.monotonic()
        while not encoding.done():
            time.sleep(0.001)
            now = time.monotonic()
            gaps.append(now - last)
            last = now
    assert max(gaps) < (last - begun) / 2
