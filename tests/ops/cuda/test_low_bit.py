"""The CUDA C++ kernels for low-bit weights: on a GPU compiled by NVRTC, elsewhere by the C++ compiler, a block's threads in turns."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from octavo.ops.coded import CodedRows, dequantize
from octavo.ops.cuda.compiler import CompilerError, compile_kernel, library
from octavo.ops.cuda.low_bit import Form, Program, Stream, Tiles, Tuning, choice, form_of, multiply, workspace_size
from octavo.ops.packed import DenseWeight, Int4Weight, OffsetWeight, SegmentedWeight
from octavo.ops.reference.low_bit import pack_coded, pack_low_bit
from octavo.ops.triton.launch import sm_count
from octavo.ops.triton.low_bit_matmul import LowBit
from octavo.ops.triton.skinny_matmul import SkinnyWorkspace
from tests.support.complete import complete
from tests.support.cuda_emulator import COMPILER, emulate

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = pytest.mark.skipif(not ON_GPU and COMPILER is None, reason="needs an NVIDIA GPU or a C++ compiler")

KINDS = [
    ("int4", 0, False),
    ("int4", 0, True),
    ("int4", 128, True),
    ("int4", 64, False),
    ("int4", 32, True),
    ("table", 0, False),
    ("table", 32, False),
    ("int8", 0, False),
    ("int8", 0, True),
    ("int8", 64, True),
    ("int8", 32, False),
    ("float8", 0, False),
    ("float8", 128, False),
]
TUNINGS: list[Tuning] = [
    Stream(1, 4, 1, 2),
    Stream(2, 3, 2, 3),
    Stream(4, 2, 2, 2),
    Tiles(16, 1, 3, 2),
    Tiles(32, 2, 2),
    Tiles(128, 1, 2),
    Tiles(32, 2, 2, integers=False),
    Tiles(128, 1, 3, integers=False),
]


def coded(kind: str, out: int, inner: int, group: int, *, zeros: bool) -> CodedRows:
    """Random codes; products about as large as a layer's."""
    groups = inner // group if group else 1
    scales = (torch.rand(out, groups) * 0.01 + 0.005).to(DEVICE)
    if kind == "int4":
        points = torch.randint(0, 16, (out, groups), dtype=torch.int16) if zeros else torch.full((out, groups), 8, dtype=torch.int16)
        codes = torch.randint(0, 16, (out, inner), dtype=torch.uint8)
        return CodedRows(codes.to(DEVICE), 4, scales.half(), points.to(DEVICE), group=group)
    if kind == "table":
        table = torch.randn(out, 16).half() * (2.0 if group else 0.02)
        codes = torch.randint(0, 16, (out, inner), dtype=torch.uint8).to(DEVICE)
        return CodedRows(codes, 4, scales.half() if group else None, table=table.to(DEVICE), group=group)
    if kind == "int8":
        points = torch.randint(-100, 100, (out, groups), dtype=torch.int16).to(DEVICE) if zeros else None
        return CodedRows(torch.randint(-128, 128, (out, inner), dtype=torch.int8).to(DEVICE), 8, scales / 16, points, group=group)
    return CodedRows((torch.randn(out, inner) * 50).to(torch.float8_e4m3fn).to(DEVICE), 8, scales / 64, group=group)


def packed(rows: CodedRows, dtype: torch.dtype) -> LowBit:
    weight = pack_coded(rows, dtype)
    assert not isinstance(weight, (DenseWeight, SegmentedWeight))
    return weight


def with_minimums(kind: str, out: int, inner: int) -> tuple[CodedRows, OffsetWeight]:
    """Runs of 32 as GGUF's blocks have them, with offsets as large as what their codes stand for."""
    rows = coded(kind, out, inner, 32, zeros=False)
    assert rows.scales is not None
    rows = dataclasses.replace(rows, minimums=(torch.randn(rows.scales.shape) * (0.1 if kind == "int4" else 0.05)).to(DEVICE))
    weight = pack_low_bit(rows, torch.bfloat16)
    assert isinstance(weight, OffsetWeight)
    return rows, weight


def product(x: torch.Tensor, weight: LowBit | OffsetWeight, bias: torch.Tensor | None, tuning: Tuning) -> torch.Tensor:
    form = form_of(weight, x.dtype, bias=bias is not None)
    assert form is not None
    if not ON_GPU:
        return emulate(x, weight, bias, form, tuning)
    elements, counters = workspace_size(len(x), weight.out_features, x.shape[1], tuning, sm_count(DEVICE))
    workspace = SkinnyWorkspace.allocate(elements, counters, DEVICE) if elements else None
    return multiply(x, complete(weight), bias, form, tuning, workspace)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def combinations() -> list[Any]:
    """Each kind with each tuning on a GPU. Where a block's threads take turns, at a second each: those in which codes are read otherwise."""
    return [
        pytest.param(*kind, tuning, id=f"{kind[0]}-{kind[1]}{'-zeros' * kind[2]}-{tuning}")
        for kind in KINDS
        for tuning in TUNINGS
        if isinstance(tuning, Stream) or not tuning.integers or kind[0] in ("int4", "int8")
        if ON_GPU
        or tuning in (TUNINGS[0], TUNINGS[4], TUNINGS[6])
        or kind[:2] in (("int4", 128), ("int4", 32), ("float8", 0), ("int8", 32))
    ]


@pytest.mark.parametrize(("kind", "group", "zeros", "tuning"), combinations())
def test_the_dequantised_product(kind: str, group: int, zeros: bool, tuning: Tuning) -> None:
    torch.manual_seed(0)
    out, inner, dtype = 80, 512, torch.float16 if tuning.rows in (8, 32) else torch.bfloat16
    rows = coded(kind, out, inner, group, zeros=zeros)
    count = tuning.rows - 3 if isinstance(tuning, Stream) else tuning.rows + 5
    x, bias = torch.randn(count, inner, device=DEVICE).to(dtype), torch.randn(out, device=DEVICE).to(dtype)
    got = product(x, packed(rows, dtype), bias, tuning)
    limit = 4e-4 if dtype == torch.float16 else 2.5e-3  # what rounding the result costs
    assert error(got, x.double() @ dequantize(rows, torch.float64).T + bias.double()) < limit


OFFSET_TUNINGS: list[Tuning] = [
    Stream(1, 4, 1, 2),
    Stream(1, 2, 2, 3),
    Tiles(16, 1, 3, 2),
    Tiles(32, 2, 2),
    Tiles(64, 2, 2),
    Tiles(128, 1, 2),
]


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("tuning", OFFSET_TUNINGS if ON_GPU else [OFFSET_TUNINGS[i] for i in (0, 3, 4)], ids=str)
def test_offsets_of_groups(kind: str, tuning: Tuning) -> None:
    """The same kernel adds what groups are above their scaled codes."""
    torch.manual_seed(5)
    rows, weight = with_minimums(kind, 80, 512)
    count = tuning.rows - 3 if isinstance(tuning, Stream) else tuning.rows + 5
    x, bias = torch.randn(count, 512, device=DEVICE).bfloat16(), torch.randn(80, device=DEVICE).bfloat16()
    got = product(x, weight, bias, tuning)
    assert error(got, x.double() @ dequantize(rows, torch.float64).T + bias.double()) < 2.5e-3


def test_offsets_that_the_kernels_do_not_take() -> None:
    _, weight = with_minimums("int4", 80, 512)
    form = form_of(weight, torch.bfloat16, bias=False)
    assert form is not None
    assert form.offsets
    for rows in (1, 8, 9, 16, 30, 64, 200, 256):
        tuning = choice(form, 80, 512, rows, 132)
        assert isinstance(tuning, Stream) or (isinstance(tuning, Tiles) and tuning.integers)
    zeros = torch.zeros(16, 80, dtype=torch.uint8, device=DEVICE)
    assert isinstance(weight.codes, Int4Weight)
    codes = dataclasses.replace(weight.codes, zeros=zeros)
    assert form_of(dataclasses.replace(weight, codes=codes), torch.bfloat16, bias=False) is None


def test_a_block_with_many_strips_of_a_split_product() -> None:
    """More than a warp's lanes count at once."""
    torch.manual_seed(0)
    out = 16 * (40 if not ON_GPU else 40 * sm_count(DEVICE))
    rows, x = coded("int4", out, 256, 64, zeros=True), torch.randn(3, 256, device=DEVICE).half()
    got = product(x, packed(rows, torch.float16), None, Stream(1, 2, 2, 2))
    assert error(got, x.double() @ dequantize(rows, torch.float64).T) < 4e-4


FEW_ROWS = [Stream(1, 4, 1, 2), Tiles(16, 1, 2)]


@pytest.mark.parametrize("tuning", FEW_ROWS, ids=lambda tuning: tuning.name)
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_integers_keep_the_inputs_precision(kind: str, tuning: Tuning) -> None:
    """Inputs that are multiplied together share one scale: even beside one that is 500 times as large, sums are as good as in bfloat16."""
    torch.manual_seed(1)
    rows = coded(kind, 32, 512, 128, zeros=False)
    x = torch.randn(4, 512, device=DEVICE)
    x[:, 7] *= 500
    x = x.half()
    exact = x.double() @ dequantize(rows, torch.float64).T
    assert error(product(x, packed(rows, torch.float16), None, tuning), exact) < 4e-4


@pytest.mark.parametrize("tuning", FEW_ROWS, ids=lambda tuning: tuning.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["int4", "float8"])
def test_what_is_no_number_stays_in_its_row(kind: str, bad: float, tuning: Tuning) -> None:
    torch.manual_seed(2)
    tuning = dataclasses.replace(tuning, integers=kind == "int4") if isinstance(tuning, Tiles) else tuning
    weight = packed(coded(kind, 32, 512, 128, zeros=False), torch.bfloat16)
    x = torch.randn(5, 512, device=DEVICE).bfloat16()
    clean = product(x, weight, None, tuning)
    x[2, 100] = bad
    got = product(x, weight, None, tuning)
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], clean[others])
    assert not got[2].isfinite().any()


def test_weights_that_the_kernels_do_not_take() -> None:
    for out, inner, group in ((72, 512, 0), (80, 480, 0), (80, 512, 32), (80, 480, 32)):
        weight = packed(coded("int8", out, inner, group, zeros=False), torch.bfloat16)
        taken = form_of(weight, torch.bfloat16, bias=False)
        assert (taken is None) == (out % 16 > 0 or inner % 32 > 0)
    weight = packed(coded("int4", 80, 512, 128, zeros=False), torch.bfloat16)
    assert form_of(weight, torch.float32, bias=False) is None


@pytest.mark.parametrize(
    ("kind", "group"), [("table", 0), ("float8", 0), *((kind, group) for kind in ("int4", "int8") for group in (0, 32, 64, 128))]
)
def test_every_choice_fits(kind: Any, group: int) -> None:
    """Shared memory, registers for x, and work for every part."""
    wide = group in (0, 32, 128) or (kind == "int8" and group == 64)
    form = Form(kind, False, wide, group, 1, 1, 1, kind != "table", False, False)
    for out in (1024, 4096, 6144, 28672):
        for inner in (1024, 2048, 4096, 14336):
            for rows in range(1, 257):
                tuning = choice(form, out, inner, rows, 132)
                if tuning is None:
                    continue
                launched = form.read_by(tuning)
                assert launched.wide == (wide and not (isinstance(tuning, Tiles) and kind in ("int4", "table") and group == 32))
                assert tuning.shared_bytes(launched, inner) <= 227 << 10
                assert rows <= tuning.rows or isinstance(tuning, Tiles)
                chunks = inner // form.chunk
                if isinstance(tuning, Stream):
                    assert 1 <= tuning.warps <= 16
                    assert tuning.per_warp(form, inner) * form.chunk // 8 <= 64
                    assert (tuning.split - 1) * tuning.warps * tuning.per_warp(form, inner) < chunks
                else:
                    assert tuning.stages >= 3
                    assert not tuning.integers or kind in ("int4", "int8")


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("kind", "group", "zeros"), KINDS)
@pytest.mark.parametrize("rows", [1, 8, 16, 27, 33, 100, 250])
def test_large_shapes_have_the_same_bits_every_time(kind: str, group: int, zeros: bool, rows: int) -> None:
    """What a copy overtakes, or a part that is counted too early, shows as a difference now and then."""
    torch.manual_seed(3)
    codes = coded(kind, 6144, 4096, group, zeros=zeros)
    weight, x = packed(codes, torch.bfloat16), torch.randn(rows, 4096, device=DEVICE).bfloat16()
    form = form_of(weight, torch.bfloat16, bias=False)
    assert form is not None
    tuning = choice(form, 6144, 4096, rows, torch.cuda.get_device_properties(DEVICE).multi_processor_count)
    assert tuning is not None
    first = product(x, weight, None, tuning)
    assert error(first, x.double() @ dequantize(codes, torch.float64).T) < 2.5e-3
    assert all(torch.equal(product(x, weight, None, tuning), first) for _ in range(50))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
def test_what_does_not_compile_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    assert library() is not None
    with pytest.raises(CompilerError, match="undefined"):
        compile_kernel('extern "C" __global__ void k() { missing(); }', "sm_90a")


def test_a_block_may_end_where_the_inner_elements_do() -> None:
    """Inner elements that do not fill the last stage, and its groups, are zeros."""
    torch.manual_seed(4)
    rows = coded("int4", 48, 448, 32, zeros=True)
    x = torch.randn(9, 448, device=DEVICE).bfloat16()
    for integers in (True, False):
        got = product(x, packed(rows, torch.bfloat16), None, Tiles(16, 1, 2, integers=integers))
        assert error(got, x.double() @ dequantize(rows, torch.float64).T) < 2.5e-3


def test_device_sources_differ_by_what_they_are_for() -> None:
    form = Form("int4", False, True, 128, 1, 1, 1, True, False, False)
    sources = {Program(f, t, 512).device_source() for f in (form, dataclasses.replace(form, half=True)) for t in TUNINGS}
    assert len(sources) == 2 * len(TUNINGS)
