"""The batch-invariant product against float64, and the equality of bits between its tilings (on a GPU: the interpreter has BLAS's)."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.packed import DenseWeight
from octavo.ops.triton.invariant_matmul import InvariantTiling, invariant_linear, invariant_matmul, invariant_tiling

from .paged import relative_error

TILINGS = [
    InvariantTiling(64, 16, 128, 4, 4),
    InvariantTiling(64, 32, 64, 4, 4),
    InvariantTiling(16, 64, 128, 4, 4, weights_first=True),
    InvariantTiling(128, 128, 64, 8, 3),
    InvariantTiling(64, 128, 64, 4, 3, descriptors=True),
]


def operands(rows: int, columns: int, inner: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    return (
        torch.randn(rows, inner, device=device).to(dtype),
        torch.randn(columns, inner, device=device).to(dtype),
        torch.randn(columns, device=device).to(dtype),
    )


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize(("rows", "columns", "inner"), [(3, 70, 200), (65, 128, 256), (200, 256, 96)])
def test_matches_float64(tiling: InvariantTiling, rows: int, columns: int, inner: int, device: torch.device) -> None:
    x, weight, bias = operands(rows, columns, inner, device)
    out = invariant_matmul(x, weight, bias, tiling)
    assert relative_error(out, x.double() @ weight.double().T + bias.double()) < 5e-3
    assert relative_error(invariant_matmul(x, weight, None, tiling), x.double() @ weight.double().T) < 5e-3


@pytest.mark.parametrize("rows", [1, 64, 65, 600])
def test_linear_takes_any_number_of_rows(rows: int, device: torch.device) -> None:
    x, weight, bias = operands(rows, 96, 64, device)
    assert relative_error(invariant_linear(x, DenseWeight.plain(weight), bias), x.double() @ weight.double().T + bias.double()) < 5e-3
    assert invariant_linear(x[:0], DenseWeight.plain(weight), bias).shape == (0, 96)


def test_float32_and_older_cards_have_one_tiling(device: torch.device) -> None:
    for dtype, hopper in ((torch.float32, True), (torch.bfloat16, False)):
        tilings = {invariant_tiling(rows, 4096, dtype, 132, hopper=hopper, aligned=True) for rows in (1, 64, 300, 5000)}
        assert len(tilings) == 1
    x, weight = torch.randn(5, 96, device=device), torch.randn(70, 96, device=device)
    assert relative_error(invariant_linear(x, DenseWeight.plain(weight), None), x.double() @ weight.double().T) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "inner"), [(6144, 4096), (1024, 3072), (4096, 14336), (3001, 1000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_of_a_row_do_not_depend_on_the_others(columns: int, inner: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = (t.to(dtype) for t in operands(2500, columns, inner, device))
    packed = DenseWeight.plain(weight)
    whole = invariant_linear(x, packed, bias)
    assert relative_error(whole, x.double() @ weight.double().T + bias.double()) < 5e-3
    for rows in (1, 2, 16, 17, 33, 64, 65, 129, 500, 513, 1030):
        for first in (0, 1, 777):
            part = invariant_linear(x[first : first + rows].clone(), packed, bias)
            assert torch.equal(part, whole[first : first + rows]), (rows, first)
