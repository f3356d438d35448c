"""The fused draw against the sampler's plain torch: same random numbers, same thresholds, same tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from octavo.ops.registry import DrawRows
from octavo.ops.triton.sampling import draw_tokens
from octavo.sampling.filters import filtered
from octavo.sampling.keys import row_keys
from octavo.sampling.random import GROUP, categorical
from octavo.sampling.state import Column, Feature

VOCAB = GROUP + 83


def drawn(
    logits: torch.Tensor,
    numbers: list[tuple[float, float, float, float]],
    *,
    greedy: tuple[int, ...] = (),
    filters: bool = True,
    padding: int = 0,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens of rows 0, 1, ... in slots n, n-1, ...; numbers are (temperature, top_k, top_p, min_p)."""
    device, n = logits.device, len(numbers)
    slots = torch.arange(n, 0, -1, dtype=torch.int32, device=device)
    columns = torch.zeros(n + 1, len(Column), device=device)
    for row, (temperature, top_k, top_p, min_p) in enumerate(numbers):
        columns[n - row, :4] = torch.tensor([temperature, top_k, top_p, math.log(min_p) if min_p else -math.inf])
    modes = [0 if row in greedy else 3 if filters else 1 for row in range(n)]
    out = torch.full((n + padding,), -7, dtype=torch.int32, device=device)
    if padding:
        logits = torch.cat([logits, torch.full((padding, logits.shape[1]), math.nan, dtype=logits.dtype, device=device)])
    rows = DrawRows(
        torch.cat([slots, torch.full((padding,), 10**6, dtype=torch.int32, device=device)]),
        torch.arange(n + padding, dtype=torch.int32, device=device),
        torch.tensor(modes + [3] * padding, dtype=torch.int32, device=device),
        keys_as_words(n + padding).to(device),
        torch.tensor([n], dtype=torch.int32, device=device),
        ahead=1,
    )
    draw_tokens(logits, rows, columns, out, table, filters=filters)
    assert (out[n:] == -7).all(), "padding rows are left alone"
    return out[:n].cpu()


def keys_of(n: int) -> torch.Tensor:
    return torch.from_numpy(row_keys(np.arange(n, dtype=np.int64) * 7919, np.zeros(n, np.int32), np.arange(n, dtype=np.int32)))


def keys_as_words(n: int) -> torch.Tensor:
    return torch.from_numpy(keys_of(n).numpy().astype(np.uint32).view(np.int32))


def expected(logits: torch.Tensor, numbers: list[tuple[float, float, float, float]]) -> torch.Tensor:
    t, k, p, m = (torch.tensor(column, dtype=torch.float32) for column in zip(*numbers, strict=True))
    scaled = logits.cpu().float() / t.unsqueeze(1)
    kept = filtered(scaled, k, p, m.log(), most_k=None, any_top_k=True, any_top_p=True, any_min_p=True)
    return categorical(kept, keys_of(len(numbers)))[0].int()


def test_the_contract_names_what_the_state_keeps() -> None:
    assert (Feature.RANDOM, Feature.FILTERS) == (1, 2)
    assert (Column.TEMPERATURE, Column.TOP_K, Column.TOP_P, Column.LOG_MIN_P) == (0, 1, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unfiltered_draws_are_those_of_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    logits = (torch.randn(6, VOCAB, device=device) * 3).to(dtype)
    numbers = [(0.5 + 0.1 * row, 0.0, 1.0, 0.0) for row in range(6)]
    tokens = drawn(logits, numbers, filters=False)
    assert tokens.tolist() == expected(logits, numbers).tolist()
    assert len(set(tokens.tolist())) > 3


def test_greedy_rows_take_the_first_of_the_likeliest(device: torch.device) -> None:
    """The vocabulary is wide enough for several thread blocks a row."""
    width = 17 * GROUP + 9
    logits = torch.randn(3, width, device=device)
    logits[0, [40, 300, 4000]] = 9.0
    logits[1, [2047, 2048]] = 9.0
    logits[2, width - 1] = 9.0
    assert drawn(logits, [(1.0, 0.0, 1.0, 0.0)] * 3, filters=False, greedy=(0, 1, 2)).tolist() == [40, 2047, width - 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_filters_keep_what_the_reference_keeps(dtype: torch.dtype, device: torch.device) -> None:
    """Coarse dtypes tie a lot: a threshold that is off by one place would show."""
    numbers = [
        (0.7, 5.0, 1.0, 0.0),
        (1.0, 0.0, 0.3, 0.0),
        (1.0, 0.0, 1.0, 0.2),
        (0.8, 50.0, 0.8, 0.0),
        (1.0, 20.0, 0.95, 0.05),
        (2.0, VOCAB + 5.0, 0.99, 0.001),
        (1.0, 0.0, 1e-6, 0.0),
    ]
    logits = (torch.randn(len(numbers), VOCAB, device=device) * 2).to(dtype)
    assert drawn(logits, numbers).tolist() == expected(logits, numbers).tolist()


def test_filtered_greedy_and_plain_rows_mix(device: torch.device) -> None:
    logits = torch.randn(3, VOCAB, device=device) * 2
    numbers = [(1.0, 3.0, 1.0, 0.0), (1.0, 0.0, 1.0, 0.0), (0.9, 0.0, 1.0, 0.0)]
    tokens = drawn(logits, numbers, greedy=(1,), padding=3)
    wanted = expected(logits, numbers)
    wanted[1] = logits[1].argmax().int().cpu()
    assert tokens.tolist() == wanted.tolist()


@pytest.mark.parametrize("filters", [False, True])
def test_unusable_logits_are_told_and_forbidden_tokens_never_drawn(filters: bool, device: torch.device) -> None:
    logits = torch.randn(6, VOCAB, device=device)
    logits[0, 5] = math.nan
    logits[1, VOCAB - 1] = math.inf
    logits[2] = -math.inf
    logits[3] = -math.inf
    logits[3, 77] = -3.0
    logits[4, :300] = -math.inf
    tokens = drawn(logits, [(1.0, 0.0, 0.95 if filters else 1.0, 0.0)] * 6, filters=filters, greedy=(5,))
    assert tokens[:4].tolist() == [-1, -1, -1, 77]
    assert tokens[4] >= 300
    assert tokens[5] == logits[5].argmax().cpu()


def test_tokens_are_put_in_their_place(device: torch.device) -> None:
    logits = torch.randn(3, VOCAB, device=device)
    logits[1] = math.nan
    table = torch.full((4, 8), -5, dtype=torch.int32, device=device)
    tokens = drawn(logits, [(1.0, 0.0, 1.0, 0.0)] * 3, filters=False, table=table)
    # Row r sits in slot 3 - r; its position is r, and one ahead.
    assert [int(table[3 - r, r + 1]) for r in range(3)] == [int(tokens[0]), 0, int(tokens[2])]
    assert int((table != -5).sum()) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_large_vocabularies_on_the_gpu(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = (torch.randn(rows, 151936, device=device) * 2).to(dtype)
    choices = [(0.6, 0.0, 1.0, 0.0), (0.7, 20.0, 0.95, 0.0), (1.0, 0.0, 0.9, 0.0), (1.2, 0.0, 1.0, 0.05)]
    numbers = [choices[row % 4] for row in range(rows)]
    tokens = drawn(logits, numbers)
    wrong = int((tokens != expected(logits, numbers)).sum())
    # Masses are float32 sums in another order: a draw may fall the other way once in a great while.
    assert wrong <= rows // 100
