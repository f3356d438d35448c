"""Which kernel attends to a step's prompt chunks, and the one in CUDA C++ as the attention backend uses it; without a GPU, emulated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.attention import chunks as module
from octavo.attention.base import GraphShape, KvScales, LayerSpec, StepBatch
from octavo.attention.chunks import Chunks, CudaChunks, GatheredChunks, TritonChunks
from octavo.attention.decodes import Geometry
from octavo.attention.paged_cache import ScaleOfLayer
from octavo.attention.triton import TritonAttention
from octavo.ops.cuda.compiler import CompilerError
from octavo.ops.cuda.paged_prefill import Form, Parts, arguments, boxes, source
from octavo.ops.triton.launch import compiling_only, sm_count
from tests.ops.triton.paged import attention_reference, paged_case, relative_error
from tests.support.cuda_emulator import COMPILER, MACHINE, emulated
from tests.support.paged_batches import step_batch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HALF = torch.float16
FLOAT8 = torch.float8_e4m3fn
HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 128, 16


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_GPU:
        return
    if COMPILER is None:
        pytest.skip("needs an NVIDIA GPU or a C++ compiler")

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, items: torch.Tensor, parts: Parts, out: torch.Tensor,
        form: Form, *, scale: float,
    ) -> None:  # fmt: skip
        kernel = emulated(source(form, MACHINE.read_text()), "paged_prefill", 3)
        kernel(arguments(tables, items, parts, out, scale=scale), *boxes(q, k, v, form), 2, 1, 1)

    monkeypatch.setattr(module, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(module.compiled, "prepare", lambda form, device: None)
    monkeypatch.setattr(module.compiled, "finish_preparing", lambda form, device: None)
    monkeypatch.setattr(module.cuda, "paged_prefill", run)


def chunks(
    head_dim: int = DIM, block: int = BLOCK, dtype: torch.dtype = HALF, *, window: int | None = None, capped: bool = False
) -> Chunks:
    return Chunks(Geometry(HEADS, KV_HEADS, head_dim, window, capped, 0), dtype, HALF, block, DEVICE, None)


def draft(of: Chunks, start: list[int], count: list[int]) -> CudaChunks | TritonChunks | GatheredChunks:
    plan = of.draft(np.array(start, np.int32), np.array(count, np.int32), 0)
    return plan.finish([torch.from_numpy(a).to(DEVICE) for a in plan.arrays])


ENOUGH = 16 * (sm_count(DEVICE) + 1)
"""Tokens that make an item an SM."""


def test_a_step_of_decodes_and_prompts() -> None:
    torch.manual_seed(0)
    starts, counts = [30, 77, 0, 100], [1, 1, ENOUGH, 40]
    case = paged_case(starts, counts, HEADS, KV_HEADS, DIM, device=DEVICE, dtype=HALF)
    attention = TritonAttention((LayerSpec(HEADS, KV_HEADS, DIM, DIM**-0.5),), len(case.key_cache), BLOCK, HALF, DEVICE)
    keys, values = attention.cache.of(0)
    keys.copy_(case.key_cache)
    values.copy_(case.value_cache)
    batch = step_batch(starts, counts, case.block_tables.cpu(), BLOCK)
    batch = StepBatch(**{n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in vars(batch).items()})
    # What the step itself writes is there already: written again, as it is.
    k, v = (torch.cat([x[:, s:] for x, s in zip(rows, starts, strict=True)], 1).transpose(0, 1) for rows in (case.keys, case.values))
    attend = attention.plan(batch)
    assert isinstance(attend.work[0].chunks, CudaChunks)  # type: ignore[attr-defined]
    assert relative_error(attend(0, case.q, k, v), attention_reference(case, scale=DIM**-0.5)) < 2e-3


@pytest.mark.parametrize("of_heads", [False, True])
def test_prompts_over_a_float8_cache_are_gathered_for_the_kernel(of_heads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    monkeypatch.setattr("octavo.attention.triton.overlap_supported", lambda device: True)
    starts, counts = [30, 77, 0, 100, 5], [1, 1, 300, 140, 20]
    case = paged_case(starts, counts, HEADS, KV_HEADS, DIM, device=DEVICE, dtype=HALF, cache_dtype=FLOAT8)
    scales = KvScales(*torch.tensor([[0.5, 2.0], [0.25, 4.0]] if of_heads else [[0.5], [4.0]], device=DEVICE))
    layers = (LayerSpec(HEADS, KV_HEADS, DIM, DIM**-0.5),)
    attention = TritonAttention(layers, len(case.key_cache), BLOCK, FLOAT8, DEVICE, model_dtype=HALF, scales={0: scales}, max_gathered=1024)
    keys, values = attention.cache.of(0)
    keys.copy_(case.key_cache)
    values.copy_(case.value_cache)
    batch = step_batch(starts, counts, case.block_tables.cpu(), BLOCK)
    batch = StepBatch(**{n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in vars(batch).items()})
    attend = attention.plan(batch)
    work = attend.work[0]  # type: ignore[attr-defined]
    assert isinstance(work.chunks, GatheredChunks)
    out = attention.run(0, work, case.q, batch.block_tables, batch.block_tables[2:], 2)
    expected = attention_reference(case, scale=DIM**-0.5, k_scale=scales.k.expand(KV_HEADS), v_scale=scales.v.expand(KV_HEADS))
    for head in range(HEADS):
        assert relative_error(out[:, head], expected[:, head]) < 2e-3
    tables = torch.zeros(2, 80, dtype=torch.int32)
    many = step_batch([0, 0], [900, 300], tables, BLOCK)
    assert isinstance(attention.plan(many).work[0].chunks, TritonChunks), "more than there is room for"  # type: ignore[attr-defined]
    few = step_batch([900], [20], tables[:1], BLOCK)
    assert isinstance(attention.plan(few).work[0].chunks, TritonChunks), "not worth it"  # type: ignore[attr-defined]


@pytest.mark.parametrize("triton", [False, True])
def test_captured_steps(triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and tokens that a shape has room for beyond the step's are left alone; both kernels give the same."""
    torch.manual_seed(1)
    starts, counts, shape = [3, 700, 0], [1, 40, 9], GraphShape(4, 64, 3)
    case = paged_case(starts, counts, HEADS, KV_HEADS, DIM, device=DEVICE, dtype=HALF)
    if triton:
        monkeypatch.setattr(module.cuda, "wins", lambda form: False)
    of = chunks()
    plan = torch.from_numpy(of.graph_plan(np.array(starts, np.int32), np.array(counts, np.int32), 1, shape))
    assert plan.numel() == of.graph_size(shape)
    assert plan.numel() % 4 == 0, "the next plan begins at a multiple of 16 bytes"
    work = of.graph_work(plan.to(DEVICE), shape)
    assert isinstance(work, TritonChunks if triton else CudaChunks)
    cache = module.LayerCache(LayerSpec(HEADS, KV_HEADS, DIM, DIM**-0.5), case.key_cache, case.value_cache, ScaleOfLayer(None, None))
    out = torch.full((64, HEADS, DIM), 7.0, dtype=HALF, device=DEVICE)
    q = torch.cat((case.q, torch.full_like(out[50:], float("nan"))))
    work.attend(q, cache, case.block_tables, out)
    assert (out[0] == 7).all() and (out[50:] == 7).all()
    assert relative_error(out[1:50], attention_reference(case, scale=DIM**-0.5)[1:]) < 2e-3


def test_what_the_kernel_does_not_take_goes_to_triton() -> None:
    assert isinstance(draft(chunks(), [0], [ENOUGH]), CudaChunks)
    assert isinstance(draft(chunks(), [100000], [20]), CudaChunks)
    for other in (chunks(80), chunks(64), chunks(block=4), chunks(capped=True), chunks(window=100), chunks(dtype=torch.float8_e4m3fn)):
        assert isinstance(draft(other, [0], [ENOUGH]), TritonChunks)


def test_a_kernel_that_does_not_compile_is_not_chosen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(form: Form, device: torch.device) -> None:
        raise CompilerError("no such instruction")

    monkeypatch.setattr(module.compiled, "finish_preparing", refuse)
    assert isinstance(draft(chunks(), [0], [ENOUGH]), TritonChunks)
    assert "no such instruction" in caplog.text


def test_nothing_is_launched_where_kernels_are_only_compiled() -> None:
    """The plan may then be anything."""
    work = draft(chunks(), [0], [ENOUGH])
    assert isinstance(work, CudaChunks)
    work.items.fill_(77)
    out = torch.full((ENOUGH, HEADS, DIM), 7.0, dtype=HALF, device=DEVICE)
    attention = TritonAttention((LayerSpec(HEADS, KV_HEADS, DIM, 1.0),), 2, BLOCK, HALF, DEVICE)
    cache = module.LayerCache(LayerSpec(HEADS, KV_HEADS, DIM, 1.0), *attention.cache.of(0), attention.cache.scale(0))
    with compiling_only(1):
        work.attend(torch.zeros_like(out), cache, torch.zeros(1, 4, dtype=torch.int32, device=DEVICE), out)
    assert (out == 7).all()
