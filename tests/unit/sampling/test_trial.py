"""A draw that is said to hold whatever is forbidden holds: for random parts of the vocabulary, and for those chosen against it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling.filters import filtered
from octavo.sampling.keys import row_keys
from octavo.sampling.random import GROUP, categorical
from octavo.sampling.trial import sure_draws, surely_kept

ROWS = 16


def keys_of(seed: int) -> torch.Tensor:
    return torch.from_numpy(
        row_keys(np.arange(ROWS, dtype=np.int64) * 7919 + seed, np.zeros(ROWS, np.int32), np.arange(ROWS, dtype=np.int32))
    )


def parts_with(logits: torch.Tensor, tokens: torch.Tensor, chance: torch.Generator) -> list[torch.Tensor]:
    """[rows, vocab] bool each: parts of the vocabulary that the tokens are in, among them those that other tokens gain most by."""
    rows, vocab = logits.shape
    own = torch.zeros(rows, vocab, dtype=torch.bool).scatter_(1, tokens.clamp(min=0).unsqueeze(1), True)
    group = torch.arange(vocab).unsqueeze(0) // GROUP == tokens.clamp(min=0).unsqueeze(1) // GROUP
    value = logits.gather(1, tokens.clamp(min=0).unsqueeze(1))
    return [
        own | ~group,  # its whole neighbourhood is forbidden
        own | (logits < value),  # whatever is likelier
        own | (logits > value),  # whatever is not
        own,
        *(own | (torch.rand(rows, vocab, generator=chance) < share) for share in (0.02, 0.5, 0.98)),
    ]


@settings(max_examples=150, deadline=None)
@given(
    vocab=st.sampled_from([2, 7, 250, GROUP, GROUP + 83, 5 * GROUP, 3000]),
    temperature=st.sampled_from([0.2, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 300]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.2, 1.0]),
    spread=st.sampled_from([0.01, 1.0, 4.0, 40.0]),
    seed=st.integers(0, 10**6),
)
def test_it_is_the_draw_of_every_part(
    vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, spread: float, seed: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, vocab, generator=chance) * spread / temperature
    keys = keys_of(seed)
    k, p, m = (torch.full((ROWS,), float(x)) for x in (top_k, top_p, min_p))
    tokens = sure_draws(logits, keys)
    kept = surely_kept(logits, tokens, k, p, m.log())
    assert not (kept & (tokens < 0)).any()
    for part in parts_with(logits, tokens, chance):
        left = logits.masked_fill(~part, -torch.inf)
        drawn = categorical(left, keys)[0]
        assert torch.equal(drawn[tokens >= 0], tokens[tokens >= 0])
        cut = filtered(left, k, p, m.log(), most_k=None, any_top_k=True, any_top_p=True, any_min_p=True)
        assert torch.equal(categorical(cut, keys)[0][kept], tokens[kept])


@pytest.mark.parametrize(("spread", "least"), [(4.0, 0.3), (12.0, 0.8)])
def test_most_draws_of_a_model_that_knows_what_it_wants_are_certain(spread: float, least: float) -> None:
    logits = torch.randn(ROWS * 16, 3000, generator=torch.Generator().manual_seed(3)) * spread
    keys = torch.cat([keys_of(1000 * i) for i in range(16)])
    tokens = sure_draws(logits, keys)
    plain = categorical(logits, keys)[0]
    assert torch.equal(tokens[tokens >= 0], plain[tokens >= 0])
    assert (tokens >= 0).float().mean() > least


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_is_certain_of_logits_that_are_no_numbers(bad: float) -> None:
    logits = torch.randn(ROWS, 1000)
    logits[:, 5] = bad
    assert (sure_draws(logits, keys_of(1)) == -1).all()
    assert (sure_draws(torch.full((ROWS, 1000), -torch.inf), keys_of(1)) == -1).all()
