"""Matrix products of few rows against float64."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.packed import DenseWeight
from octavo.ops.triton.linear import TritonLinear
from octavo.ops.triton.skinny_matmul import Form, SkinnyTuning, SkinnyWorkspace, skinny_matmul
from octavo.ops.triton.skinny_table import MEASURED, ROW_CLASSES, choices
from tests.support.complete import complete

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


@pytest.mark.parametrize(
    ("form", "rows", "columns", "inner"), [("weights_first", 5, 70, 200), ("vector", 1, 70, 200), ("vector", 1, 64, 256)]
)
def test_other_forms(form: Form, rows: int, columns: int, inner: int, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    x, weight = torch.randn(rows, inner, device=device).to(dtype), torch.randn(columns, inner, device=device).to(dtype)
    bias = torch.randn(columns, device=device).to(dtype)
    split = 1 if form == "vector" else 2
    workspace = SkinnyWorkspace.allocate(2 * 16 * 128, 8, device)
    out = skinny_matmul(x, weight, bias, workspace, SkinnyTuning(32, 64, split, 4, 3, form))
    assert relative_error(out, x.double() @ weight.double().T + bias.double()) < 5e-3


def test_linear_takes_any_number_of_rows(device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    layer, weight = TritonLinear(), torch.randn(40, 96, device=device).to(dtype)
    packed = complete(layer.pack(weight))
    for rows in (1, 17, 70):
        x = torch.randn(rows, 96, device=device).to(dtype)
        assert relative_error(layer.linear(x, packed, None), x.double() @ weight.double().T) < 5e-3
    wide = torch.randn(3, 96, device=device)
    assert torch.equal(layer.linear(wide, DenseWeight.plain(weight.float()), None), wide @ weight.float().T)


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "inner"), [(6144, 4096), (4096, 14336), (1024, 3072), (28672, 4096)])
def test_measured_choices_on_the_gpu(columns: int, inner: int, device: torch.device) -> None:
    layer, weight = TritonLinear(), torch.randn(columns, inner, device=device).bfloat16()
    packed = complete(layer.pack(weight))
    for rows in (1, 7, 16, 30, 64):
        x = torch.randn(rows, inner, device=device).bfloat16()
        assert relative_error(layer.linear(x, packed, None), x.double() @ weight.double().T) < 5e-3


def test_every_part_has_work() -> None:
    shapes = [(c, i) for c in (64, 1024, 4096, 6144, 28672, 128256) for i in (256, 1024, 4096, 14336)]
    for columns, inner in [*shapes, *MEASURED]:
        chosen = choices(columns, inner, 132)
        assert len(chosen) == len(ROW_CLASSES)
        for rows, tuning in zip(ROW_CLASSES, chosen, strict=True):
            if tuning is None:
                continue
            share = -(-inner // (tuning.split * tuning.inner)) * tuning.inner
            assert share * (tuning.split - 1) < inner
            assert tuning.form != "vector" or (rows == 1 and tuning.split == 1)
