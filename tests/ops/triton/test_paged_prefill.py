"""Paged prefill attention against float64, with NaN wherever the kernel must not look."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.ops.triton.gather_cache import GatheredCache, gather_cache, plan_gather
from octavo.ops.triton.paged_prefill import PrefillTuning, PrefillWorkspace, paged_prefill, prefill_items, prefill_tuning, queries_per_key
from octavo.ops.triton.prefill_plan import plan_prefill

from .paged import PagedCase, attention_reference, paged_case, relative_error


def run(
    case: PagedCase,
    *,
    tuning: PrefillTuning | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sms: int = 4,
    gather: bool = False,
) -> torch.Tensor:
    _, heads, head_dim = case.q.shape
    kv_heads = case.key_cache.shape[1]
    group = heads // kv_heads
    starts, counts = np.array(case.starts, dtype=np.int32), np.array(case.counts, dtype=np.int32)
    tuning = tuning or prefill_tuning(head_dim, group, max(case.counts), queries_per_key(starts, counts), gathered=gather)
    plan = plan_prefill(starts, counts, 0, tuning.tokens_per_tile(group), kv_heads, sms, sliding_window=window)
    workspace = PrefillWorkspace.allocate(kv_heads, head_dim, sms, case.q.device)
    out = torch.full_like(case.q, float("nan"))
    gathered, gathered_starts = None, None
    if gather:
        gather_plan = plan_gather(starts + counts)
        gathered = GatheredCache.allocate(kv_heads, gather_plan.tokens + 100, head_dim, case.q.dtype, case.q.device)
        gathered.keys.fill_(float("nan"))
        gathered.values.fill_(float("nan"))
        gathered_starts = torch.from_numpy(gather_plan.starts).to(case.q.device)
        chunks = torch.from_numpy(gather_plan.chunks).to(case.q.device)
        gather_cache(case.key_cache, case.value_cache, case.block_tables, chunks, gathered)
    paged_prefill(
        case.q,
        case.key_cache,
        case.value_cache,
        case.block_tables,
        prefill_items(plan, case.q.device),
        workspace,
        out,
        scale=head_dim**-0.5,
        tuning=tuning,
        sliding_window=window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        gathered=gathered,
        gathered_starts=gathered_starts,
    )
    assert not workspace.counters.any()
    return out


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 80), (2, 1, 96), (4, 1, 128), (2, 1, 256), (9, 3, 64)])
def test_matches_float64(heads: int, kv_heads: int, head_dim: int, gather: bool, device: torch.device) -> None:
    case = paged_case([0, 30, 70], [24, 1, 20], heads, kv_heads, head_dim, device=device)
    assert relative_error(run(case, gather=gather), attention_reference(case, scale=head_dim**-0.5)) < 8e-3


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_tile_sizes(rows: int, device: torch.device) -> None:
    case = paged_case([0, 70], [50, 20], 4, 2, 64, device=device)
    out = run(case, tuning=PrefillTuning(rows=rows, tile=64, warps=4, stages=2))
    assert relative_error(out, attention_reference(case, scale=0.125)) < 8e-3


def test_short_chunk_behind_a_long_prefix_is_split_and_combined(device: torch.device) -> None:
    case = paged_case([1200], [9], 4, 2, 64, device=device)
    assert relative_error(run(case, sms=8), attention_reference(case, scale=0.125)) < 8e-3


@pytest.mark.parametrize("window", [1, 40, 300])
@pytest.mark.parametrize("gather", [False, True])
def test_sliding_window(window: int, gather: bool, device: torch.device) -> None:
    case = paged_case([0, 200], [70, 30], 4, 2, 64, device=device)
    assert relative_error(run(case, window=window, gather=gather), attention_reference(case, scale=0.125, sliding_window=window)) < 8e-3


def test_soft_cap(device: torch.device) -> None:
    case = paged_case([0, 150], [40, 20], 4, 2, 64, device=device)
    case.q.mul_(8)
    assert relative_error(run(case, soft_cap=5.0), attention_reference(case, scale=0.125, soft_cap=5.0)) < 8e-3


@pytest.mark.parametrize("gather", [False, True])
def test_float8_cache(gather: bool, device: torch.device) -> None:
    case = paged_case([0, 150], [40, 20], 4, 2, 64, device=device, cache_dtype=torch.float8_e4m3fn)
    scales = torch.tensor([0.5, 2.0], device=device)
    out = run(case, k_scale=scales, v_scale=scales * 3, gather=gather)
    assert relative_error(out, attention_reference(case, scale=0.125, k_scale=scales, v_scale=scales * 3)) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("starts", "counts"), [([0], [3000]), ([5000, 0, 17, 900], [1000, 1, 40, 2000]), ([30000], [50])])
def test_large_chunks_on_the_gpu(starts: list[int], counts: list[int], device: torch.device) -> None:
    case = paged_case(starts, counts, 32, 8, 128, device=device)
    assert relative_error(run(case, sms=132), attention_reference(case, scale=128**-0.5)) < 8e-3
