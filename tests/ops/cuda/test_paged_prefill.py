"""The CUDA C++ kernel for prompt attention: on a GPU compiled by NVRTC, elsewhere by the C++ compiler, a block's threads in turns."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.ops.cuda.chunk_plan import (
    BEGIN,
    CONTEXT,
    COUNT,
    END,
    FIRST_PART,
    ITEM_FIELDS,
    KEYS,
    NUM_PARTS,
    PART,
    POSITION,
    ROW,
    TOKEN,
    most_items,
    most_parts,
    plan_chunks,
)
from octavo.ops.cuda.paged_prefill import Form, Parts, arguments, boxes, form_of, paged_prefill, source, wins
from tests.ops.triton.paged import PagedCase, attention_reference, paged_case, relative_error
from tests.support.cuda_emulator import COMPILER, MACHINE, emulated

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = pytest.mark.skipif(not ON_GPU and COMPILER is None, reason="needs an NVIDIA GPU or a C++ compiler")

SMS = 3
"""Fewer than there are items, so that blocks go on to a next one."""
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 8e-3}


def run(case: PagedCase, *, first_token: int = 0, sms: int = 1, empty: int = 0) -> torch.Tensor:
    """sms: that the plan is made for; 1: no item's keys are cut. empty: items behind the others."""
    _, heads, head_dim = case.q.shape
    _, kv_heads, block, _ = case.key_cache.shape
    form = form_of(case.q.dtype, case.key_cache.dtype, head_dim, block, kv_heads, heads // kv_heads)
    assert form is not None
    starts, counts = np.array(case.starts, np.int32), np.array(case.counts, np.int32)
    plan = plan_chunks(starts, counts, first_token, form.tokens, kv_heads, sms)
    assert (plan[:, NUM_PARTS].max() > 1) == (sms > 1)
    plan = np.concatenate((plan, np.zeros((empty, ITEM_FIELDS), np.int32)))
    items, out = torch.from_numpy(plan).to(DEVICE), torch.full_like(case.q, float("nan"))
    parts = Parts.allocate(form, sms, DEVICE)
    parts.sums.fill_(float("nan"))
    parts.stats.fill_(float("nan"))
    scale = head_dim**-0.5
    if ON_GPU:
        paged_prefill(case.q, case.key_cache, case.value_cache, case.block_tables, items, parts, out, form, scale=scale)
    else:
        packed = arguments(case.block_tables, items, parts, out, scale=scale)
        kernel = emulated(source(form, MACHINE.read_text()), "paged_prefill", 3)
        kernel(packed, *boxes(case.q, case.key_cache, case.value_cache, form), SMS, 1, 1)
    assert not parts.counters.any()
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


@pytest.mark.parametrize("factor", [1, 300])
@pytest.mark.parametrize(
    ("starts", "counts", "heads", "kv_heads", "head_dim"),
    [([700], [3], 4, 1, 64), ([620, 0], [40, 5], 4, 1, 128), ([639, 640], [2, 1], 1, 1, 64)],
)
def test_keys_cut_into_parts(starts: list[int], counts: list[int], heads: int, kv_heads: int, head_dim: int, factor: float) -> None:
    torch.manual_seed(4)
    case = case_of(starts, counts, heads, kv_heads, head_dim)
    case.q.mul_(factor)
    cut = run(case, sms=40)
    assert relative_error(cut, attention_reference(case, scale=head_dim**-0.5)) < LIMITS[case.q.dtype]


def test_empty_items_change_nothing() -> None:
    case = case_of([900, 10], [2, 20], kv_heads=1)
    assert torch.equal(run(case, sms=40, empty=5), run(case, sms=40))


def test_what_is_no_number_stays_in_its_row_of_all_parts() -> None:
    case = case_of([900], [20], kv_heads=1)
    clean = run(case, sms=40)
    case.q[7, 1] = float("nan")
    got = run(case, sms=40)
    assert got[7, 1].isnan().all()
    got[7, 1] = clean[7, 1]
    assert torch.equal(got, clean)


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


ROWS = st.lists(st.tuples(st.integers(0, 20000), st.integers(1, 700)), min_size=1, max_size=40)


@given(ROWS, st.sampled_from([(1, 128), (2, 64), (8, 32), (8, 4)]), st.sampled_from([1, 8, 132]))
def test_plans_have_every_query_and_key_once_and_the_longest_first(rows: list[tuple[int, int]], form: tuple[int, int], sms: int) -> None:
    kv_heads, tokens = form
    starts, counts = np.array(rows, np.int32).T
    plan = plan_chunks(starts, counts, 7, tokens, kv_heads, sms)
    assert len(plan) <= most_items(int(counts.sum()), len(rows), tokens, kv_heads, sms)
    sizes = (plan[:, END] - plan[:, BEGIN]).tolist()
    assert sizes == sorted(sizes, reverse=True) and min(sizes) > 0
    firsts, places = 7 + np.cumsum(counts) - counts, []
    found: dict[int, list[list[int]]] = {}
    for item in plan.tolist():
        row, token, position = item[ROW], item[TOKEN], item[POSITION]
        assert position - starts[row] == token - firsts[row]
        assert position + item[COUNT] <= item[CONTEXT] == starts[row] + counts[row]
        found.setdefault(token, []).append(item)
    tokens_of = sorted(t for token, items in found.items() for t in range(token, token + items[0][COUNT]))
    assert tokens_of == list(range(7, 7 + counts.sum()))
    for items in found.values():
        items.sort(key=lambda item: item[BEGIN])
        ends = [0, *(item[END] for item in items)]
        assert [item[BEGIN] for item in items] == ends[:-1]
        assert ends[-1] == -(-(items[0][POSITION] + items[0][COUNT]) // KEYS)
        assert items[-1][BEGIN] * KEYS <= items[0][POSITION], "each query sees a key of each part"
        assert {item[NUM_PARTS] for item in items} == {len(items)}
        if len(items) == 1:
            assert items[0][PART] == items[0][FIRST_PART] == -1
            continue
        assert [item[PART] - item[FIRST_PART] for item in items] == list(range(len(items)))
        places += [item[PART] for item in items]
    assert sorted(places) == list(range(len(places)))
    assert len(places) <= most_parts(kv_heads, sms)


@pytest.mark.parametrize(
    ("starts", "counts", "most"),
    [([8192], [32], 1.3), ([8192], [64], 1.3), ([8192], [256], 1.3), ([16000, 0], [32, 300], 1.3), ([8192] * 4, [20] * 4, 1.3)],
)
def test_few_queries_of_long_contexts_are_spread_over_all_sms(starts: list[int], counts: list[int], most: float) -> None:
    """The longest SM has at most so many times an equal share of the tiles."""
    plan = plan_chunks(np.array(starts, np.int32), np.array(counts, np.int32), 0, 32, 8, 132)
    tiles = np.repeat(plan[:, END] - plan[:, BEGIN], 8)
    turns = np.zeros((-(-len(tiles) // 132), 132))
    turns.reshape(-1)[: len(tiles)] = tiles
    turns[1::2] = turns[1::2, ::-1]
    assert turns.sum(0).max() <= most * tiles.sum() / 132 + 1


def test_large_chunks_are_not_cut() -> None:
    for starts, counts in (([0], [8192]), ([0] * 14, [560] * 14), ([30000], [1024])):
        plan = plan_chunks(np.array(starts, np.int32), np.array(counts, np.int32), 0, 32, 8, 132)
        assert (plan[:, NUM_PARTS] == 1).all()


def test_where_it_is_measured_it_wins() -> None:
    assert wins(Form(False, 128, 16, 8, 4)) and not wins(Form(False, 64, 16, 8, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("starts", "counts"), [([0], [3000]), ([5000, 0, 17, 900], [1000, 1, 40, 2000]), ([0] * 14, [560] * 14)])
def test_large_chunks_have_the_same_bits_every_time(starts: list[int], counts: list[int]) -> None:
    """What a copy overtakes shows as a difference now and then."""
    case = case_of(starts, counts, 32, 8, 128)
    first = run(case)
    assert relative_error(first, attention_reference(case, scale=128**-0.5)) < 8e-3
    assert all(torch.equal(run(case), first) for _ in range(30))
