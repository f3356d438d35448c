"""Row searches against torch's own: ties, forbidden entries, NaN and ragged widths included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling.rows import GROUP, argmax, count_above, largest, largest_values, logsumexp

shapes = st.tuples(st.integers(1, 4), st.one_of(st.integers(1, 12 * GROUP), st.sampled_from([GROUP, 2 * GROUP, 5 * GROUP])))


def make(shape: tuple[int, int], seed: int, ties: bool, forbidden: bool) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if ties:
        x = x.round()
    if forbidden:
        x[:, shape[1] // 3 :] = -torch.inf
    return x


@settings(max_examples=80, deadline=None)
@given(shapes, st.integers(1, 6), st.integers(0, 99), st.booleans(), st.booleans())
def test_searches_equal_torch(shape: tuple[int, int], n: int, seed: int, ties: bool, forbidden: bool) -> None:
    x = make(shape, seed, ties, forbidden)
    n = min(n, shape[1])
    expected = x.sort(dim=-1, descending=True).values[:, :n]
    values, indices = largest(x, n)
    assert torch.equal(values, expected)
    assert torch.equal(x.gather(1, indices), expected)
    assert all(len(set(row)) == n for row in indices.tolist())
    assert torch.equal(largest_values(x, n), expected)
    best = x.max(dim=-1)
    values, index = argmax(x)
    assert torch.equal(values, best.values)
    assert torch.equal(index, best.indices)
    bound = expected[:, -1:]
    assert torch.equal(count_above(x, bound), (x > bound).sum(-1))
    if shape[1] >= 3:
        torch.testing.assert_close(logsumexp(x), x.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [700, 5 * GROUP])
@pytest.mark.parametrize("place", [0, 300, -1])
def test_argmax_lets_nan_through(width: int, place: int) -> None:
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(1))
    x[1, place] = torch.nan
    values, index = argmax(x)
    assert values.isnan().tolist() == [False, True]
    assert 0 <= int(index[1]) < width
    assert int(index[0]) == int(x[0].argmax())


@pytest.mark.parametrize("n", [1, 700, 701])
def test_wide_searches(n: int) -> None:
    x = torch.randn(3, 701, generator=torch.Generator().manual_seed(n))
    expected = x.sort(dim=-1, descending=True).values[:, :n]
    assert torch.equal(largest(x, n)[0], expected)
    assert torch.equal(largest_values(x, n), expected)
