"""The CUDA C++ kernel for decode attention: on a GPU compiled by NVRTC, elsewhere by the C++ compiler, a block's threads in turns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.ops.cuda.even_plan import even_capacity, plan_even
from octavo.ops.cuda.paged_decode import EvenWorkspace, Form, arguments, boxes_of, form_of, paged_decode, source
from octavo.ops.triton.decode_plan import Bundles, bundle_limit
from tests.ops.triton.paged import PagedCase, attention_reference, paged_case, relative_error
from tests.ops.triton.test_paged_decode import shared_case
from tests.support.cuda_emulator import COMPILER, MACHINE, emulated

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = pytest.mark.skipif(not ON_GPU and COMPILER is None, reason="needs an NVIDIA GPU or a C++ compiler")

SMS = 6
"""Fewer than there are items, so that blocks go on to a next one, and short contexts are cut."""
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 8e-3}
FLOAT8 = torch.float8_e4m3fn
CACHES = [None, FLOAT8]
"""Their numbers; None: the model's."""


def run(
    case: PagedCase,
    *,
    window: int | None = None,
    max_rows: int | None = None,
    launches: int = 1,
    bundles: Bundles | None = None,
    sms: int = SMS,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, heads, head_dim = case.q.shape
    _, kv_heads, block, _ = case.key_cache.shape
    group, max_rows = heads // kv_heads, max_rows or rows
    capacity = even_capacity(max_rows, kv_heads, sms, bundle=1 if bundles is None else bundle_limit(group))
    contexts = np.array(case.starts, dtype=np.int32) + 1
    plan = plan_even(contexts, capacity, sliding_window=window, bundles=bundles, min_part=32)
    assert bool(plan.num_members) == (bundles is not None)
    form = form_of(case.q.dtype, case.key_cache.dtype, head_dim, block, kv_heads, group, bundles=capacity.members > 0)
    assert form is not None
    workspace = EvenWorkspace.allocate(capacity, group, head_dim, case.q.device)
    workspace.load(plan)
    out = torch.full_like(case.q, float("nan"))
    if case.key_cache.dtype == FLOAT8 and k_scale is None:
        k_scale = v_scale = torch.ones(1, device=DEVICE)
    options = {"scale": head_dim**-0.5, "sliding_window": window, "k_scale": k_scale, "v_scale": v_scale}
    for _ in range(launches):
        if ON_GPU:
            paged_decode(case.q, case.key_cache, case.value_cache, case.block_tables, workspace, out, form, **options)
            continue
        packed = arguments(case.q, case.block_tables, workspace, out, **options)
        caches = boxes_of(case.key_cache), boxes_of(case.value_cache)
        emulated(source(form, MACHINE.read_text()), "paged_decode", 2)(packed, *caches, sms, 1, 1)
    assert not workspace.counters.any(), "counters must be ready for the next launch"
    return out


def decode_case(contexts: list[int], heads: int, kv_heads: int, head_dim: int, **options: object) -> PagedCase:
    return paged_case([n - 1 for n in contexts], [1] * len(contexts), heads, kv_heads, head_dim, device=DEVICE, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 128), (8, 1, 128), (16, 1, 64), (5, 1, 64), (1, 1, 128)])
def test_matches_float64(heads: int, kv_heads: int, head_dim: int, cache: torch.dtype | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = decode_case([1, 17, 260, 64], heads, kv_heads, head_dim, dtype=dtype, cache_dtype=cache)
    assert relative_error(run(case), attention_reference(case, scale=head_dim**-0.5)) < LIMITS[dtype]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("contexts", [[1], [15], [16], [17], [33], [48], [49], [1000], [5, 0, 700, 0]])
def test_whatever_the_lengths(contexts: list[int], cache: torch.dtype | None) -> None:
    torch.manual_seed(1)
    case = decode_case([max(n, 1) for n in contexts], 4, 2, 64, cache_dtype=cache)
    case.starts[:] = [n - 1 for n in contexts]
    out, rows = run(case), [i for i, n in enumerate(contexts) if n]
    case.starts[:] = [max(n, 1) - 1 for n in contexts]
    assert relative_error(out[rows], attention_reference(case, scale=0.125)[rows]) < LIMITS[case.q.dtype]
    assert out[[i for i, n in enumerate(contexts) if not n]].isnan().all(), "rows without work are not written"


def test_a_second_launch_finds_the_workspace_ready() -> None:
    case = decode_case([300, 20], 4, 2, 64)
    assert torch.equal(run(case, launches=2), run(case))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("window", [1, 50, 128, 1000])
def test_sliding_window(window: int, cache: torch.dtype | None) -> None:
    torch.manual_seed(3)
    case = decode_case([5, 130, 331], 4, 2, 64, cache_dtype=cache)
    assert relative_error(run(case, window=window), attention_reference(case, scale=0.125, sliding_window=window)) < LIMITS[case.q.dtype]


@pytest.mark.parametrize("cache", CACHES)
def test_scores_that_rise_and_fall(cache: torch.dtype | None) -> None:
    """By much more than what goes without a new maximum, in either direction."""
    torch.manual_seed(4)
    case = decode_case([400, 333], 4, 2, 64, cache_dtype=cache)
    case.q.mul_(30)
    assert relative_error(run(case), attention_reference(case, scale=0.125)) < LIMITS[case.q.dtype]


@pytest.mark.parametrize("heads_apart", [False, True])
def test_scales_of_a_float8_cache(heads_apart: bool) -> None:
    torch.manual_seed(6)
    case = decode_case([20, 333, 90], 4, 2, 64, cache_dtype=FLOAT8)
    k_scale = torch.tensor([0.5, 3.0] if heads_apart else [1.7], device=DEVICE)
    v_scale = torch.tensor([0.02, 40.0] if heads_apart else [0.3], device=DEVICE)
    out = run(case, k_scale=k_scale, v_scale=v_scale)
    expected = attention_reference(case, scale=0.125, k_scale=k_scale.expand(2), v_scale=v_scale.expand(2))
    for head in range(4):
        assert relative_error(out[:, head], expected[:, head]) < LIMITS[case.q.dtype]


@pytest.mark.parametrize("by", [1e-30, 1e-6, 1e6, 1e30])
def test_queries_that_float16_cannot_hold(by: float) -> None:
    """Their products with a float8 cache are float16's."""
    torch.manual_seed(7)
    case = decode_case([70, 200], 4, 2, 64, dtype=torch.bfloat16, cache_dtype=FLOAT8)
    case.q[:, ::2] *= by
    scales = torch.tensor([1 / by], device=DEVICE), torch.ones(1, device=DEVICE)
    out = run(case, k_scale=scales[0], v_scale=scales[1])
    expected = attention_reference(case, scale=0.125, k_scale=scales[0].expand(2), v_scale=scales[1].expand(2))
    assert relative_error(out[:, ::2], expected[:, ::2]) < LIMITS[case.q.dtype]


def test_rows_of_a_fused_projection() -> None:
    case = decode_case([20, 90], 4, 2, 64)
    fused = torch.full((2, 8, 64), float("nan"), device=DEVICE, dtype=case.q.dtype)
    fused[:, :4] = case.q
    assert torch.equal(run(PagedCase(**{**vars(case), "q": fused[:, :4]})), run(case))


def test_graph_capacity_leaves_padding_rows_alone() -> None:
    case = decode_case([40, 500], 4, 2, 64)
    assert relative_error(run(case, max_rows=8), attention_reference(case, scale=0.125)) < LIMITS[case.q.dtype]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("block", [32, 48, 128])
def test_whatever_the_block_size(block: int, cache: torch.dtype | None) -> None:
    case = decode_case([1, 50, 300], 4, 2, 64, block=block, cache_dtype=cache)
    assert relative_error(run(case), attention_reference(case, scale=0.125)) < LIMITS[case.q.dtype]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 1, 64), (2, 2, 64), (3, 1, 64), (8, 1, 128)])
def test_rows_with_a_common_beginning(heads: int, kv_heads: int, head_dim: int, cache: torch.dtype | None) -> None:
    torch.manual_seed(5)
    families = [(96, [10, 40, 1, 33, 100]), (0, [70]), (192, [5, 17])]
    case, bundles = shared_case(families, heads, kv_heads, head_dim, DEVICE, cache_dtype=cache)
    out = run(case, bundles=bundles, launches=2)
    assert relative_error(out, attention_reference(case, scale=head_dim**-0.5)) < LIMITS[case.q.dtype]
    assert relative_error(run(case), attention_reference(case, scale=head_dim**-0.5)) < LIMITS[case.q.dtype]


@pytest.mark.parametrize("cache", CACHES)
def test_what_is_no_number_stays_in_its_row(cache: torch.dtype | None) -> None:
    case = decode_case([100, 90], 4, 2, 64, cache_dtype=cache)
    clean = run(case)
    case.q[1, 1] = float("nan")
    got = run(case)
    assert torch.equal(got[0], clean[0])
    assert torch.equal(got[1, [0, 2, 3]], clean[1, [0, 2, 3]])
    assert got[1, 1].isnan().all()
    if cache is not None:
        case.value_cache[case.block_tables[1, 0], 1, 3, 7] = float("nan")
        got = run(case)
        assert torch.equal(got[0], clean[0])
        assert got[1, 2:, 7].isnan().all()


def test_what_the_kernel_does_not_take() -> None:
    half = torch.bfloat16
    assert form_of(half, half, 128, 16, 8, 4, bundles=True) == Form(False, 128, 16, 8, 4, True)
    assert form_of(half, FLOAT8, 128, 16, 8, 4, bundles=True) == Form(False, 128, 16, 8, 4, True, True)
    assert form_of(half, torch.float16, 128, 16, 8, 4, bundles=True) is None
    assert form_of(torch.float32, torch.float32, 128, 16, 8, 4, bundles=True) is None
    assert form_of(half, half, 96, 16, 8, 4, bundles=True) is None
    assert form_of(half, half, 128, 8, 8, 4, bundles=True) is None
    assert form_of(half, half, 128, 16, 1, 32, bundles=True) is None


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("bundles", [False, True])
@pytest.mark.parametrize("cache", [torch.float16, FLOAT8])
def test_every_form_fits(head_dim: int, group: int, bundles: bool, cache: torch.dtype) -> None:
    form = form_of(torch.float16, cache, head_dim, 16, 8, group, bundles=bundles)
    assert form is not None
    assert form.shared_bytes <= 227 << 10


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("cache", CACHES)
def test_large_batches_have_the_same_bits_every_time(cache: torch.dtype | None) -> None:
    """What a copy overtakes, or a part that is counted too early, shows as a difference now and then."""
    for contexts in (torch.randint(1, 3000, (200,)).tolist(), [8192], [700, 5000, 3000]):
        case = decode_case(contexts, 32, 8, 128, cache_dtype=cache)
        first = run(case, sms=132)
        assert relative_error(first, attention_reference(case, scale=128**-0.5)) < 8e-3
        assert all(torch.equal(run(case, sms=132, launches=2), first) for _ in range(30))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("cache", CACHES)
def test_many_rows_with_common_beginnings_on_the_gpu(cache: torch.dtype | None) -> None:
    families = [(2048, [200] * 40), (512, list(range(1, 400, 13))), (0, [900, 30, 2500])]
    case, bundles = shared_case(families, 32, 8, 128, DEVICE, cache_dtype=cache)
    out = run(case, bundles=bundles, launches=3, sms=132)
    assert relative_error(out, attention_reference(case, scale=128**-0.5)) < 8e-3
