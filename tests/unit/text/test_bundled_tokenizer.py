"""The bundled model's tokenizer against two other implementations of it."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint.local import open_gguf
from octavo.config.args import EngineArgs
from octavo.frontend.text.detokenizer import IncrementalDetokenizer
from octavo.frontend.text.tokenizer import Tokenizer, load_tokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PATH = Path(os.environ.get("OCTAVO_TEST_MODEL") or Path.home() / ".cache" / "octavo" / "models" / FILE)
GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "smollm2_ids.json").read_text())
"""Ids that llama.cpp gives for the same file, special tokens recognised, no BOS."""

pytestmark = [pytest.mark.model, pytest.mark.skipif(not PATH.is_file(), reason=f"the bundled model is not at {PATH}")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_gguf(PATH, "bundled", None), EngineArgs())


def test_ids_equal_those_of_llama_cpp(tokenizer: Tokenizer) -> None:
    assert len(GOLDEN) > 50
    assert [tokenizer.encode(case["text"]) for case in GOLDEN] == [case["ids"] for case in GOLDEN]


def test_text_comes_back_at_every_split(tokenizer: Tokenizer) -> None:
    for case in GOLDEN:
        detokenizer = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
        assert "".join(detokenizer.push([i]) for i in case["ids"]) + detokenizer.flush() == case["text"]


def test_chat(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode_chat(text)
    assert ids.count(tokenizer.bos_token_id or -1) == 3
    assert ids == tokenizer.encode(text) == tokenizer.encode_chat(text, add_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_ids_and_text_equal_those_of_transformers(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(PATH.parent), gguf_file=PATH.name)
    # Its conversion does not cut digits that are not 0-9 apart, as the original tokenizer and llama.cpp do.
    for case in [c for c in GOLDEN if not any(char.isnumeric() and char not in "0123456789１２３" for char in c["text"])]:
        assert theirs.encode(case["text"]) == case["ids"]
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(1, 12))]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    for messages in ([{"role": "user", "content": "Hi"}], [{"role": "system", "content": "S"}, {"role": "user", "content": " <b> é"}]):
        assert tokenizer.apply_chat_template(messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("from_end", [True, False])
@pytest.mark.parametrize("tokens", [1, 10, 3000])
@pytest.mark.parametrize(
    "text",
    [
        "hello world " * 40_000,
        "".join(f"def f_{i}(x):\n    return x * {i} + 'é😀'\n\n" for i in range(12_000)),
        "short",
    ],
    ids=["words", "code", "short"],
)
def test_a_part_has_the_tokens_that_are_wanted(tokenizer: Tokenizer, text: str, tokens: int, from_end: bool) -> None:
    whole = tokenizer.encode(text)
    part = tokenizer.encode_part(text, tokens, from_end=from_end)
    assert (part[-tokens:] if from_end else part[:tokens]) == (whole[-tokens:] if from_end else whole[:tokens])


@pytest.mark.parametrize("text", ["one\n" + " " * 300_000 + "two", "x" * 400_000], ids=["blanks", "one word"])
def test_where_no_word_begins_a_part_has_other_tokens_of_the_same_text(tokenizer: Tokenizer, text: str) -> None:
    assert text.endswith(tokenizer.decode(tokenizer.encode_part(text, 3000, from_end=True)[-3000:]))
    assert text.startswith(tokenizer.decode(tokenizer.encode_part(text, 3000, from_end=False)[:3000]))


def test_a_part_costs_what_it_is_not_what_the_text_is(tokenizer: Tokenizer) -> None:
    text = "hello world, said the 3rd of them. " * 100_000
    assert len(tokenizer.encode_part(text, 10, from_end=True)) < len(text) // 100
