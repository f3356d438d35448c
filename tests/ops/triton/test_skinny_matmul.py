"""Matrix products of few rows against float64."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.triton.skinny_matmul import SkinnyTuning, SkinnyWorkspace, skinny_matmul, skinny_tuning

from .paged import relative_error


@pytest.mark.parametrize("rows", [1, 3, 16, 33])
@pytest.mark.parametrize(("columns", "inner", "split"), [(96, 256, 1), (70, 200, 2), (64, 512, 4)])
@pytest.mark.parametrize("biased", [False, True])
def test_matches_float64(rows: int, columns: int, inner: int, split: int, biased: bool, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    x, weight = torch.randn(rows, inner, device=device).to(dtype), torch.randn(columns, inner, device=device).to(dtype)
    bias = torch.randn(columns, device=device).to(dtype) if biased else None
    workspace = SkinnyWorkspace.allocate(4 * 64 * 128, 8, device)
    out = skinny_matmul(x, weight, bias, workspace, SkinnyTuning(columns=32, inner=64, split=split, warps=4, stages=3))
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    assert out.shape == (rows, columns)
    assert relative_error(out, expected) < 5e-3
    assert not workspace.counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "inner"), [(6144, 4096), (4096, 14336), (1024, 3072), (28672, 4096)])
def test_shipped_tunings_on_the_gpu(columns: int, inner: int, device: torch.device) -> None:
    weight = torch.randn(columns, inner, device=device).bfloat16()
    x = torch.randn(64, inner, device=device).bfloat16()
    workspace = SkinnyWorkspace.allocate(16 * 64 * columns, 4096, device)
    results = {}
    for rows in (1, 16, 64):
        results[rows] = skinny_matmul(x[:rows], weight, None, workspace, skinny_tuning(columns, inner, 132))
        assert relative_error(results[rows], x[:rows].double() @ weight.double().T) < 5e-3
    assert torch.equal(results[1], results[16][:1]), "a row's bits do not depend on its batch mates"


def test_every_part_has_work() -> None:
    for columns in (64, 1024, 4096, 6144, 28672, 128256):
        for inner in (256, 1024, 4096, 14336):
            tuning = skinny_tuning(columns, inner, 132)
            share = -(-inner // (tuning.split * tuning.inner)) * tuning.inner
            assert share * (tuning.split - 1) < inner
