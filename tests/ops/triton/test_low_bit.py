"""Products with low-bit weights against dequantise and multiply in float64, for every format and every way of asking."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from octavo.ops.coded import Activations, CodedRows, dequantize, joined
from octavo.ops.packed import DenseWeight, Int4Weight, Int8Weight, LinearWeight, OffsetWeight, SegmentedWeight, TableWeight
from octavo.ops.reference.low_bit import bytes_in_order, in_order, pack_coded, round_activations, unpack
from octavo.ops.triton.linear import TritonLinear
from octavo.ops.triton.low_bit import LowBitLinear
from octavo.ops.triton.low_bit_matmul import LowBit, LowBitTuning, _exact, add_sparse, low_bit_layout, low_bit_matmul, unpack_weight
from octavo.ops.triton.low_bit_table import ROW_CLASSES, choice
from octavo.ops.triton.round_rows import round_rows, scaled_sums
from octavo.ops.triton.skinny_matmul import SkinnyWorkspace
from octavo.weights.gguf_coded import coded_rows
from tests.support.complete import complete
from tests.support.gguf_blocks import small_blocks
from tests.support.quantized_layouts import LAYOUTS
from tests.unit.quantization.test_formats import read

from .paged import relative_error

PACKED = [name for name in LAYOUTS if name not in ("gptq-16", "nvfp4")]
"""Those whose groups kernels take."""


def half(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def weight_of(name: str, rows: int, columns: int, device: torch.device) -> LowBit:
    packed = pack_coded(on(read(LAYOUTS[name](rows, columns, 1)), device), half(device))
    assert not isinstance(packed, (DenseWeight,))
    return complete(packed)  # type: ignore[return-value]


def on(rows: CodedRows, device: torch.device) -> CodedRows:
    def moved(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if hasattr(value, "__dataclass_fields__"):
            return type(value)(**{name: moved(getattr(value, name)) for name in value.__dataclass_fields__})
        return value

    return moved(rows)  # type: ignore[return-value]


def inputs(weight: LowBit, x: torch.Tensor) -> torch.Tensor:
    """x as the weight's columns want it."""
    if isinstance(weight, (Int4Weight, Int8Weight)) and weight.columns is not None:
        return torch.nn.functional.pad(x, (0, 1)).index_select(1, weight.columns)
    return x


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize(("out", "inner", "rows"), [(96, 192, 5), (64, 256, 17)])
@pytest.mark.parametrize("name", PACKED)
def test_matches_float64(name: str, out: int, inner: int, rows: int, split: int, device: torch.device) -> None:
    weight = weight_of(name, out, inner, device)
    layout = low_bit_layout(weight)
    x, bias = torch.randn(rows, inner, device=device).to(half(device)), torch.randn(out, device=device).to(half(device))
    four = layout.kind in ("int4", "table")
    step = 128 if layout.group == 0 else max(64, layout.group) if four else layout.group
    workspace = SkinnyWorkspace.allocate(8 * 32 * 2 * 32, 16, device)
    ordered = inputs(weight, x)
    got = low_bit_matmul(ordered, weight, bias, workspace, LowBitTuning(32, step, split, 4, 3, rows=16))
    if isinstance(weight, TableWeight):
        add_sparse(ordered, weight, got)
    expected = x.double() @ unpack(weight, torch.float64).T + bias.double()
    assert relative_error(got, expected) < 5e-3
    assert not workspace.counters.any()


@pytest.mark.parametrize("name", PACKED)
def test_unpacked_is_the_reference(name: str, device: torch.device) -> None:
    weight = weight_of(name, 96, 192, device)
    expected = unpack(weight, torch.float32)
    got = unpack_weight(weight, torch.float32)
    if isinstance(weight, TableWeight) and weight.outliers is not None:
        x = torch.randn(3, 192, device=device)
        out = x @ got.T
        add_sparse(x, weight, out)
        torch.testing.assert_close(out, x @ expected.T, rtol=1e-4, atol=1e-4)
        return
    eye = inputs(weight, torch.eye(192, device=device))
    torch.testing.assert_close(got, (expected @ eye), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("group", [32, 128, 256, 0])
def test_codes_in_the_order_of_tensor_cores(group: int, device: torch.device) -> None:
    out, inner, rows = 64, 512, 9
    groups = inner // group if group else 1
    zeros = torch.randint(0, 16, (out, groups)).short()
    coded = CodedRows(torch.randint(0, 16, (out, inner), dtype=torch.uint8), 4, torch.rand(out, groups).half() * 0.01, zeros, group=group)
    as_read = pack_coded(on(coded, device), half(device))
    assert isinstance(as_read, Int4Weight)
    weight = complete(replace(as_read, data=in_order(as_read.data), ordered=True))
    assert torch.equal(unpack(weight, torch.float32), unpack(as_read, torch.float32))
    assert torch.equal(unpack_weight(weight, torch.float32), unpack_weight(as_read, torch.float32))
    x, workspace = torch.randn(rows, inner, device=device).to(half(device)), SkinnyWorkspace.allocate(8 * 32 * 2 * 32, 16, device)
    for tuning in (LowBitTuning(32, 64 if group == 32 else 128, 1, 4, 3, rows=16), LowBitTuning(32, 64, 2, 4, 3, rows=16)):
        got = low_bit_matmul(x, weight, None, workspace, tuning)
        assert relative_error(got, x.double() @ unpack(weight, torch.float64).T) < 5e-3


def test_bytes_in_the_order_of_tensor_cores(device: torch.device) -> None:
    out, inner, rows = 80, 512, 9
    coded = CodedRows(torch.randint(-128, 128, (out, inner), dtype=torch.int8), 8, torch.rand(out, inner // 32).half() * 0.001, group=32)
    as_read = pack_coded(on(coded, device), half(device))
    assert isinstance(as_read, Int8Weight)
    weight = complete(replace(as_read, data=bytes_in_order(as_read.data), ordered=True))
    assert torch.equal(unpack_weight(weight, torch.float32), unpack_weight(as_read, torch.float32))
    x, workspace = torch.randn(rows, inner, device=device).to(half(device)), SkinnyWorkspace.allocate(8 * 32 * 2 * 32, 16, device)
    for tuning in (LowBitTuning(32, 32, 1, 4, 3, rows=16), LowBitTuning(16, 32, 2, 4, 3, rows=16)):
        got = low_bit_matmul(x, weight, None, workspace, tuning)
        assert relative_error(got, x.double() @ unpack(weight, torch.float64).T) < 5e-3


@pytest.mark.parametrize("rows", [1, 16, 70, 300])
@pytest.mark.parametrize("name", ["awq-32", "gptq-act-order", "gptq-v2", "squeezellm-3-sparse", "gptq-8", "fp8-block", "mxfp4"])
def test_layer_takes_any_number_of_rows(name: str, rows: int, device: torch.device) -> None:
    layer, coded = LowBitLinear(), on(read(LAYOUTS[name](64, 128, 2)), device)
    weight = complete(layer.pack(coded, half(device)))
    x = torch.randn(rows, 128, device=device).to(half(device))
    got = layer.linear(x, weight, None)  # type: ignore[arg-type]
    assert relative_error(got, x.double() @ dequantize(coded, torch.float64).T) < 5e-3


@pytest.mark.parametrize("rows", [1, 16, 257])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "IQ4_XS"])
def test_blocks_of_gguf(name: str, rows: int, device: torch.device) -> None:
    raw = torch.from_numpy(small_blocks(name, 48, 512, 5)).to(device)
    layer, coded = TritonLinear(), coded_rows(raw, name)
    weight = complete(layer.pack_coded(coded, half(device)))
    assert not isinstance(weight, DenseWeight) and isinstance(weight, OffsetWeight) == (coded.minimums is not None)
    x, bias = torch.randn(rows, 512, device=device).to(half(device)), torch.randn(48, device=device).to(half(device))
    for added in (None, bias):
        expected = x.double() @ dequantize(coded, torch.float64).T + (0 if added is None else added.double())
        assert relative_error(layer.linear(x, weight, added), expected) < 5e-3


def test_no_rows(device: torch.device) -> None:
    layer = LowBitLinear()
    weight = layer.pack(on(read(LAYOUTS["awq-32"](64, 128, 2)), device), half(device))
    assert layer.linear(torch.empty(0, 128, device=device, dtype=half(device)), weight, None).shape == (0, 64)  # type: ignore[arg-type]


def test_parts_that_are_stored_differently(device: torch.device) -> None:
    table, dtype = TritonLinear(), half(device)
    coded = [on(read(LAYOUTS[name](32, 128, 3)), device) for name in ("awq-32", "gptq-act-order", "fp8-tensor")]
    assert joined(coded) is None
    dense = torch.randn(32, 128, device=device).to(dtype)
    parts: list[LinearWeight] = complete([*(table.pack_coded(c, dtype) for c in coded), table.pack(dense)])
    whole = torch.cat([*(dequantize(c, torch.float64) for c in coded), dense.double()])
    x, bias = torch.randn(7, 128, device=device).to(dtype), torch.randn(128, device=device).to(dtype)
    assert relative_error(table.linear(x, SegmentedWeight.of(parts), bias), x.double() @ whole.T + bias.double()) < 5e-3


@pytest.mark.parametrize("name", ["gptq-act-order", "w4a16-act-order", "gptq-8-act-order", "awq-32", "gptq-v2", "fp8-channel"])
@pytest.mark.parametrize("cut", [64, 96])
def test_ranks_add_up(name: str, cut: int, device: torch.device) -> None:
    """Inputs split between two ranks, where the cut goes through groups too."""
    layer, coded = TritonLinear(), on(read(LAYOUTS[name](64, 192, 4)), device)
    x = torch.randn(6, 192, device=device).to(half(device))
    total = torch.zeros(6, 64, device=device, dtype=torch.float64)
    for part, columns in ((coded.narrow_columns(0, cut), x[:, :cut]), (coded.narrow_columns(cut, 192), x[:, cut:])):
        total += layer.linear(columns, complete(layer.pack_coded(part, half(device))), None).double()
    assert relative_error(total, x.double() @ dequantize(coded, torch.float64).T) < 5e-3


@pytest.mark.parametrize("rows", [1, 6, 16, 70])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_whole_rows(bits: int, rows: int, device: torch.device) -> None:
    """Of a checkpoint with group_size -1, or of a rank's part of one group."""
    layer, most = TritonLinear(), 2**bits
    codes, zeros = torch.randint(0, most, (64, 256)).byte(), torch.randint(0, most, (64, 1)).short()
    coded = on(CodedRows(codes, bits, torch.rand(64, 1).half() * 0.01 + 0.005, zeros), device)
    weight, x = complete(layer.pack_coded(coded, half(device))), torch.randn(rows, 256, device=device).to(half(device))
    assert relative_error(layer.linear(x, weight, None), x.double() @ dequantize(coded, torch.float64).T) < 5e-3


@triton.jit
def _exact_kernel(codes_ptr, out_ptr, IN_HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 16)
    tl.store(out_ptr + i, _exact(tl.load(codes_ptr + i), IN_HALF))


@pytest.mark.parametrize(("dtype", "power"), [(torch.float16, 1024), (torch.bfloat16, 128)])
def test_codes_become_exact_numbers(dtype: torch.dtype, power: int, device: torch.device) -> None:
    codes, out = torch.arange(16, dtype=torch.uint8, device=device), torch.empty(16, dtype=dtype, device=device)
    _exact_kernel[(1,)](codes, out, IN_HALF=dtype == torch.float16)
    assert out.float().tolist() == [power + i for i in range(16)]


@pytest.mark.parametrize("kind", ["int8", "float8"])
@pytest.mark.parametrize("given", [None, 0.02])
def test_rounding_of_inputs_is_the_reference(kind: str, given: float | None, device: torch.device) -> None:
    x = torch.randn(5, 1500, device=device) * torch.tensor([1.0, 0.0, 1e-3, 30.0, 5.0], device=device)[:, None]
    activations = Activations(kind, None if given is None else torch.tensor(given, device=device))  # type: ignore[arg-type]
    codes, scale = round_rows(x, activations)
    expected, expected_scale = round_activations(x, activations)
    torch.testing.assert_close(scale.expand(5, 1), expected_scale.expand(5, 1))
    ours, theirs = codes.float(), expected.float()
    if kind == "float8" and device.type == "cpu":
        # The interpreter loses the carry where rounding reaches the next power of two.
        carried = theirs.abs().log2().frac() == 0
        ours, theirs = ours[~carried], theirs[~carried]
    assert ((ours - theirs).abs() <= theirs.abs() * 0.13 + (1.0 if kind == "int8" else 0.01)).all()
    assert (ours == theirs).float().mean() > (0.8 if kind == "float8" and device.type == "cpu" else 0.999)  # nor is it exact near zero


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_long_rows_are_rounded_alike(kind: str, device: torch.device) -> None:
    x = torch.randn(2, 20000, device=device)
    activations = Activations(kind)  # type: ignore[arg-type]
    codes, scale = round_rows(x, activations)
    parts, scales = round_rows(x.view(4, 10000), activations)
    whole = scales.view(2, 2).argmax(1) + torch.tensor([0, 2], device=device)  # the halves that the row's scale is of
    torch.testing.assert_close(scale.squeeze(1), scales[whole].squeeze(1), rtol=0, atol=0)
    assert torch.equal(codes.view(4, 10000)[whole].float(), parts[whole].float())


def test_integer_sums_are_scaled(device: torch.device) -> None:
    sums = torch.randint(-1000, 1000, (3, 1500), dtype=torch.int32, device=device)
    scale, columns, bias = (torch.rand(*shape, device=device) for shape in ((3, 1), (1, 1500), (1500,)))
    torch.testing.assert_close(scaled_sums(sums, scale, columns, bias, torch.float32), sums * scale * columns + bias)
    torch.testing.assert_close(scaled_sums(sums, scale[:1], columns, None, torch.float32), sums * scale[:1] * columns)


@pytest.mark.parametrize("kind", ["int4", "table", "int8", "float8"])
def test_every_part_of_every_tuning_has_work(kind: str) -> None:
    for out in (64, 1024, 4096, 6144, 28672):
        for inner in (256, 1024, 4096, 14336):
            for group in (0, 32, 64, 128):
                for rows in ROW_CLASSES:
                    tuning = choice(kind, out, inner, group, rows, 132)  # type: ignore[arg-type]
                    if tuning is None:
                        assert rows > 64
                        continue
                    share = -(-inner // (tuning.split * tuning.inner)) * tuning.inner
                    assert share * (tuning.split - 1) < inner
                    assert group == 0 or tuning.inner <= (max(64, group) if kind in ("int4", "table") else group)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["awq-32", "gptq-v2", "fp8-channel", "fp8-static", "w8a8", "w8a8-static", "fp8-block", "nf4"])
@pytest.mark.parametrize("rows", [1, 7, 33, 64, 129, 257, 1024])
def test_large_shapes_on_the_gpu(name: str, rows: int, device: torch.device) -> None:
    layer, coded = LowBitLinear(), on(read(LAYOUTS[name](512, 1024, 5)), device)
    weight = complete(layer.pack(coded, torch.bfloat16))
    x = torch.randn(rows, 1024, device=device).bfloat16()
    rounded_from = {"float": 1 << 30, "float8": 9, "int8": 129}[coded.activations.kind]
    if name == "fp8-block":
        rounded_from = 129
    limit = 0.05 if rows >= rounded_from else 5e-3  # inputs are rounded too
    assert relative_error(layer.linear(x, weight, None), x.double() @ dequantize(coded, torch.float64).T) < limit  # type: ignore[arg-type]


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Also where there is none; products use the tensor cores and load ahead."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, "-m", "tests.support.low_bit_compiler"]
    done = subprocess.run(program, cwd=Path(__file__).parents[3], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 23
    for kernel in kernels:
        assert kernel["shared"] < 200_000
        if kernel["kernel"].endswith("sm90"):
            assert kernel["wgmma"], kernel
            assert kernel["cp_async"], kernel
