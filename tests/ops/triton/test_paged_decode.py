"""Paged decode attention against float64, with NaN wherever the kernel must not look."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.ops.triton.decode_plan import Bundles, bundle_limit, bundle_rows, decode_capacity, plan_decode
from octavo.ops.triton.paged_decode import DecodeWorkspace, decode_tuning, paged_decode

from .paged import PagedCase, attention_reference, paged_case, relative_error

SMS = 12
"""A small card, so that short contexts are split too."""


def run(
    case: PagedCase,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    max_rows: int | None = None,
    launches: int = 1,
    bundles: Bundles | None = None,
    at_once: int | None = None,
) -> torch.Tensor:
    rows, heads, head_dim = case.q.shape
    kv_heads = case.key_cache.shape[1]
    contexts = np.array(case.starts, dtype=np.int32) + 1
    max_rows = max_rows or rows
    capacity = decode_capacity(max_rows, kv_heads, SMS)
    if bundles is not None:
        capacity = decode_capacity(max_rows, kv_heads, SMS, bundle=bundle_limit(heads // kv_heads))
    if at_once is not None:
        capacity = replace(capacity, at_once=at_once)
    plan = plan_decode(contexts, kv_heads, SMS, capacity, sliding_window=window, bundles=bundles, min_part=32)
    assert bool(plan.num_members) == (bundles is not None)
    workspace = DecodeWorkspace.allocate(plan.capacity, heads, kv_heads, head_dim, case.q.device)
    workspace.load(plan)
    out = torch.full_like(case.q, float("nan"))
    tuning = decode_tuning(head_dim, case.key_cache.element_size(), max_rows, kv_heads, SMS, overlap=case.q.is_cuda)
    for _ in range(launches):
        paged_decode(
            case.q,
            case.key_cache,
            case.value_cache,
            case.block_tables,
            workspace,
            out,
            scale=head_dim**-0.5,
            sliding_window=window,
            soft_cap=soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            tuning=tuning,
        )
    assert not workspace.counters.any(), "counters must be ready for the next launch"
    return out


def decode_case(contexts: list[int], heads: int, kv_heads: int, head_dim: int, device: torch.device, **options: object) -> PagedCase:
    return paged_case([n - 1 for n in contexts], [1] * len(contexts), heads, kv_heads, head_dim, device=device, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 80), (2, 1, 96), (4, 1, 128), (2, 1, 256), (3, 1, 64)])
def test_matches_float64(heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
    case = decode_case([1, 17, 260, 64], heads, kv_heads, head_dim, device)
    assert relative_error(run(case), attention_reference(case, scale=head_dim**-0.5)) < 8e-3


def test_a_second_launch_finds_the_workspace_ready(device: torch.device) -> None:
    case = decode_case([300, 20], 4, 2, 64, device)
    assert torch.equal(run(case, launches=2), run(case))


@pytest.mark.parametrize("at_once", [1, 3])
def test_items_follow_each_other_in_few_thread_blocks(at_once: int, device: torch.device) -> None:
    case = decode_case([300, 20, 1, 90], 4, 2, 64, device)
    assert torch.equal(run(case, at_once=at_once), run(case))


def test_float16(device: torch.device) -> None:
    case = decode_case([33, 200], 4, 2, 64, device, dtype=torch.float16)
    assert relative_error(run(case), attention_reference(case, scale=0.125)) < 2e-3


@pytest.mark.parametrize("window", [1, 50, 128, 1000])
def test_sliding_window(window: int, device: torch.device) -> None:
    case = decode_case([5, 130, 331], 4, 2, 64, device)
    assert relative_error(run(case, window=window), attention_reference(case, scale=0.125, sliding_window=window)) < 8e-3


def test_soft_cap(device: torch.device) -> None:
    case = decode_case([5, 130, 331], 4, 2, 64, device)
    case.q.mul_(8)
    assert relative_error(run(case, soft_cap=5.0), attention_reference(case, scale=0.125, soft_cap=5.0)) < 8e-3


@pytest.mark.parametrize("per_head", [True, False])
def test_float8_cache(per_head: bool, device: torch.device) -> None:
    case = decode_case([20, 150], 4, 2, 64, device, cache_dtype=torch.float8_e4m3fn)
    scales = torch.tensor([0.5, 2.0] if per_head else [0.7], device=device)
    out = run(case, k_scale=scales, v_scale=scales * 3)
    both = scales.expand(2)
    assert relative_error(out, attention_reference(case, scale=0.125, k_scale=both, v_scale=both * 3)) < 8e-3


def test_rows_of_a_fused_projection(device: torch.device) -> None:
    case = decode_case([20, 90], 4, 2, 64, device)
    fused = torch.full((2, 8, 64), float("nan"), device=device, dtype=case.q.dtype)
    fused[:, :4] = case.q
    strided = PagedCase(**{**vars(case), "q": fused[:, :4]})
    assert torch.equal(run(strided), run(case))


def test_graph_capacity_leaves_padding_rows_alone(device: torch.device) -> None:
    case = decode_case([40, 500], 4, 2, 64, device)
    out = run(case, max_rows=8)
    assert relative_error(out, attention_reference(case, scale=0.125)) < 8e-3


def test_whatever_the_block_size(device: torch.device) -> None:
    for block in (4, 32, 128):
        case = decode_case([1, 50, 300], 4, 2, 64, device, block=block)
        assert relative_error(run(case), attention_reference(case, scale=0.125)) < 8e-3, block


def shared_case(
    families: list[tuple[int, list[int]]], heads: int, kv_heads: int, head_dim: int, device: torch.device, **options: object
) -> tuple[PagedCase, Bundles]:
    """Rows of which the first `shared` tokens of each family lie in the same blocks; the others' own blocks for them are NaN."""
    contexts = [shared + own for shared, owns in families for own in owns]
    case = decode_case(contexts, heads, kv_heads, head_dim, device, **options)
    block, common, row = case.key_cache.shape[2], list[int](), 0
    for shared, owns in families:
        leader = row
        for _ in owns:
            common.append(0 if row == leader else shared)
            if row != leader:
                own = case.block_tables[row, : shared // block].long()
                case.key_cache[own], case.value_cache[own] = float("nan"), float("nan")
                case.block_tables[row, : shared // block] = case.block_tables[leader, : shared // block]
                case.keys[row][:, :shared] = case.keys[leader][:, :shared]
                case.values[row][:, :shared] = case.values[leader][:, :shared]
            row += 1
    order = np.arange(len(contexts), dtype=np.int32)
    bundles = bundle_rows(order, np.array(common, dtype=np.int32), bundle_limit(heads // kv_heads), min_shared=32)
    assert bundles is not None
    return case, bundles


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 1, 64), (2, 2, 64), (3, 1, 80), (8, 1, 128)])
def test_rows_with_a_common_beginning(heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
    families = [(96, [10, 40, 1, 33, 100]), (0, [70]), (192, [5, 17])]
    case, bundles = shared_case(families, heads, kv_heads, head_dim, device)
    out = run(case, bundles=bundles, launches=2)
    assert relative_error(out, attention_reference(case, scale=head_dim**-0.5)) < 8e-3
    assert relative_error(run(case), attention_reference(case, scale=head_dim**-0.5)) < 8e-3


def test_common_beginnings_in_a_larger_graph(device: torch.device) -> None:
    case, bundles = shared_case([(128, [16, 3])], 4, 2, 64, device)
    assert relative_error(run(case, bundles=bundles, max_rows=6), attention_reference(case, scale=0.125)) < 8e-3


def test_common_beginnings_in_float8(device: torch.device) -> None:
    case, bundles = shared_case([(64, [16, 30])], 4, 2, 64, device, cache_dtype=torch.float8_e4m3fn)
    scales = torch.tensor([0.5, 2.0], device=device)
    out = run(case, bundles=bundles, k_scale=scales, v_scale=scales)
    assert relative_error(out, attention_reference(case, scale=0.125, k_scale=scales, v_scale=scales)) < 8e-3


@pytest.mark.gpu
def test_many_rows_with_common_beginnings_on_the_gpu(device: torch.device) -> None:
    families = [(2048, [200] * 40), (512, list(range(1, 400, 13))), (0, [900, 30, 2500])]
    case, bundles = shared_case(families, 32, 8, 128, device)
    out = run(case, bundles=bundles, launches=3)
    assert relative_error(out, attention_reference(case, scale=128**-0.5)) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_large_batches_on_the_gpu(cache_dtype: torch.dtype, device: torch.device) -> None:
    contexts = torch.randint(1, 3000, (200,)).tolist()
    case = decode_case(contexts, 32, 8, 128, device, cache_dtype=cache_dtype)
    scales = torch.ones(1, device=device) if cache_dtype != torch.bfloat16 else None
    first = run(case, k_scale=scales, v_scale=scales, launches=3)
    assert relative_error(first, attention_reference(case, scale=128**-0.5)) < 8e-3
    assert torch.equal(first, run(case, k_scale=scales, v_scale=scales))
