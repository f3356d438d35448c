"""Which kernel attends to a step's decodes, and the one in CUDA C++ as the attention backend uses it; without a GPU, emulated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.attention import decodes as module
from octavo.attention.base import GraphShape, KindTables, KvScales, LayerSpec, SharedPrefixes, StepBatch
from octavo.attention.decodes import CudaDecodes, Decodes, Geometry, TritonDecodes
from octavo.attention.triton import TritonAttention
from octavo.ops.cuda.compiler import CompilerError
from octavo.ops.cuda.even_plan import EvenCapacity
from octavo.ops.cuda.paged_decode import EvenWorkspace, Form, arguments, boxes_of, source
from octavo.ops.triton.launch import compiling_only, sm_count
from tests.ops.triton.paged import relative_error
from tests.support.cuda_emulator import COMPILER, MACHINE, emulated

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HALF = torch.bfloat16
FLOAT8 = torch.float8_e4m3fn
BLOCK, SHARED = 16, 512
SCALES = KvScales(torch.tensor([0.5, 2.0]), torch.tensor([0.25, 4.0]))
CONTEXTS = np.array([530, 300, 700, 601], np.int32)
"""Rows 0, 2 and 3 have their first blocks in common."""
TOLD = SharedPrefixes(np.array([1, 3, 0, 2], np.int32), np.array([0, 0, SHARED, SHARED], np.int32))


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_GPU:
        return
    if COMPILER is None:
        pytest.skip("needs an NVIDIA GPU or a C++ compiler")

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, workspace: EvenWorkspace, out: torch.Tensor, form: Form,
        *, scale: float, sliding_window: int | None, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None,
    ) -> None:  # fmt: skip
        packed = arguments(q, tables, workspace, out, scale=scale, sliding_window=sliding_window, k_scale=k_scale, v_scale=v_scale)
        kernel = emulated(source(form, MACHINE.read_text()), "paged_decode", 2)
        kernel(packed, boxes_of(k), boxes_of(v), workspace.capacity.blocks, 1, 1)

    monkeypatch.setattr(module, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(module.compiled, "prepare", lambda form, device: None)
    monkeypatch.setattr(module.compiled, "finish_preparing", lambda form, device: None)
    monkeypatch.setattr(module.cuda, "paged_decode", run)


def backend_and_tables(window: int | None, dtype: torch.dtype = HALF) -> tuple[TritonAttention, torch.Tensor]:
    needed = -(-CONTEXTS // BLOCK)
    layers = (LayerSpec(8, 2, 128, 128**-0.5, sliding_window=window),)
    attention = TritonAttention(layers, int(needed.sum()) + 1, BLOCK, dtype, DEVICE, model_dtype=HALF, scales={0: SCALES})
    cache = attention.cache.of(0)
    cache.copy_(torch.randn(cache.shape, device=DEVICE).to(dtype))
    tables, used = torch.zeros(len(CONTEXTS), int(needed.max()) + 4, dtype=torch.int32), 1
    for row, blocks in enumerate(needed.tolist()):
        tables[row, :blocks] = torch.arange(used, used + blocks)
        used += blocks
    for row in (2, 3):
        tables[row, : SHARED // BLOCK] = tables[0, : SHARED // BLOCK]
    return attention, tables.to(DEVICE)


def expected(attention: TritonAttention, tables: torch.Tensor, q: torch.Tensor, window: int | None) -> torch.Tensor:
    rows = []
    for row, context in enumerate(CONTEXTS.tolist()):
        stored, scales = attention.cache.of(0).double(), attention.cache.scale(0)
        k, v = (c[tables[row].long()].transpose(0, 1).flatten(1, 2)[:, :context] for c in stored)
        if scales.k is not None and scales.v is not None:
            k, v = k * scales.k.double()[:, None, None], v * scales.v.double()[:, None, None]
        begin = 0 if window is None else max(0, context - window)
        grouped = q[row].double().view(2, 4, 128)
        scores = torch.einsum("hgd,hsd->hgs", grouped, k[:, begin:]) * 128**-0.5
        rows.append(torch.einsum("hgs,hsd->hgd", scores.softmax(-1), v[:, begin:]).reshape(8, 128))
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shared", [None, TOLD], ids=["apart", "together"])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("dtype", [HALF, FLOAT8], ids=str)
def test_a_backends_decodes(window: int | None, shared: SharedPrefixes | None, captured: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    attention, tables = backend_and_tables(window, dtype)
    start = CONTEXTS - 1
    q = torch.randn(len(CONTEXTS), 8, 128, device=DEVICE).to(HALF)
    k, v = torch.randn(2, len(CONTEXTS), 2, 128, device=DEVICE).to(HALF)
    last = torch.from_numpy(start).to(DEVICE).long()
    slots = tables.gather(1, last[:, None] // BLOCK)[:, 0].long() * BLOCK + last % BLOCK
    if captured:
        shape = GraphShape(8, 8)
        plan = np.full(attention.graph_plan_size(shape), -7, np.int32)
        attention.graph_plan(start, np.ones_like(start), shape, plan, shared)
        padded = torch.zeros(8, tables.shape[1], dtype=torch.int32, device=DEVICE)
        padded[: len(CONTEXTS)] = tables
        attend = attention.graph_attend(torch.from_numpy(plan).to(DEVICE), shape, [KindTables(padded, slots)])
    else:
        ids = torch.zeros_like(last)
        attend = attention.plan(
            StepBatch(start, np.ones_like(start), 4, 4, 700, ids, last, ids, tables, slots, last.int() + 1, shared=shared)
        )
    assert isinstance(attend.work[0].decodes, CudaDecodes)  # type: ignore[attr-defined]
    got = attend(0, q, k, v)
    assert relative_error(got, expected(attention, tables, q, window)) < 8e-3


def decodes(head_dim: int = 128, block: int = 16, dtype: torch.dtype = HALF, *, capped: bool = False) -> Decodes:
    return Decodes(Geometry(8, 2, head_dim, None, capped, 0), dtype, HALF, block, DEVICE)


def test_many_rows_and_what_the_kernel_does_not_take_go_to_triton() -> None:
    few = decodes()
    most = 5 * sm_count(DEVICE) // 2
    assert isinstance(few.capacity(1), EvenCapacity)
    assert isinstance(few.capacity(most), EvenCapacity)
    assert not isinstance(few.capacity(most + 1), EvenCapacity)
    for head_dim in (64, 128):
        assert isinstance(decodes(head_dim, dtype=FLOAT8).capacity(10 * most), EvenCapacity)
    for other in (decodes(64), decodes(80), decodes(block=4), decodes(capped=True), decodes(80, dtype=FLOAT8)):
        assert not isinstance(other.capacity(1), EvenCapacity)
        assert isinstance(other.work(1, torch.zeros(other.capacity(1).size, dtype=torch.int32)), TritonDecodes)


def test_a_kernel_that_does_not_compile_is_not_chosen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(form: Form, device: torch.device) -> None:
        raise CompilerError("no such instruction")

    monkeypatch.setattr(module.compiled, "finish_preparing", refuse)
    few = decodes()
    assert not isinstance(few.capacity(1), EvenCapacity)
    assert "no such instruction" in caplog.text


def test_nothing_is_launched_where_kernels_are_only_compiled() -> None:
    """The plan may then be anything."""
    few = decodes()
    garbage = torch.full((few.capacity(4).size,), 77, dtype=torch.int32, device=DEVICE)
    attention, tables = backend_and_tables(None)
    work, out = few.work(4, garbage), torch.full((4, 8, 128), 7.0, dtype=HALF, device=DEVICE)
    cache = module.LayerCache(LayerSpec(8, 2, 128, 128**-0.5), *attention.cache.of(0), attention.cache.scale(0))
    with compiling_only(1):
        work.attend(torch.zeros_like(out), cache, tables, out)
    assert (out == 7).all()
