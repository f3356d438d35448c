"""Paged decode attention against float64, with NaN wherever the kernel must not look."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.ops.triton.decode_plan import DecodeCapacity, decode_capacity, plan_decode
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
    invariant: bool = False,
    capacity: DecodeCapacity | None = None,
    min_part: int = 32,
    launches: int = 1,
) -> torch.Tensor:
    rows, heads, head_dim = case.q.shape
    kv_heads = case.key_cache.shape[1]
    contexts = np.array(case.starts, dtype=np.int32) + 1
    plan = plan_decode(contexts, kv_heads, SMS, sliding_window=window, batch_invariant=invariant, min_part=min_part, capacity=capacity)
    workspace = DecodeWorkspace.allocate(plan.capacity, heads, kv_heads, head_dim, case.q.device)
    workspace.load(plan)
    out = torch.full_like(case.q, float("nan"))
    tuning = decode_tuning(head_dim, case.key_cache.element_size(), rows, kv_heads, SMS, overlap=case.q.is_cuda)
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


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 80), (2, 2, 96), (8, 2, 128), (4, 2, 256), (9, 3, 64)])
def test_matches_float64(heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
    case = decode_case([1, 17, 300, 64, 129], heads, kv_heads, head_dim, device)
    assert relative_error(run(case, launches=2), attention_reference(case, scale=head_dim**-0.5)) < 8e-3


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
    out = run(case, capacity=decode_capacity(8, 2, SMS))
    assert relative_error(out, attention_reference(case, scale=0.125)) < 8e-3


def test_batch_invariant_rows_keep_their_bits(device: torch.device) -> None:
    case = decode_case([700, 90, 1100], 4, 2, 64, device)
    together = run(case, invariant=True)
    for row in range(3):
        alone = PagedCase(
            case.q[row : row + 1],
            case.key_cache,
            case.value_cache,
            case.block_tables[row : row + 1],
            case.starts[row : row + 1],
            [1],
            case.keys[row : row + 1],
            case.values[row : row + 1],
        )
        assert torch.equal(run(alone, invariant=True)[0], together[row])


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_large_batches_on_the_gpu(cache_dtype: torch.dtype, device: torch.device) -> None:
    contexts = torch.randint(1, 3000, (200,)).tolist()
    case = decode_case(contexts, 32, 8, 128, device, cache_dtype=cache_dtype)
    scales = torch.ones(1, device=device) if cache_dtype != torch.bfloat16 else None
    first = run(case, k_scale=scales, v_scale=scales, launches=3, min_part=64)
    assert relative_error(first, attention_reference(case, scale=128**-0.5)) < 8e-3
    assert torch.equal(first, run(case, k_scale=scales, v_scale=scales, min_part=64))
