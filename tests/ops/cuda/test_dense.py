"""The CUDA C++ kernel for dense weights: on a GPU compiled by NVRTC, elsewhere by the C++ compiler, a block's threads in turns."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.cuda.dense import Form, Tuning, choice, multiply, workspace_size
from octavo.ops.triton.skinny_matmul import SkinnyWorkspace
from tests.support.complete import complete
from tests.support.cuda_emulator import COMPILER, emulate_dense

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = pytest.mark.skipif(not ON_GPU and COMPILER is None, reason="needs an NVIDIA GPU or a C++ compiler")

Scales = tuple[torch.Tensor, torch.Tensor]


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: Form, tuning: Tuning, scales: Scales | None = None
) -> torch.Tensor:
    if not ON_GPU:
        return emulate_dense(x, weight, bias, form, tuning, scales)
    elements, tiles = workspace_size(len(weight), tuning)
    workspace = SkinnyWorkspace.allocate(elements, tiles, DEVICE) if elements else None
    return multiply(x, complete(weight), bias, form, tuning, workspace, scales)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


TUNINGS = [Tuning(8, 32, 1), Tuning(16, 48, 2, 2), Tuning(32, 40, 4), Tuning(64, 96, 1), Tuning(24, 104, 3, 3), Tuning(96, 64, 2)]


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_product(dtype: torch.dtype, tuning: Tuning) -> None:
    torch.manual_seed(0)
    half, columns, inner = dtype == torch.float16, 200, 704
    x = torch.randn(tuning.rows - 3, inner, device=DEVICE).to(dtype)
    weight, bias = torch.randn(columns, inner, device=DEVICE).to(dtype), torch.randn(columns, device=DEVICE).to(dtype)
    got = product(x, weight, bias, Form("float16" if half else "bfloat16", half, True), tuning)
    limit = 4e-4 if half else 2.5e-3  # what rounding the result costs
    assert error(got, x.double() @ weight.double().T + bias.double()) < limit


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_scaled_products_of_float8(tuning: Tuning) -> None:
    torch.manual_seed(1)
    columns, inner, block = 200, 1024, 40
    x = torch.randn(tuning.rows, inner, device=DEVICE).to(torch.float8_e4m3fn)
    weight = torch.randn(columns, inner, device=DEVICE).to(torch.float8_e4m3fn)
    x_scale, w_scale = torch.rand(len(x), 1, device=DEVICE) + 0.5, torch.rand(columns // block, device=DEVICE) + 0.5
    got = product(x, weight, None, Form("float8", True, False, block), tuning, (x_scale, w_scale))
    expected = (x.double() * x_scale.double()) @ (weight.double() * w_scale.double().repeat_interleave(block)[:, None]).T
    # The tensor cores add up products of float8 with about 14 bits.
    assert error(got, expected) < (2e-3 if ON_GPU else 4e-4)


def test_rows_are_parts_of_a_larger_tensor() -> None:
    """x and the weight may be slices, whose rows lie further apart."""
    torch.manual_seed(2)
    wide = torch.randn(5, 512, device=DEVICE).bfloat16()
    weight = torch.randn(64, 512, device=DEVICE).bfloat16()[:, 64:320]
    x = wide[:, 128:384]
    got = product(x, weight, None, Form("bfloat16", False, False), Tuning(8, 32, 2))
    assert error(got, x.double() @ weight.double().T) < 2.5e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(bad: float) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(7, 256, device=DEVICE).bfloat16(), torch.randn(64, 256, device=DEVICE).bfloat16()
    form, tuning = Form("bfloat16", False, False), Tuning(16, 32, 2)
    clean = product(x, weight, None, form, tuning)
    x[3, 100] = bad
    got = product(x, weight, None, form, tuning)
    assert not got[3].isfinite().any()
    others = torch.tensor([0, 1, 2, 4, 5, 6])
    assert torch.equal(got[others], clean[others])


def test_a_row_has_the_same_bits_beside_others() -> None:
    torch.manual_seed(4)
    x, weight = torch.randn(16, 512, device=DEVICE).bfloat16(), torch.randn(128, 512, device=DEVICE).bfloat16()
    form, tuning = Form("bfloat16", False, False), Tuning(16, 48, 4)
    whole = product(x, weight, None, form, tuning)
    assert torch.equal(product(x[5:6], weight, None, form, tuning), whole[5:6])


@pytest.mark.parametrize(("columns", "inner"), [(6144, 4096), (4096, 14336), (128256, 4096), (1024, 2048), (64, 128), (8, 64)])
@pytest.mark.parametrize("rows", [1, 8, 9, 32, 33, 64, 128])
def test_every_choice_covers_the_weight_and_fits(columns: int, inner: int, rows: int) -> None:
    tuning = choice(Form("bfloat16", False, False), columns, inner, rows, 132)
    assert tuning is not None and tuning.rows >= rows
    assert tuning.stages >= 2 and tuning.shared_bytes <= 227 << 10
    stages = -(-(inner // 64) // tuning.depth)
    share = -(-stages // tuning.split)
    assert share * (tuning.split - 1) < stages  # no part is empty


@pytest.mark.parametrize(("columns", "inner", "rows"), [(100, 64, 1), (128, 96, 1), (128, 64, 129), (128, 64, 0)])
def test_what_the_kernel_does_not_take(columns: int, inner: int, rows: int) -> None:
    assert choice(Form("bfloat16", False, False), columns, inner, rows, 132) is None
