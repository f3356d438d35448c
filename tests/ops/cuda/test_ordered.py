"""The CUDA C++ kernel for 4-bit weights whose codes lie as the tensor cores take them: on a GPU, or with a cluster's threads in turns."""

from __future__ import annotations

import itertools

import pytest
import torch

from octavo.ops.coded import dequantize
from octavo.ops.cuda.low_bit import Program, Stream, form_of
from octavo.ops.cuda.low_bit import choice as low_bit_choice
from octavo.ops.cuda.ordered import Ordered, choice, multiply, ordered, takes
from octavo.ops.packed import Int4Weight
from octavo.ops.reference.low_bit import in_order, out_of_order, unpack
from octavo.ops.triton.launch import sm_count
from octavo.ops.triton.low_bit_matmul import LowBit
from tests.support.complete import complete
from tests.support.cuda_emulator import COMPILER, emulate, emulate_ordered

from .test_low_bit import DEVICE, ON_GPU, coded, error, packed
from .test_low_bit import product as streamed

pytestmark = pytest.mark.skipif(not ON_GPU and COMPILER is None, reason="needs an NVIDIA GPU or a C++ compiler")

CASES = [
    (Ordered(8, 2, 2, 1), 128, True),
    (Ordered(16, 1, 2, 2), 128, True),
    (Ordered(32, 2, 2, 2), 0, True),
    (Ordered(32, 1, 2, 1), 256, False),
    (Ordered(64, 2, 2, 1), 256, False),
    (Ordered(64, 1, 2, 2), 128, True),
    (Ordered(128, 2, 2, 1), 128, True),
    (Ordered(128, 1, 1, 4), 0, False),
]


def product(x: torch.Tensor, weight: LowBit, bias: torch.Tensor | None, tuning: Ordered) -> torch.Tensor:
    form = form_of(weight, x.dtype, bias=bias is not None)
    assert form is not None and takes(form)
    return (multiply if ON_GPU else emulate_ordered)(x, complete(weight), bias, form, tuning)


@pytest.mark.parametrize(("tuning", "group", "zeros"), CASES)
def test_the_dequantised_product(tuning: Ordered, group: int, zeros: bool) -> None:
    """Also where a tile has fewer columns and fewer rows, a block several tiles, and bias is added."""
    torch.manual_seed(0)
    out, inner, dtype = 208, 512, torch.float16 if tuning.rows in (16, 64) else torch.bfloat16
    rows = coded("int4", out, inner, group, zeros=zeros)
    x, bias = torch.randn(tuning.rows + 3, inner, device=DEVICE).to(dtype), torch.randn(out, device=DEVICE).to(dtype)
    got = product(x, ordered(packed(rows, dtype)), bias, tuning)
    limit = 4e-4 if dtype == torch.float16 else 2.5e-3  # what rounding the result costs
    assert error(got, x.double() @ dequantize(rows, torch.float64).T + bias.double()) < limit


def test_a_block_with_more_tiles_than_its_ring_holds() -> None:
    """The copying threads are at the next tile while the parts of one are added up."""
    torch.manual_seed(5)
    tuning, blocks = Ordered(32, 1, 2, 1), sm_count(DEVICE) if ON_GPU else 3
    rows, x = coded("int4", 64 * (blocks + 1), 2560, 128, zeros=True), torch.randn(30, 2560, device=DEVICE).bfloat16()
    got = product(x, ordered(packed(rows, torch.bfloat16)), None, tuning)
    assert error(got, x.double() @ dequantize(rows, torch.float64).T) < 2.5e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_code_and_zero_point_is_exact(dtype: torch.dtype) -> None:
    """One code and one zero point a row, an input of one: the result is their difference."""
    codes = coded("int4", 256, 128, 128, zeros=True)
    pairs = torch.arange(256, device=DEVICE)
    codes.codes[:] = (pairs % 16).to(torch.uint8)[:, None]
    assert codes.zeros is not None and codes.scales is not None
    codes.zeros[:, 0], codes.scales[:] = (pairs // 16).to(torch.int16), 1
    x = torch.zeros(3, 128, device=DEVICE, dtype=dtype)
    x[0, 0], x[1, 77], x[2, 127] = 1, 2, -1
    got = product(x, ordered(packed(codes, dtype)), None, Ordered(8, 2, 2, 1))
    difference = (pairs % 16 - pairs // 16).to(dtype)
    assert torch.equal(got, torch.stack((difference, 2 * difference, -difference)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(bad: float) -> None:
    torch.manual_seed(2)
    weight = ordered(packed(coded("int4", 64, 512, 128, zeros=True), torch.bfloat16))
    x = torch.randn(5, 512, device=DEVICE).bfloat16()
    clean = product(x, weight, None, Ordered(8, 1, 2, 2))
    x[2, 100] = bad
    got, others = product(x, weight, None, Ordered(8, 1, 2, 2)), [0, 1, 3, 4]
    assert torch.equal(got[others], clean[others])
    assert not got[2].isfinite().any()


@pytest.mark.parametrize("tuning", [Stream(1, 4, 1, 2), Stream(2, 3, 2, 3)])
def test_few_rows_read_the_same_codes(tuning: Stream) -> None:
    torch.manual_seed(1)
    rows = coded("int4", 80, 512, 128, zeros=True)
    x, bias = torch.randn(tuning.rows - 3, 512, device=DEVICE).bfloat16(), torch.randn(80, device=DEVICE).bfloat16()
    weight = ordered(packed(rows, torch.bfloat16))
    form = form_of(weight, x.dtype, bias=True)
    assert form is not None and form.ordered
    got = streamed(x, weight, bias, tuning) if ON_GPU else emulate(x, weight, bias, form, tuning)
    assert error(got, x.double() @ dequantize(rows, torch.float64).T + bias.double()) < 2.5e-3


def test_the_order_and_back() -> None:
    data = torch.randint(0, 256, (5, 192), dtype=torch.uint8, device=DEVICE)
    assert torch.equal(out_of_order(in_order(data)), data)
    as_read = packed(coded("int4", 48, 384, 128, zeros=True), torch.bfloat16)
    weight = ordered(as_read)
    assert isinstance(weight, Int4Weight) and weight.ordered and weight.nbytes == as_read.nbytes
    assert torch.equal(unpack(weight, torch.float32), unpack(as_read, torch.float32))
    assert ordered(weight) is weight


def test_weights_that_keep_their_order() -> None:
    for kind, out, inner, group in (("int4", 80, 448, 0), ("int4", 80, 512, 64), ("int4", 72, 512, 0), ("int8", 80, 512, 0)):
        weight = packed(coded(kind, out, inner, group, zeros=False), torch.bfloat16)
        assert ordered(weight) is weight


def test_every_choice_fits() -> None:
    """Shared memory, stages ahead, work for every block of a cluster."""
    forms = [
        form_of(ordered(packed(coded("int4", 16, 256, group, zeros=True), torch.bfloat16)), torch.bfloat16, bias=False)
        for group in (0, 128)
    ]
    shapes = itertools.product(forms, (64, 1024, 4096, 6144, 28672, 57344), (128, 384, 1024, 4096, 14336, 28672))
    for (form, out, inner), rows in itertools.product(shapes, (1, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256)):
        assert form is not None
        tuning = choice(form, out, inner, rows, 132)
        assert tuning is not None
        assert tuning.stages(form) >= 3 and tuning.shared_bytes(form) <= 227 << 10
        assert inner // 128 >= tuning.cluster * tuning.split
        assert tuning.split == 1 or inner // 128 % (tuning.cluster * tuning.split) == 0
        assert choice(form, out, inner, 257, 132) is None


def test_older_kernels_leave_such_weights_alone() -> None:
    form = form_of(ordered(packed(coded("int4", 16, 256, 128, zeros=True), torch.bfloat16)), torch.bfloat16, bias=False)
    assert form is not None
    assert isinstance(low_bit_choice(form, 4096, 4096, 8, 132), Stream)
    assert low_bit_choice(form, 4096, 4096, 9, 132) is None


def test_device_sources_differ_by_what_they_are_for() -> None:
    form = form_of(ordered(packed(coded("int4", 16, 256, 128, zeros=True), torch.bfloat16)), torch.bfloat16, bias=False)
    assert form is not None
    assert len({Program(form, tuning).device_source() for tuning, *_ in CASES}) == len(CASES)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("out", "inner"), [(6144, 4096), (4096, 4096), (4096, 14336), (28672, 4096)])
@pytest.mark.parametrize("rows", [9, 27, 33, 100, 250])
def test_large_shapes_have_the_same_bits_every_time(out: int, inner: int, rows: int) -> None:
    torch.manual_seed(3)
    codes = coded("int4", out, inner, 128, zeros=True)
    weight, x = ordered(packed(codes, torch.bfloat16)), torch.randn(rows, inner, device=DEVICE).bfloat16()
    form = form_of(weight, torch.bfloat16, bias=False)
    assert form is not None
    tuning = choice(form, out, inner, rows, sm_count(DEVICE))
    assert tuning is not None
    first = product(x, weight, None, tuning)
    assert error(first, x.double() @ dequantize(codes, torch.float64).T) < 2.5e-3
    assert all(torch.equal(product(x, weight, None, tuning), first) for _ in range(50))
