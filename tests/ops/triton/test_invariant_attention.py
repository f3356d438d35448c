"""Batch-invariant attention against float64, with NaN wherever the kernel must not look, and the freedom of its planner."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops.triton.invariant_attention import InvariantWorkspace, invariant_attention, tile_rows
from octavo.ops.triton.invariant_plan import (
    COUNT,
    COUNTER,
    FIRST_PART,
    HI,
    LO,
    NUM_ITEMS,
    PART,
    POSITION,
    ROW,
    SEGMENT,
    TOKEN,
    WORKSPACE_ROWS,
    plan_invariant,
    spare_items,
)

from .paged import PagedCase, attention_reference, paged_case, relative_error


def run(
    case: PagedCase,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sms: int = 4,
    tokens_per_tile: int | None = None,
    padding: int = 0,
) -> torch.Tensor:
    _, heads, head_dim = case.q.shape
    kv_heads = case.key_cache.shape[1]
    group = heads // kv_heads
    starts, counts = np.array(case.starts, np.int32), np.array(case.counts, np.int32)
    per_tile = tokens_per_tile or tile_rows(group) // group
    items = plan_invariant(starts, counts, per_tile, group, kv_heads, sms, sliding_window=window).items
    items = np.concatenate([items, np.zeros((padding, items.shape[1]), np.int32)])
    workspace = InvariantWorkspace.allocate(kv_heads, head_dim, case.q.device)
    workspace.sums.fill_(float("nan"))
    workspace.stats.fill_(float("nan"))
    out = torch.full_like(case.q, float("nan"))
    invariant_attention(
        case.q,
        case.key_cache,
        case.value_cache,
        case.block_tables,
        torch.from_numpy(items).to(case.q.device),
        workspace,
        out,
        scale=head_dim**-0.5,
        sliding_window=window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        overlap=case.q.is_cuda,
    )
    assert not workspace.counters.any(), "counters must be ready for the next launch"
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 80), (2, 1, 96), (4, 1, 128), (2, 1, 256), (9, 3, 64)])
def test_decodes_and_chunks_match_float64(heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
    case = paged_case([17, 600, 0, 30], [1, 1, 24, 40], heads, kv_heads, head_dim, device=device)
    assert relative_error(run(case, padding=3), attention_reference(case, scale=head_dim**-0.5)) < 8e-3


@pytest.mark.parametrize("window", [1, 40, 600])
def test_sliding_window(window: int, device: torch.device) -> None:
    case = paged_case([1100, 0, 500], [1, 70, 30], 4, 2, 64, device=device)
    assert relative_error(run(case, window=window), attention_reference(case, scale=0.125, sliding_window=window)) < 8e-3


def test_soft_cap(device: torch.device) -> None:
    case = paged_case([300, 0], [1, 40], 4, 2, 64, device=device)
    case.q.mul_(8)
    assert relative_error(run(case, soft_cap=5.0), attention_reference(case, scale=0.125, soft_cap=5.0)) < 8e-3


@pytest.mark.parametrize("per_head", [True, False])
def test_float8_cache(per_head: bool, device: torch.device) -> None:
    case = paged_case([700, 0], [1, 40], 4, 2, 64, device=device, cache_dtype=torch.float8_e4m3fn)
    scales = torch.tensor([0.5, 2.0] if per_head else [0.7], device=device)
    both = scales.expand(2)
    expected = attention_reference(case, scale=0.125, k_scale=both, v_scale=both * 3)
    assert relative_error(run(case, k_scale=scales, v_scale=scales * 3), expected) < 8e-3


def test_cut_tiles_have_the_bits_of_whole_ones(device: torch.device) -> None:
    case = paged_case([1800, 1020], [1, 9], 4, 2, 64, device=device)
    whole, cut = run(case, sms=1), run(case, sms=64)
    assert torch.equal(whole, cut)
    assert relative_error(cut, attention_reference(case, scale=0.125)) < 8e-3


def rows_of(case: PagedCase, row: int, first: int, count: int) -> PagedCase:
    """Only `count` tokens of one row, from position `first` on; positions as they were."""
    token = sum(case.counts[:row]) + first - case.starts[row]
    return dataclasses.replace(
        case,
        q=case.q[token : token + count].clone(),
        block_tables=case.block_tables[row : row + 1],
        starts=[first],
        counts=[count],
        keys=case.keys[row : row + 1],
        values=case.values[row : row + 1],
    )


@pytest.mark.gpu  # the interpreter multiplies with BLAS, whose bits depend on a row's place in the matrix
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"), [(32, 8, 128, None), (16, 8, 128, 700), (9, 3, 64, None), (8, 1, 256, None)]
)
def test_bits_depend_on_position_alone(
    cache_dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int | None, device: torch.device
) -> None:
    dtype = torch.float16 if cache_dtype == torch.float16 else torch.bfloat16
    case = paged_case([0, 0, 0], [1500, 333, 40], heads, kv_heads, head_dim, device=device, dtype=dtype, cache_dtype=cache_dtype)
    scale = torch.rand(kv_heads, device=device) + 0.5 if cache_dtype == torch.float8_e4m3fn else None
    whole = run(case, window=window, k_scale=scale, v_scale=scale, sms=132)
    expected = attention_reference(case, scale=head_dim**-0.5, sliding_window=window, k_scale=scale, v_scale=scale)
    assert relative_error(whole, expected) < 8e-3
    for row, first, count in ((0, 0, 1), (0, 511, 1), (0, 512, 1), (0, 1499, 1), (0, 777, 500), (0, 3, 1200), (1, 332, 1), (1, 100, 233)):
        begin = sum(case.counts[:row]) + first
        for sms in (1, 132):
            part = run(rows_of(case, row, first, count), window=window, k_scale=scale, v_scale=scale, sms=sms)
            assert torch.equal(part, whole[begin : begin + count]), (row, first, count, sms)


@settings(deadline=None, max_examples=150)
@given(
    rows=st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 300)), min_size=1, max_size=12),
    per_tile=st.integers(1, 64),
    group=st.integers(1, 8),
    kv_heads=st.sampled_from([1, 2, 8]),
    sms=st.sampled_from([1, 8, 132]),
    window=st.none() | st.integers(1, 3000),
)
def test_every_key_of_every_query_is_covered_once(
    rows: list[tuple[int, int]], per_tile: int, group: int, kv_heads: int, sms: int, window: int | None
) -> None:
    start, count = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    plan = plan_invariant(start, count, per_tile, group, kv_heads, sms, sliding_window=window)
    items = plan.items.astype(np.int64)
    assert plan.part_rows <= WORKSPACE_ROWS
    tiles: dict[tuple[int, int], list[np.ndarray]] = {}
    for item in items:
        tiles.setdefault((item[ROW], item[TOKEN]), []).append(item)
    assert len(items) <= len(tiles) + spare_items(kv_heads, sms)
    covered: dict[int, int] = {}
    places: set[int] = set()
    for (row, token), parts in tiles.items():
        parts.sort(key=lambda item: item[LO])
        first, last = parts[0], parts[-1]
        position, size = first[POSITION], first[COUNT]
        assert token == int(count[:row].sum()) + position - start[row]
        for i in range(token, token + size):
            covered[i] = covered.get(i, 0) + 1
        assert last[HI] == position + size
        seen_from = 0 if window is None else max(0, position - window + 1)
        assert seen_from - SEGMENT < first[LO] <= seen_from
        for before, after in itertools.pairwise(parts):
            assert before[HI] == after[LO]
        assert all(item[LO] % SEGMENT == 0 and item[LO] < item[HI] for item in parts)
        assert {item[NUM_ITEMS] for item in parts} == {len(parts)}
        assert len({item[COUNTER] for item in parts}) == 1
        if len(parts) == 1 and first[PART] < 0:
            continue
        for item in parts:
            assert item[FIRST_PART] == first[PART]
            assert item[PART] == first[PART] + (item[LO] - first[LO]) // SEGMENT * size * group
        taken = range(first[PART], first[PART] + -(-(last[HI] - first[LO]) // SEGMENT) * size * group)
        assert places.isdisjoint(taken)
        places.update(taken)
    assert covered == dict.fromkeys(range(int(count.sum())), 1)
    assert not places or max(places) < WORKSPACE_ROWS
    counters = [parts[0][COUNTER] for parts in tiles.values() if parts[0][COUNTER] >= 0]
    assert len(counters) == len(set(counters))
