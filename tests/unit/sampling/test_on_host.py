"""The stages without torch against the slow reference, and against those of torch, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling.host_logprobs import largest, score_row
from octavo.sampling.logprobs import score, to_rows
from octavo.sampling.on_host import adjust
from octavo.sampling.state import SamplerState, features_of
from tests.support.reference_sampler import adjusted
from tests.support.step_plans import slot_init
from tests.unit.sampling.test_sampler import VOCAB, Bench, greedy, make_logits, params_and_tokens


@settings(max_examples=150, deadline=None)
@given(params_and_tokens(), st.integers(0, 10_000))
def test_every_mixture_of_features_matches_the_reference_and_torch(row: Any, seed: int) -> None:
    params, tokens, prompt = row
    logits = make_logits(1, seed)
    ours, state = logits[0].numpy().copy(), SamplerState(1)
    state.enter([slot_init(0, tokens, [1], sampling=params, num_prompt=prompt, eos=[0, 1])])
    adjust(ours, features_of(params), state.records[0], state.host_numbers[0], np.asarray(tokens, np.int32), prompt, must_end=False)
    assert ours == pytest.approx(adjusted(logits[0].double().numpy(), params, tokens, prompt, eos=[0, 1]), abs=1e-4)
    bench = Bench([params], [tokens], [prompt])
    bench.sampler._adjust(logits, bench.sampler._state.features[[0]], bench.slots, bench.positions, {})
    assert ours.tolist() == logits[0].tolist()


def test_what_a_mask_demands_goes_before_min_tokens() -> None:
    state, tokens = SamplerState(1), np.asarray([5, 6], np.int32)
    params = greedy(min_tokens=4)
    state.enter([slot_init(0, [5, 6], [1], sampling=params, num_prompt=1, eos=[0, 1])])
    for must_end in (False, True):
        row = np.zeros(VOCAB, np.float32)
        adjust(row, features_of(params), state.records[0], state.host_numbers[0], tokens, 1, must_end=must_end)
        assert (row[[0, 1]] == (0.0 if must_end else -np.inf)).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 40), st.integers(1, 400), st.integers(0, 99))
def test_the_largest_come_in_order_and_of_equals_the_first(width: int, n: int, values: int, seed: int) -> None:
    """`values`: how many different ones there are."""
    x = np.random.default_rng(seed).integers(0, values, width).astype(np.float32)
    x[: width // 3] = -np.inf
    n = min(n, width)
    assert largest(x, n).tolist() == sorted(range(width), key=lambda i: (-x[i], i))[:n]


@pytest.mark.parametrize(("top", "extra"), [(0, ()), (3, ()), (-1, ()), (2, (5, 9, 600)), (700, (3,))])
def test_scores_are_torchs(top: int, extra: tuple[int, ...]) -> None:
    logits = make_logits(4, seed=1)
    logits[1, ::2] = -torch.inf
    tokens = torch.tensor([int(logits[0].argmax()), 17, int(logits[2].argmin()), 3])
    extras = [extra] * 4 if extra else []
    theirs = to_rows(score(logits, tokens, top, extras), [top] * 4, extras)
    for row, token, expected in zip(logits.numpy(), tokens.tolist(), theirs, strict=True):
        found = score_row(row, token, top, extra)
        assert (found.token_id, found.rank) == (expected.token_id, expected.rank)
        kept = [i for i, p in enumerate(expected.top_logprobs) if p > -np.inf]
        assert [found.top_ids[i] for i in kept] == [expected.top_ids[i] for i in kept]
        assert sorted(found.top_ids) == sorted(expected.top_ids)
        assert found.top_logprobs == pytest.approx(expected.top_logprobs, abs=2e-5)
        assert found.logprob == pytest.approx(expected.logprob, abs=2e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_no_numbers_have_scores_that_are_none(bad: float) -> None:
    logits = make_logits(1)[0].numpy()
    logits[7] = bad
    assert np.isnan(score_row(logits, 3, 2).logprob)
