"""Masks of a plan on logits, against the plain definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.sampling.masks import apply_words
from octavo.sampling.on_host import only_stops


@pytest.mark.parametrize(("vocab", "width"), [(64, 2), (70, 3), (100, 2), (33, 4)])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3]])
def test_masks_forbid_what_has_no_bit(vocab: int, width: int, rows: list[int]) -> None:
    random = np.random.default_rng(vocab)
    words = random.integers(-(2**31), 2**31, (len(rows), width)).astype(np.int32)
    logits = torch.randn(4, vocab)
    expected = logits.clone()
    for row, mask in zip(rows, words, strict=True):
        for token in range(vocab):
            bit = token < 32 * width and (int(mask.view(np.uint32)[token // 32]) >> (token % 32)) & 1
            if not bit:
                expected[row, token] = -torch.inf
    apply_words(logits, np.asarray(rows), words)
    assert torch.equal(logits, expected)


def test_only_stops() -> None:
    words = np.zeros(2, np.int32)
    words[1] = 1 << 3
    assert only_stops(words, np.asarray([35, 900]))
    assert not only_stops(words, np.asarray([36]))
    words[0] = -(2**31)
    assert not only_stops(words, np.asarray([35]))
    assert only_stops(words, np.asarray([31, 35]))
