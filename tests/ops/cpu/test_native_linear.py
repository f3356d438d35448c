"""Packed linear layers against float64 products of the unpacked weights, at every level."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.config.types import CpuActivations
from octavo.ops.cpu import abi, panels
from octavo.ops.packed import EncodedRows, PanelWeight
from tests.support.encoded_rows import CONVERTED, ENCODINGS, STORED, as_float, block_values, random_rows
from tests.support.gguf_blocks import SIZES

PROPERTY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def packed(*parts: EncodedRows) -> PanelWeight:
    return PanelWeight(tuple(panels.pack_rows(p) for p in parts), sum(p.shape[0] for p in parts), parts[0].shape[1])


LARGE = 12.0
"""As in native/kernels.h."""


def rounded(x: torch.Tensor, activations: CpuActivations) -> torch.Tensor:
    """What rounded activations stand for: x to the nearest steps of each group of 32, of which the largest number is 32767 steps in 16
    bits. In 8 bits it is 127, but for fours of columns that go beyond LARGE times the row's mean size: those may have 128 times as many."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    sizes = groups.abs()
    if activations == "int16":
        most, base = 32767.0, sizes.amax(-1, keepdim=True)
    else:
        most, bound = 127.0, LARGE * x.abs().mean(1)[:, None, None]
        fours = sizes.unflatten(-1, (8, 4)).amax(-1).repeat_interleave(4, -1)
        base = torch.maximum(torch.where(fours > bound, 0.0, sizes).amax(-1, keepdim=True), sizes.amax(-1, keepdim=True) / 128)
    steps = torch.round(groups * torch.where(base > 0, torch.full_like(base, most) / base, 0.0))
    return (steps * (base / most)).flatten(1)[:, : x.shape[1]]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@PROPERTY
@given(
    encodings=st.lists(st.sampled_from(ENCODINGS), min_size=1, max_size=3),
    tokens=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 13, 65, 131]),
    rows=st.lists(st.integers(1, 70), min_size=3, max_size=3),
    groups=st.integers(1, 5),
    bias=st.booleans(),
    seed=st.integers(0, 999),
)
def test_float_activations(
    engine: abi.Engine, encodings: list[str], tokens: int, rows: list[int], groups: int, bias: bool, seed: int
) -> None:
    columns = groups * max(block_values(e) for e in encodings)
    parts = [random_rows(e, r, columns, seed + i) for i, (e, r) in enumerate(zip(encodings, rows, strict=False))]
    weight, x = packed(*parts), randn(tokens, columns, seed=seed)
    b = randn(weight.out_features, seed=seed + 9) if bias else None
    expected = x.double() @ torch.cat([as_float(p) for p in parts]).double().T + (0 if b is None else b.double())
    out = panels.linear(engine, x, weight, b, activations="float32")
    torch.testing.assert_close(out.double(), expected, atol=2e-5 * columns**0.5, rtol=1e-5)


@PROPERTY
@given(
    encoding=st.sampled_from([*STORED, *(e for e in CONVERTED if e != "Q2_K")]),
    activations=st.sampled_from(["int16", "int8"]),
    tokens=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 33]),
    rows=st.integers(1, 70),
    groups=st.integers(1, 5),
    spread=st.sampled_from([1e-6, 1.0, 1e4]),
    large=st.sampled_from([0, 1, 5, 40]),
    seed=st.integers(0, 999),
)
def test_packed_weights_take_rounded_activations(
    engine: abi.Engine,
    encoding: str,
    activations: CpuActivations,
    tokens: int,
    rows: int,
    groups: int,
    spread: float,
    large: int,
    seed: int,
) -> None:
    """Also where some numbers are far larger than the others, in some rows or all, alone in their four of columns or not."""
    columns = groups * block_values(encoding)
    part = random_rows(encoding, rows, columns, seed)
    x = randn(tokens, columns, seed=seed) * spread
    x[0, :32] = 0
    source = torch.Generator().manual_seed(seed)
    places = torch.randint(columns, (large,), generator=source), torch.randint(tokens, (large,), generator=source)
    x[places[1], places[0]] *= torch.exp(torch.rand(large, generator=source) * 8)
    expected = rounded(x, activations).double() @ as_float(part).double().T
    out = panels.linear(engine, x, packed(part), None, activations=activations)
    size = x.abs().amax(1, keepdim=True).clamp(min=spread)
    torch.testing.assert_close(out.double() / size, expected / size, atol=2e-5 * columns**0.5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 4, 20])
@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("encoding", STORED)
def test_the_largest_products_do_not_overflow(engine: abi.Engine, encoding: str, activations: CpuActivations, tokens: int) -> None:
    """All weights and inputs at an end of their range, of either sign: what 16 bits hold of pairs is nearly full."""
    part = random_rows(encoding, 16, 64, 1)
    scales = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}[encoding]
    blocks = part.data.reshape(16, 2, -1)
    blocks[:, :, scales:] = np.where(np.arange(16)[:, None, None] % 2, 0xFF, 0x00) if encoding != "Q8_0" else 0
    if encoding == "Q8_0":
        blocks[:, :, scales:] = np.array([0x80, 0x7F, 0x81, 0x01], np.uint8)[np.arange(16) % 4][:, None, None]
    x = torch.ones(tokens, 64) * torch.where(torch.arange(tokens) % 2 == 0, 1.0, -1.0)[:, None]
    expected = x.double() @ as_float(part).double().T
    out = panels.linear(engine, x, packed(part), None, activations=activations)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-5)


def test_16_bit_activations_are_as_exact_as_float32(engine: abi.Engine) -> None:
    """The error of the product against float64 is that of float32 sums, and far below what int8 makes."""
    part, x = random_rows("Q4_1", 64, 960, 5), randn(20, 960)
    expected = x.double() @ as_float(part).double().T
    error = {
        a: float((panels.linear(engine, x, packed(part), None, activations=a) - expected).norm() / expected.norm()) for a in abi.READ_AS
    }
    assert error["float32"] < 1e-6
    assert error["int16"] < 4e-5
    assert 1e-3 < error["int8"] < 1e-2


@pytest.mark.parametrize("columns", [1, 31, 33, 65])
@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16"])
def test_columns_need_not_be_whole_groups(engine: abi.Engine, encoding: str, columns: int) -> None:
    part, x = random_rows(encoding, 37, columns, 1), randn(9, columns)
    out = panels.linear(engine, x, packed(part), None, activations="int8")
    torch.testing.assert_close(out, x @ as_float(part).T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("activations", abi.READ_AS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_row_is_the_same_bits_in_any_batch(engine: abi.Engine, encoding: str, activations: CpuActivations) -> None:
    weight, x = packed(random_rows(encoding, 90, columns := 3 * block_values(encoding), 3)), randn(140, columns)
    alone = torch.cat([panels.linear(engine, row[None], weight, None, activations=activations) for row in x])
    single = abi.Engine(1)
    for count in (2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 63, 64, 65, 128, 129, 140):
        assert torch.equal(panels.linear(engine, x[:count], weight, None, activations=activations), alone[:count])
        assert torch.equal(panels.linear(single, x[-count:], weight, None, activations=activations), alone[-count:])


@pytest.mark.parametrize("activations", abi.READ_AS)
def test_rows_of_x_may_be_strided_and_start_anywhere(engine: abi.Engine, activations: CpuActivations) -> None:
    weight, wide = packed(random_rows("Q4_1", 48, 64, 1)), randn(10, 131)
    for x in (wide[:, 3:67], wide[::2, 1:65]):
        assert x.data_ptr() % 16
        expected = panels.linear(engine, x.contiguous(), weight, None, activations=activations)
        assert torch.equal(panels.linear(engine, x, weight, None, activations=activations), expected)


@pytest.mark.parametrize("rows", [5, 16, 27])
def test_output_may_be_a_slice_of_a_wider_buffer(engine: abi.Engine, rows: int) -> None:
    """And nothing beside the slice is touched."""
    weight, x = packed(random_rows("Q4_0", rows, 64, 2)), randn(7, 64)
    buffer = torch.full((7, rows + 11), 3.0)
    described = abi.describe_linear(weight)
    target = buffer[:, 6 : 6 + rows]
    abi.loaded().octavo_linear(engine.handle, ctypes.byref(described), x.data_ptr(), 64, 7, target.data_ptr(), buffer.stride(0), 2)
    assert torch.equal(target, panels.linear(engine, x, weight, None, activations="int8"))
    assert (buffer[:, :6] == 3.0).all() and (buffer[:, 6 + rows :] == 3.0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("activations", abi.READ_AS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_bad_number_shows_in_its_own_row_only(engine: abi.Engine, encoding: str, activations: CpuActivations, bad: float) -> None:
    weight, x = packed(random_rows(encoding, 40, columns := 3 * block_values(encoding), 4)), randn(9, columns)
    expected = panels.linear(engine, x, weight, None, activations=activations)
    x[5, 70] = bad
    out = panels.linear(engine, x, weight, None, activations=activations)
    assert not out[5].isfinite().any()
    others = [0, 1, 2, 3, 4, 6, 7, 8]
    assert torch.equal(out[others], expected[others])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rows_are_packed_in_the_order_asked_for(engine: abi.Engine, encoding: str) -> None:
    columns = 2 * block_values(encoding)
    rows = random_rows(encoding, 50, columns, 6)
    order = np.random.default_rng(0).permutation(50)
    shuffled = EncodedRows(encoding, (50, columns), rows.data, order)
    x = randn(3, columns)
    assert torch.equal(
        panels.linear(engine, x, packed(shuffled), None, activations="int8"),
        panels.linear(engine, x, packed(rows), None, activations="int8")[:, order],
    )


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_embedding_unpacks_rows(level: str, encoding: str) -> None:
    columns = 2 * block_values(encoding)
    first, second = random_rows(encoding, 21, columns, 7), random_rows("F16", 9, columns, 8)
    ids = torch.tensor([0, 20, 21, 29, 7, 7, 15, 16])
    expected = torch.cat([as_float(first), as_float(second)])[ids]
    torch.testing.assert_close(panels.embedding(packed(first, second), ids), expected, atol=0, rtol=1e-6)


def test_minimum_of_q4_0_is_exact_for_every_scale(level: str) -> None:
    """Minus eight times the scale, also where the scale is subnormal; scales that would overflow are met with the largest number."""
    scales = np.arange(0, 2**16, dtype=np.uint16)
    finite = np.isfinite(scales.view(np.float16)) & (np.abs(scales.view(np.float16).astype(np.float32)) < 8188)
    scales = scales[finite]
    scales = scales[: len(scales) // 16 * 16]
    block = np.zeros((len(scales), 18), np.uint8)
    block[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    table = packed(EncodedRows("Q4_0", (len(scales), 32), block))
    out = panels.embedding(table, torch.arange(len(scales)))
    expected = torch.from_numpy(-8.0 * scales.view(np.float16).astype(np.float32))
    assert torch.equal(out, expected[:, None].expand_as(out))


def test_float16_is_read_exactly(level: str) -> None:
    bits = np.arange(0, 2**16, dtype=np.uint16).reshape(-1, 32)
    out = panels.embedding(packed(EncodedRows("F16", bits.shape, bits.view(np.uint8))), torch.arange(len(bits)))
    expected = torch.from_numpy(bits.view(np.float16).astype(np.float32))
    torch.testing.assert_close(out, expected, atol=0, rtol=0, equal_nan=True)


def test_no_tokens_is_no_work(engine: abi.Engine) -> None:
    weight = packed(random_rows("Q4_1", 16, 32, 0))
    assert panels.linear(engine, torch.empty(0, 32), weight, None, activations="int8").shape == (0, 16)


@pytest.mark.parametrize("encoding", ["Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4"])
@pytest.mark.parametrize("worth", ["nan", "too large", "too small", "small beside larger ones"])
def test_scales_that_float16_does_not_hold_are_told(level: str, encoding: str, worth: str) -> None:
    """Who packs them keeps the numbers otherwise. Few small ones among larger ones are worth nothing."""
    rows = random_rows(encoding, 20, 512, 5)
    blocks = rows.bytes().reshape(20, -1, SIZES[encoding][1]).copy()
    place = 208 if encoding == "Q6_K" else 0

    def put(block: tuple[int, int], value: float, exponent: int) -> None:
        if encoding == "MXFP4":
            blocks[block][0] = exponent
        else:
            blocks[block][place : place + 2] = np.float16([value]).view(np.uint8)

    match worth:
        case "nan":
            put((3, 1), np.nan, 255)
        case "too large":
            put((3, 1), 60000.0, 200)
        case "too small":
            for block in np.ndindex(blocks.shape[:2]):
                put(block, 2.0**-22, 105)
        case _:
            put((3, 1), 2.0**-22, 105)
    part = panels.pack_rows(EncodedRows(encoding, (20, 512), blocks.reshape(20, -1)))
    assert part.finite == (worth == "small beside larger ones")
