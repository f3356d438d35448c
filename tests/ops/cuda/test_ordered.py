"""The CUDA C++ kernel for weights whose codes lie as the tensor cores take them: on a GPU, or with a cluster's threads in turns."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch.nn import functional as F

from octavo.ops.coded import Activations, CodedRows, dequantize
from octavo.ops.cuda.low_bit import Program, Stream, form_of
from octavo.ops.cuda.low_bit import choice as low_bit_choice
from octavo.ops.cuda.ordered import Ordered, choice, multiply, ordered, takes
from octavo.ops.packed import Int4Weight, Int8Weight, OffsetWeight
from octavo.ops.reference.low_bit import bytes_in_order, bytes_out_of_order, in_order, interleaved, out_of_order, unpack
from octavo.ops.triton.launch import sm_count
from octavo.ops.triton.low_bit_matmul import LowBit
from tests.support.complete import complete
from tests.support.cuda_emulator import COMPILER, emulate, emulate_ordered

from .test_low_bit import DEVICE, ON_GPU, coded, error, packed, with_minimums
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


SHORT_CASES = [
    (Ordered(8, 2, 2, 1), "int4", "offsets"),
    (Ordered(32, 1, 2, 1), "int4", "offsets"),
    (Ordered(64, 2, 2, 1), "int4", "offsets"),
    (Ordered(128, 2, 2, 1), "int4", "offsets"),
    (Ordered(16, 1, 2, 2), "int4", "zeros"),
    (Ordered(64, 1, 2, 2), "int4", "zeros"),
    (Ordered(32, 2, 2, 2), "int4", ""),
    (Ordered(16, 1, 2, 2), "int8", "offsets"),
    (Ordered(64, 1, 2, 1), "int8", "offsets"),
    (Ordered(8, 1, 2, 2), "int8", ""),
    (Ordered(32, 1, 2, 1), "int8", ""),
    (Ordered(128, 1, 2, 1), "int8", ""),
]


def short(kind: str, out: int, inner: int, adds: str) -> tuple[CodedRows, LowBit | OffsetWeight]:
    """Groups of 32, their codes in order."""
    if adds == "offsets":
        rows, weight = with_minimums(kind, out, inner)
        return rows, ordered(weight)
    rows = coded(kind, out, inner, 32, zeros=adds == "zeros")
    return rows, ordered(packed(rows, torch.bfloat16))


def product(x: torch.Tensor, weight: LowBit | OffsetWeight, bias: torch.Tensor | None, tuning: Ordered) -> torch.Tensor:
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


@pytest.mark.parametrize(("tuning", "kind", "adds"), SHORT_CASES)
def test_groups_of_32(tuning: Ordered, kind: str, adds: str) -> None:
    """Scaled one by one; also where a tile has fewer columns and fewer rows, a block several tiles, and bias is added."""
    torch.manual_seed(0)
    out, inner, dtype = 208, 512, torch.float16 if tuning.rows in (16, 64) else torch.bfloat16
    rows, weight = short(kind, out, inner, adds)
    x, bias = torch.randn(tuning.rows + 3, inner, device=DEVICE).to(dtype), torch.randn(out, device=DEVICE).to(dtype)
    got = product(x, weight, bias, tuning)
    limit = 4e-4 if dtype == torch.float16 else 2.5e-3  # what rounding the result costs
    assert error(got, x.double() @ dequantize(rows, torch.float64).T + bias.double()) < limit


@pytest.mark.parametrize("inner", [128, 896])
def test_few_chunks_of_short_groups(inner: int) -> None:
    """One, and a number that warpgroups do not share evenly."""
    torch.manual_seed(6)
    rows, weight = short("int4", 48, inner, "offsets")
    form, x = form_of(weight, torch.bfloat16, bias=False), torch.randn(3, inner, device=DEVICE).bfloat16()
    assert form is not None
    tuning = choice(form, 48, inner, 3, 132)
    assert tuning is not None
    assert error(product(x, weight, None, tuning), x.double() @ dequantize(rows, torch.float64).T) < 2.5e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_offsets_and_sums_keep_more_than_a_number_of_16_bits(dtype: torch.dtype) -> None:
    """Each is two of them: where codes count nothing the result is that of offsets in float32."""
    torch.manual_seed(7)
    _, weight = short("int4", 64, 256, "offsets")
    assert isinstance(weight, OffsetWeight)
    weight = dataclasses.replace(weight, codes=dataclasses.replace(weight.codes, scales=torch.zeros_like(weight.codes.scales)))
    large = 500.0 if dtype == torch.float16 else 1e4
    x = torch.randn(4, 256, device=DEVICE).to(dtype)
    x[:, ::2], x[:, 1::2] = large + x[:, ::2], x[:, 1::2] - large  # what is left of sums
    x[3] = torch.finfo(dtype).max / 64 if dtype == torch.float16 else 1.0
    expected = x.double().view(4, -1, 32).sum(-1) @ weight.offsets.double()
    assert error(product(x, weight, None, Ordered(8, 1, 2, 1)), expected) < (4e-4 if dtype == torch.float16 else 2.5e-3)


def test_a_block_with_more_tiles_than_its_ring_holds() -> None:
    """The copying threads are at the next tile while the parts of one are added up."""
    torch.manual_seed(5)
    tuning, blocks = Ordered(32, 1, 2, 1), sm_count(DEVICE) if ON_GPU else 3
    x = torch.randn(30, 2560, device=DEVICE).bfloat16()
    larger = coded("int4", 64 * (blocks + 1), 2560, 128, zeros=True)
    for rows, weight in ((larger, ordered(packed(larger, torch.bfloat16))), short("int4", 64 * (blocks + 1), 2560, "offsets")):
        assert error(product(x, weight, None, tuning), x.double() @ dequantize(rows, torch.float64).T) < 2.5e-3


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_8_bit_code_is_exact(dtype: torch.dtype) -> None:
    codes = coded("int8", 256, 128, 32, zeros=False)
    values = torch.arange(-128, 128, device=DEVICE)
    assert codes.scales is not None
    codes.codes[:], codes.scales[:] = values.to(torch.int8)[:, None], 1
    x = torch.zeros(3, 128, device=DEVICE, dtype=dtype)
    x[0, 0], x[1, 77], x[2, 127] = 1, 2, -1
    got = product(x, ordered(packed(codes, dtype)), None, Ordered(8, 2, 2, 1))
    assert torch.equal(got, torch.stack((values, 2 * values, -values)).to(dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("group", [32, 128])
def test_what_is_no_number_stays_in_its_row(bad: float, group: int) -> None:
    torch.manual_seed(2)
    larger = ordered(packed(coded("int4", 64, 512, 128, zeros=True), torch.bfloat16))
    weight = larger if group == 128 else short("int4", 64, 512, "offsets")[1]
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
    for kind, adds in (("int4", "offsets"), ("int8", "offsets"), ("int8", "")):
        rows, weight = short(kind, 48, 384, adds)
        assert ordered(weight) is weight or isinstance(weight, OffsetWeight)
        assert error(unpack(weight, torch.float32), dequantize(rows, torch.float64)) < 1e-6
    data = torch.randint(-128, 128, (5, 192), dtype=torch.int8, device=DEVICE)
    assert torch.equal(bytes_out_of_order(bytes_in_order(data)), data)
    assert torch.equal(bytes_in_order(data.flatten()[16:].view(-1, 16)[1:]), bytes_in_order(data).flatten()[32:].view(-1, 16))


def test_where_each_code_lies() -> None:
    """As `Int4Weight` says it, code by code: packing takes eight bytes at a time."""
    for rows, columns in ((3, 256), (2, 128), (4, 100), (1, 7)):
        codes = torch.randint(0, 16, (rows + 1, columns), dtype=torch.uint8, device=DEVICE)[1:]
        blocks, data = F.pad(codes, (0, -columns % 64)).view(rows, -1, 64), interleaved(codes).view(rows, -1, 32)
        for j in range(32):
            assert torch.equal(data[:, :, j], blocks[:, :, j] + 16 * blocks[:, :, j + 32])
        if columns % 128:
            continue
        blocks, data = codes.view(rows, -1, 128), in_order(interleaved(codes)).view(rows, -1, 64)
        for t, q, i in itertools.product(range(4), range(4), range(4)):
            column = 32 * t + 16 * (i % 2) + 2 * q + i // 2
            assert torch.equal(data[:, :, 16 * t + 4 * q + i], blocks[:, :, column] + 16 * blocks[:, :, column + 8])
    codes = torch.randint(-128, 128, (3, 64), dtype=torch.int8, device=DEVICE)
    blocks, data = codes.view(3, -1, 16), bytes_in_order(codes).view(3, -1, 16)
    for q, i in itertools.product(range(4), range(4)):
        assert torch.equal(data[:, :, 4 * q + i], blocks[:, :, 2 * q + i % 2 + i // 2 * 8])


def test_weights_that_keep_their_order() -> None:
    kept = [("int4", 80, 448, 0), ("int4", 80, 512, 64), ("int4", 72, 512, 0), ("int4", 80, 448, 32), ("int8", 80, 512, 0)]
    for kind, out, inner, group in [*kept, ("int8", 80, 512, 64), ("int8", 80, 480, 32)]:
        weight = packed(coded(kind, out, inner, group, zeros=False), torch.bfloat16)
        assert ordered(weight) is weight
    with_zeros = packed(coded("int8", 80, 512, 32, zeros=True), torch.bfloat16)
    assert ordered(with_zeros) is with_zeros
    rounding = packed(coded("int8", 80, 512, 32, zeros=False), torch.bfloat16)
    assert isinstance(rounding, Int8Weight)
    rounding = dataclasses.replace(rounding, activations=Activations("int8"))
    assert ordered(rounding) is rounding


def test_every_choice_fits() -> None:
    """Shared memory, stages ahead, work for every block of a cluster."""
    forms = [
        form_of(ordered(packed(coded("int4", 16, 256, group, zeros=True), torch.bfloat16)), torch.bfloat16, bias=False)
        for group in (0, 128)
    ]
    forms += [form_of(short(kind, 16, 256, adds)[1], torch.bfloat16, bias=False) for _, kind, adds in SHORT_CASES]
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
    form = form_of(short("int4", 16, 256, "offsets")[1], torch.bfloat16, bias=False)
    assert form is not None and form.ordered and form.offsets
    assert all(low_bit_choice(form, 4096, 4096, rows, 132) is None for rows in (1, 8, 9, 100))


def test_device_sources_differ_by_what_they_are_for() -> None:
    form = form_of(ordered(packed(coded("int4", 16, 256, 128, zeros=True), torch.bfloat16)), torch.bfloat16, bias=False)
    assert form is not None
    assert len({Program(form, tuning).device_source() for tuning, *_ in CASES}) == len(CASES)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("kind", "out", "inner", "rows"),
    [
        *itertools.product(["awq"], [6144], [4096], [9, 27, 33, 100, 250]),
        *itertools.product(["awq"], [4096], [4096, 14336], [9, 27, 33, 100, 250]),
        *itertools.product(["awq"], [28672], [4096], [9, 27, 33, 100, 250]),
        *itertools.product(["q4_k", "q5_k", "q8_0", "gptq-32"], [6144], [4096], [1, 27, 100]),
        *itertools.product(["q4_k", "q8_0"], [4096], [14336], [16, 33, 250]),
    ],
)
def test_large_shapes_have_the_same_bits_every_time(kind: str, out: int, inner: int, rows: int) -> None:
    torch.manual_seed(3)
    if kind == "awq":
        codes = coded("int4", out, inner, 128, zeros=True)
        weight: LowBit | OffsetWeight = ordered(packed(codes, torch.bfloat16))
    else:
        adds = {"q4_k": "offsets", "q5_k": "offsets", "gptq-32": "zeros"}.get(kind, "")
        codes, weight = short("int8" if kind in ("q8_0", "q5_k") else "int4", out, inner, adds)
    x = torch.randn(rows, inner, device=DEVICE).bfloat16()
    form = form_of(weight, torch.bfloat16, bias=False)
    assert form is not None
    tuning = choice(form, out, inner, rows, sm_count(DEVICE))
    assert tuning is not None
    first = product(x, weight, None, tuning)
    assert error(first, x.double() @ dequantize(codes, torch.float64).T) < 2.5e-3
    assert all(torch.equal(product(x, weight, None, tuning), first) for _ in range(50))
