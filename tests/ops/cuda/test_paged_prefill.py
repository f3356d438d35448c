"""The CUDA C++ kernel for prompt attention: on a GPU compiled by NVRTC, elsewhere by the C++ compiler, a block's threads in turns."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from octavo.ops.cuda.chunk_plan import COUNT, POSITION, plan_chunks
from octavo.ops.cuda.paged_prefill import Form, arguments, boxes, form_of, paged_prefill, source, wins
from tests.ops.triton.paged import PagedCase, attention_reference, paged_case, relative_error
from tests.support.cuda_emulator import COMPILER, MACHINE, emulated

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = pytest.mark.skipif(not ON_GPU and COMPILER is None, reason="needs an NVIDIA GPU or a C++ compiler")

SMS = 3
"""Fewer than there are items, so that blocks go on to a next one."""
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 8e-3}


def run(case: PagedCase, *, first_token: int = 0) -> torch.Tensor:
    _, heads, head_dim = case.q.shape
    _, kv_heads, block, _ = case.key_cache.shape
    form = form_of(case.q.dtype, case.key_cache.dtype, head_dim, block, kv_heads, heads // kv_heads)
    assert form is not None
    plan = plan_chunks(np.array(case.starts, np.int32), np.array(case.counts, np.int32), first_token, form.tokens)
    items, out = torch.from_numpy(plan).to(DEVICE), torch.full_like(case.q, float("nan"))
    scale = head_dim**-0.5
    if ON_GPU:
        return paged_prefill(case.q, case.key_cache, case.value_cache, case.block_tables, items, out, form, scale=scale)
    packed = arguments(case.block_tables, items, out, form, scale=scale)
    kernel = emulated(source(form, MACHINE.read_text()), "paged_prefill", 3)
    kernel(packed, *boxes(case.q, case.key_cache, case.value_cache, form), SMS, 1, 1)
    return out


def case_of(starts: list[int], counts: list[int], heads: int = 4, kv_heads: int = 2, head_dim: int = 64, **options: object) -> PagedCase:
    return paged_case(starts, counts, heads, kv_heads, head_dim, device=DEVICE, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (4, 1, 128), (3, 1, 64), (2, 2, 128), (16, 1, 64), (32, 1, 64)])
def test_matches_float64(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = case_of([0, 150, 70], [40, 1, 20], heads, kv_heads, head_dim, dtype=dtype)
    assert relative_error(run(case), attention_reference(case, scale=head_dim**-0.5)) < LIMITS[dtype]


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_prompts(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows = rng.randint(1, 4)
    starts = [rng.choice((0, rng.randint(0, 400))) for _ in range(rows)]
    case = case_of(starts, [rng.randint(1, 150) for _ in range(rows)])
    assert relative_error(run(case), attention_reference(case, scale=0.125)) < LIMITS[case.q.dtype]


@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 127), (0, 128), (0, 129), (127, 1), (128, 1), (255, 64), (113, 15), (1100, 3)])
def test_where_tiles_begin_and_end(start: int, count: int) -> None:
    torch.manual_seed(1)
    case = case_of([start], [count])
    assert relative_error(run(case), attention_reference(case, scale=0.125)) < LIMITS[case.q.dtype]


@pytest.mark.parametrize("factor", [30, 300])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_that_rise_and_fall(factor: float, head_dim: int) -> None:
    """By much more than what goes without a new maximum, in either direction; by 300, weights by the old one would be infinite."""
    torch.manual_seed(2)
    case = case_of([300, 0], [60, 140], head_dim=head_dim)
    case.q.mul_(factor)
    assert relative_error(run(case), attention_reference(case, scale=head_dim**-0.5)) < LIMITS[case.q.dtype]


def test_rows_of_a_fused_projection_behind_decodes() -> None:
    case = case_of([20, 90], [50, 30])
    fused = torch.full((85, 8, 64), float("nan"), device=DEVICE, dtype=case.q.dtype)
    fused[5:, :4] = case.q
    out = run(PagedCase(**{**vars(case), "q": fused[:, :4]}), first_token=5)
    assert torch.equal(out[5:], run(case))
    assert out[:5].isnan().all(), "tokens outside the plan are not written"


@pytest.mark.parametrize("factor", [1, 100])
def test_bits_do_not_depend_on_how_a_prompt_was_chunked(factor: float) -> None:
    torch.manual_seed(3)
    case = case_of([0], [301])
    case.q.mul_(factor)
    whole = run(case)
    for cut in (1, 77, 128, 300):
        rest = PagedCase(**{**vars(case), "q": case.q[cut:], "starts": [cut], "counts": [301 - cut]})
        assert torch.equal(run(rest), whole[cut:])


@pytest.mark.parametrize("block", [32, 128])
def test_whatever_the_block_size(block: int) -> None:
    case = case_of([0, 50, 300], [40, 1, 70], block=block)
    assert relative_error(run(case), attention_reference(case, scale=0.125)) < LIMITS[case.q.dtype]


def test_what_is_no_number_stays_in_its_row() -> None:
    case = case_of([100, 90], [30, 20])
    clean = run(case)
    case.q[31, 1] = float("nan")
    got = run(case)
    assert got[31, 1].isnan().all()
    got[31, 1] = clean[31, 1]
    assert torch.equal(got, clean)


def test_what_the_kernel_does_not_take() -> None:
    half = torch.bfloat16
    assert form_of(half, half, 128, 16, 8, 4) == Form(False, 128, 16, 8, 4)
    assert form_of(half, torch.float8_e4m3fn, 128, 16, 8, 4) is None
    assert form_of(torch.float32, torch.float32, 128, 16, 8, 4) is None
    assert form_of(half, half, 96, 16, 8, 4) is None
    assert form_of(half, half, 128, 8, 8, 4) is None
    assert form_of(half, half, 128, 16, 1, 48) is None


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 8, 32])
def test_every_form_fits(head_dim: int, group: int) -> None:
    form = form_of(torch.float16, torch.float16, head_dim, 16, 8, group)
    assert form is not None
    assert form.shared_bytes <= 227 << 10
    assert form.tokens * group <= 128
    assert form.slots >= 4


def test_plans_have_every_token_once_and_the_longest_first() -> None:
    starts, counts = np.array([0, 700, 3], np.int32), np.array([100, 33, 1], np.int32)
    plan = plan_chunks(starts, counts, 7, 32)
    tokens = sorted(t for _, token, _, count, *_ in plan.tolist() for t in range(token, token + count))
    assert tokens == list(range(7, 7 + 134))
    keys = (plan[:, POSITION] + plan[:, COUNT]).tolist()
    assert keys == sorted(keys, reverse=True)
    for row, token, position, count, context, *_ in plan.tolist():
        assert position - starts[row] == token - 7 - [0, 100, 133][row]
        assert position + count <= context == starts[row] + counts[row]


@pytest.mark.parametrize(
    ("starts", "counts", "expected"),
    [([0], [8192], True), ([8192], [256], True), ([8192], [64], False), ([0] * 8, [128] * 8, True), ([16000, 0], [32, 300], False)],
)
def test_few_queries_of_long_contexts_are_left_to_triton(starts: list[int], counts: list[int], expected: bool) -> None:
    form = Form(False, 128, 16, 8, 4)
    plan = plan_chunks(np.array(starts, np.int32), np.array(counts, np.int32), 0, form.tokens)
    assert wins(plan, form, 132) == expected
    assert not wins(plan, Form(False, 64, 16, 8, 4), 132), "not measured"


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("starts", "counts"), [([0], [3000]), ([5000, 0, 17, 900], [1000, 1, 40, 2000]), ([0] * 14, [560] * 14)])
def test_large_chunks_have_the_same_bits_every_time(starts: list[int], counts: list[int]) -> None:
    """What a copy overtakes shows as a difference now and then."""
    case = case_of(starts, counts, 32, 8, 128)
    first = run(case)
    assert relative_error(first, attention_reference(case, scale=128**-0.5)) < 8e-3
    assert all(torch.equal(run(case), first) for _ in range(30))
