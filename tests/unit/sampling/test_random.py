"""The counter-based generator: reproducible, uniform, independent; and the two-level draw is the right distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.sampling.keys import row_keys
from octavo.sampling.random import GROUP, categorical, gumbels, uniforms

GOLDEN_KEYS = [[720925482, 3573154200], [1990006543, 2245571595], [3156284980, 2700084]]
GOLDEN_WORDS = [
    [525904678, 4105807572, 1224737120],
    [2976494441, 1300948203, 3487535399],
    [2086770409, 3472951360, 2095330610],
]
"""Computed with a plain Python implementation on unbounded integers."""


def keys(seeds: object, indices: object = 0, positions: object = 0) -> torch.Tensor:
    seed, index, position = np.broadcast_arrays(np.atleast_1d(seeds), indices, positions)
    return torch.from_numpy(row_keys(seed.astype(np.int64), index.astype(np.int32), position.astype(np.int32)))


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """The statistic in standard deviations from its mean (it is about normal for many degrees of freedom)."""
    freedom = len(expected) - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def test_golden_values() -> None:
    """Streams must never change: users keep seeds. Also pins CPU and GPU, and every numpy and torch, to the same bits."""
    key = keys([0, -1, 2**62], [0, 1, 2], [5, 6, 7])
    assert key.tolist() == GOLDEN_KEYS
    words = (uniforms(key, 0, 3) * 2**32 - 0.5).long()
    assert words.tolist() == GOLDEN_WORDS


def test_a_number_depends_on_its_row_and_counter_alone() -> None:
    many = keys([7, 8, 9, 7], [0, 0, 1, 1], [3, 3, 3, 4])
    whole = uniforms(many, 0, 100)
    for row in range(4):
        assert torch.equal(uniforms(many[row : row + 1], 40, 20)[0], whole[row, 40:60])
    assert len(set(whole[:, 0].tolist())) == 4


def test_open_interval() -> None:
    u = uniforms(keys(np.arange(2000)), 0, 512)
    assert 0.0 < float(u.min()) < 1e-5
    assert 1 - 1e-5 < float(u.max()) < 1.0
    assert bool(gumbels(keys(np.arange(100)), 0, 512).isfinite().all())


@pytest.mark.parametrize("axis", ["counter", "position", "seed", "index"])
def test_uniform_along_every_axis(axis: str) -> None:
    n, count = np.arange(2**16), np.arange(2**16)
    u = {
        "counter": lambda: uniforms(keys(123), 0, 2**16).view(-1),
        "position": lambda: uniforms(keys(5, 0, n), 17, 1).view(-1),
        "seed": lambda: uniforms(keys(n, 0, 9), 17, 1).view(-1),
        "index": lambda: uniforms(keys(5, n, 9), 17, 1).view(-1),
    }[axis]().numpy()
    for bins in (64, 256, 1000):
        observed = np.bincount((u * bins).astype(int), minlength=bins)
        assert abs(chi_square(observed, np.full(bins, len(count) / bins))) < 4
    # Neighbours are independent: pairs fill a 16 x 16 grid evenly.
    pairs = np.bincount((u[:-1:2] * 16).astype(int) * 16 + (u[1::2] * 16).astype(int), minlength=256)
    assert abs(chi_square(pairs, np.full(256, len(count) / 2 / 256))) < 4
    # Low bits are as good as high ones.
    low = (u * 2**32 - 0.5).astype(np.int64) & 255
    assert abs(chi_square(np.bincount(low, minlength=256), np.full(256, len(count) / 256))) < 4


def test_streams_of_neighbouring_rows_are_uncorrelated() -> None:
    u = uniforms(keys(1, 0, np.arange(64)), 0, 4096)
    correlation = np.corrcoef(u.numpy()) - np.eye(64)
    assert np.abs(correlation).max() < 5.5 / np.sqrt(4096)


@pytest.mark.parametrize("vocab", [5, GROUP, GROUP + 1, 3 * GROUP, 1000])
def test_categorical_frequencies_are_the_probabilities(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(vocab, generator=generator) * 2
    draws = 20_000
    tokens = torch.cat([categorical(logits.expand(2000, -1), keys(3, 0, np.arange(i, i + 2000)))[0] for i in range(0, draws, 2000)])
    expected = torch.softmax(logits.double(), 0).numpy() * draws
    observed = np.bincount(tokens.numpy(), minlength=vocab)
    order = np.argsort(-expected)
    likely = order[expected[order] >= 8]
    merged_expected = np.append(expected[likely], draws - expected[likely].sum() + 1e-9)
    merged_observed = np.append(observed[likely], draws - observed[likely].sum())
    assert abs(chi_square(merged_observed, merged_expected)) < 4


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((500, 700), -torch.inf)
    logits[:, [3, 300, 699]] = torch.tensor([0.0, 1.0, 2.0])
    tokens, valid = categorical(logits, keys(np.arange(500)))
    assert set(tokens.tolist()) == {3, 300, 699}
    assert bool(valid.all())


def test_unusable_rows_are_reported_and_others_untouched() -> None:
    logits = torch.randn(5, 600, generator=torch.Generator().manual_seed(0))
    expected, _ = categorical(logits, keys(np.arange(5)))
    broken = logits.clone()
    broken[1, 400] = torch.nan
    broken[2, 400] = torch.inf
    broken[3] = -torch.inf
    tokens, valid = categorical(broken, keys(np.arange(5)))
    assert valid.tolist() == [True, False, False, False, True]
    assert tokens[[0, 4]].tolist() == expected[[0, 4]].tolist()
    assert bool(((tokens >= 0) & (tokens < 600)).all())
