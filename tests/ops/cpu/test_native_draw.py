"""The native end of the sampler against its plain torch: same random numbers, same thresholds, same tokens, at every level."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.ops.cpu import abi
from octavo.ops.cpu.decoder import draw_tokens
from octavo.ops.registry import DrawRows
from octavo.sampling.filters import filtered
from octavo.sampling.keys import row_keys
from octavo.sampling.random import GROUP, categorical
from octavo.sampling.state import Column
from octavo.sampling.trial import sure_draws, surely_kept
from tests.unit.sampling.test_trial import ROWS, parts_with

CERTAIN = 8
"""The bit of a mode: no token but one that would be drawn if others were forbidden too."""

Numbers = tuple[float, float, float, float]
"""Temperature, top_k, top_p, min_p."""


def keys_of(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(row_keys(np.arange(n, dtype=np.int64) * 7919 + seed, np.zeros(n, np.int32), np.arange(n, dtype=np.int32)))


def drawn(
    engine: abi.Engine, logits: torch.Tensor, numbers: list[Numbers], *, greedy: tuple[int, ...] = (), seed: int = 0, more: int = 0
) -> list[int]:
    """Tokens of rows 0, 1, ... in slots n, n-1, ...

    Args:
        more: bits of all modes.
    """
    n = len(numbers)
    slots = torch.arange(n, 0, -1, dtype=torch.int32)
    columns = torch.zeros(n + 1, len(Column))
    for row, (temperature, top_k, top_p, min_p) in enumerate(numbers):
        columns[n - row, :4] = torch.tensor([temperature, top_k, top_p, math.log(min_p) if min_p else -math.inf])
    modes = torch.tensor([more | (0 if row in greedy else 3) for row in range(n)], dtype=torch.int32)
    words = torch.from_numpy(keys_of(n, seed).numpy().astype(np.uint32).view(np.int32))
    rows = DrawRows(slots, torch.arange(n, dtype=torch.int32), modes, words, torch.tensor([n], dtype=torch.int32), ahead=1)
    out, table = torch.full((n + 2,), -7, dtype=torch.int32), torch.full((n + 1, n + 2), -1, dtype=torch.int32)
    before = logits.clone()
    draw_tokens(engine, logits, rows, columns, out, table)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "logits are only read"
    assert out[n:].tolist() == [-7, -7]
    written = [int(table[n - row, row + 1]) for row in range(n)]
    assert written == out[:n].clamp(min=0).tolist()
    assert int((table != -1).sum()) == n
    return out[:n].tolist()


def expected(logits: torch.Tensor, numbers: list[Numbers], seed: int = 0) -> list[int]:
    t, k, p, m = (torch.tensor(column, dtype=torch.float32) for column in zip(*numbers, strict=True))
    kept = filtered(logits / t.unsqueeze(1), k, p, m.log(), most_k=None, any_top_k=True, any_top_p=True, any_min_p=True)
    return categorical(kept, keys_of(len(numbers), seed))[0].tolist()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    vocab=st.sampled_from([1, 7, 250, GROUP, GROUP + 83, 5 * GROUP, 3000]),
    numbers=st.lists(
        st.tuples(
            st.sampled_from([0.2, 0.7, 1.0, 2.0]),
            st.sampled_from([0.0, 1.0, 5.0, 40.0, 300.0, 1e5]),
            st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
            st.sampled_from([0.0, 0.001, 0.2, 1.0]),
        ),
        min_size=1,
        max_size=5,
    ),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    masked=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_draws_are_those_of_the_reference(
    engine: abi.Engine, vocab: int, numbers: list[Numbers], spread: float, masked: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(numbers), vocab, generator=generator) * spread
    if masked:  # forbidden tokens, but not all
        logits[:, 1:][torch.rand(len(numbers), vocab - 1, generator=generator) < 0.5] = -math.inf
    assert drawn(engine, logits, numbers, seed=seed) == expected(logits, numbers, seed)


def test_ties_with_the_last_one_kept_stay(engine: abi.Engine) -> None:
    """Coarse logits tie a lot: a threshold off by one place would show."""
    numbers = [(1.0, 5.0, 1.0, 0.0), (1.0, 0.0, 0.3, 0.0), (0.8, 50.0, 0.8, 0.0), (1.0, 0.0, 0.97, 0.02)] * 8
    logits = (torch.randn(len(numbers), 900, generator=torch.Generator().manual_seed(1)) * 4).round() / 2
    assert drawn(engine, logits, numbers) == expected(logits, numbers)


def test_greedy_rows_take_the_first_of_the_likeliest(engine: abi.Engine) -> None:
    width = 17 * GROUP + 9
    logits = torch.randn(4, width, generator=torch.Generator().manual_seed(2))
    logits[0, [40, 300, 4000]] = 9.0
    logits[1, [2047, 2048]] = 9.0
    logits[2, width - 1] = 9.0
    plain = (1.0, 0.0, 1.0, 0.0)
    tokens = drawn(engine, logits, [plain] * 4, greedy=(0, 1, 2))
    assert tokens == [40, 2047, width - 1, expected(logits, [plain] * 4)[3]]


@pytest.mark.parametrize("mode", ["greedy", "random"])
def test_unusable_logits_are_told_and_forbidden_tokens_never_drawn(engine: abi.Engine, mode: str) -> None:
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(3))
    logits[0, 5], logits[1, 699] = math.nan, math.inf
    logits[2, :] = -math.inf
    logits[3, :] = -math.inf
    logits[3, 621] = -4.0
    tokens = drawn(engine, logits, [(1.0, 0.0, 0.9, 0.0)] * 5, greedy=tuple(range(5)) if mode == "greedy" else ())
    assert tokens[:4] == [-1, -1, -1, 621]
    assert tokens[4] >= 0


def test_frequencies_follow_the_distribution(engine: abi.Engine) -> None:
    """A thousand seeds at one row of logits: counts within five standard deviations."""
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    logits = torch.full((1000, 600), -math.inf)
    logits[:, [3, 255, 256, 599]] = probabilities.log()
    tokens = torch.tensor(drawn(engine, logits, [(1.0, 0.0, 1.0, 0.0)] * 1000))
    counts = torch.stack([(tokens == t).sum() for t in (3, 255, 256, 599)])
    assert int(counts.sum()) == 1000
    assert ((counts - 1000 * probabilities).abs() < 5 * (1000 * probabilities * (1 - probabilities)).sqrt()).all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    vocab=st.sampled_from([2, 7, 250, GROUP, GROUP + 83, 5 * GROUP, 3000]),
    numbers=st.tuples(
        st.sampled_from([0.2, 0.7, 1.0, 2.0]),
        st.sampled_from([0.0, 1.0, 5.0, 40.0, 300.0]),
        st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
        st.sampled_from([0.0, 0.001, 0.2, 1.0]),
    ),
    spread=st.sampled_from([0.01, 1.0, 4.0, 40.0]),
    seed=st.integers(0, 10**6),
)
def test_a_draw_that_is_certain_is_the_draw_of_every_part(
    engine: abi.Engine, vocab: int, numbers: Numbers, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, vocab, generator=generator) * spread
    sure = drawn(engine, logits, [numbers] * ROWS, seed=seed, more=CERTAIN)
    tokens = torch.tensor(sure)
    for part in parts_with(logits, tokens, generator):
        under_mask = drawn(engine, logits.masked_fill(~part, -math.inf), [numbers] * ROWS, seed=seed)
        assert [(a, b) for a, b in zip(sure, under_mask, strict=True) if a >= 0 and a != b] == []


def test_draws_are_certain_where_those_of_torch_are(engine: abi.Engine) -> None:
    logits = torch.randn(200, 3000, generator=torch.Generator().manual_seed(7)) * 3.0
    numbers = (0.9, 50.0, 0.95, 0.01)
    sure = torch.tensor(drawn(engine, logits, [numbers] * 200, seed=1, more=CERTAIN))
    scaled = logits / 0.9
    tokens = sure_draws(scaled, keys_of(200, 1))
    k, p, m = (torch.full((200,), x) for x in numbers[1:])
    expected = torch.where(surely_kept(scaled, tokens, k, p, m.log()), tokens, -1)
    both = (sure >= 0) & (expected >= 0)
    assert torch.equal(sure[both], expected[both])
    assert both.float().mean() > 0.3
    assert (sure >= 0).ne(expected >= 0).float().mean() < 0.02, "rounding alone"


def test_nothing_is_certain_of_logits_that_are_no_numbers(engine: abi.Engine) -> None:
    logits = torch.zeros(3, 600)
    logits[0, 3], logits[1, 599], logits[2] = math.nan, math.inf, -math.inf
    assert drawn(engine, logits, [(1.0, 0.0, 1.0, 0.0)] * 3, more=CERTAIN) == [-1] * 3
    assert drawn(engine, logits, [(1.0, 0.0, 1.0, 0.0)] * 3, greedy=(0, 1, 2), more=CERTAIN) == [-1] * 3
