"""GGUF's blocks as codes are worth what the gguf package says, whole, cut, joined and packed; the rest says that it is not packed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from octavo.checkpoint.gguf_file import GGML_TYPES, read_gguf
from octavo.ops.coded import dequantize, joined
from octavo.ops.packed import DenseWeight, Int4Weight, Int8Weight, OffsetWeight, TableWeight
from octavo.ops.reference.linear import linear
from octavo.ops.reference.low_bit import pack_low_bit, unpack
from octavo.weights.block_rows import block_rows
from octavo.weights.gguf import open_gguf
from octavo.weights.gguf_blocks import unpack as unpack_blocks
from octavo.weights.gguf_coded import coded_rows, is_readable, packed_bits
from octavo.weights.parallel_read import ParallelReader
from tests.support.gguf_blocks import blocks_of

UNPACKED = ["Q6_K", "Q2_K"]
PACKED = ["Q3_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
KINDS = {
    "Q3_K": Int8Weight,
    "Q4_0": Int4Weight,
    "Q5_0": Int8Weight,
    "Q8_0": Int8Weight,
    "IQ4_NL": TableWeight,
    "IQ4_XS": TableWeight,
    "MXFP4": TableWeight,
}
ROWS = 6


def expected(raw: np.ndarray, name: str) -> torch.Tensor:
    return torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[name]))


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """To the rounding of float32, in units of the largest: a minimum and a code's worth may cancel."""
    assert wanted.isfinite().all() and wanted.std() > 0
    assert float((found - wanted).abs().max()) <= 4e-7 * float(wanted.abs().max())


@pytest.mark.parametrize("name", [*PACKED, *UNPACKED])
def test_worth_what_the_gguf_package_says(name: str) -> None:
    raw = blocks_of(name)
    rows = coded_rows(torch.from_numpy(raw), name)
    assert rows.shape == (ROWS, 512)
    assert_equal(dequantize(rows), expected(raw, name))


@pytest.mark.parametrize("name", PACKED)
def test_packed_and_as_large_as_said(name: str) -> None:
    raw = blocks_of(name, 64)
    weight = pack_low_bit(coded_rows(torch.from_numpy(raw), name), torch.bfloat16)
    assert isinstance(weight, KINDS.get(name, OffsetWeight))
    assert_equal(unpack(weight, torch.float32), expected(raw, name))
    bits = packed_bits(name)
    assert bits is not None
    table = weight.table.nbytes if isinstance(weight, TableWeight) else 0
    assert weight.nbytes - table == 64 * 512 * bits / 8


@pytest.mark.parametrize("name", [*PACKED, *UNPACKED])
def test_cut_reordered_and_joined(name: str) -> None:
    raw = blocks_of(name, 32)
    wanted, rows = expected(raw, name), coded_rows(torch.from_numpy(raw), name)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    assert_equal(dequantize(rows.select_rows(order)), wanted[order])
    assert_equal(dequantize(rows.narrow_rows(5, 20)), wanted[5:20])
    for start, stop in ((0, 256), (256, 512), (64, 160), (0, 100), (100, 512)):
        part = rows.narrow_columns(start, stop)
        assert_equal(dequantize(part), wanted[:, start:stop])
        assert_equal(unpack(pack_low_bit(part, torch.float32), torch.float32), wanted[:, start:stop])
    whole = joined([rows.narrow_rows(0, 7), rows.narrow_rows(7, 32)])
    assert whole is not None
    assert_equal(dequantize(whole), wanted)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        linear(x, pack_low_bit(rows, torch.float32), None), x @ wanted.T, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())
    )


@pytest.mark.parametrize("name", ["Q4_K", "IQ4_NL", "Q8_0"])
def test_read_by_several_threads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is on the way to a device, and piece by piece: the same codes, from the same bytes."""
    monkeypatch.setattr("octavo.weights.gguf._DEVICE_CHUNK_VALUES", 7 * 512)
    raw = blocks_of(name, 64)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=GGMLQuantizationType[name])
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(8, np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    cpu = torch.device("cpu")
    with ParallelReader(cpu, piece=100) as reader:
        stored = {t.name: t for t in open_gguf(read_gguf(str(path)), cpu, reader)}
        coded = stored["blk.0.ffn_up.weight"].coded
        assert coded is not None and stored["blk.0.attn_norm.weight"].coded is None
        assert_equal(dequantize(coded()), expected(raw, name))
        found = torch.empty(64, 512)
        stored["blk.0.ffn_up.weight"].copy_into(found)
    assert_equal(found, expected(raw, name))


def test_parts_with_and_without_minimums_stay_apart() -> None:
    assert joined([coded_rows(torch.from_numpy(blocks_of(name)), name) for name in ("Q4_0", "Q4_1")]) is None


def test_groups_that_ranks_share_are_dequantised() -> None:
    rows = coded_rows(torch.from_numpy(blocks_of("Q4_1")), "Q4_1")
    assert isinstance(pack_low_bit(rows.narrow_columns(16, 512), torch.float32), DenseWeight)
    assert isinstance(pack_low_bit(rows.narrow_columns(0, 48), torch.float32), DenseWeight)
    assert isinstance(pack_low_bit(rows.narrow_columns(32, 96), torch.float32), OffsetWeight)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_the_way_back_to_blocks(name: str) -> None:
    raw = blocks_of(name)
    back = block_rows(coded_rows(torch.from_numpy(raw), name))
    wanted = expected(raw, name)
    found = unpack_blocks(back.data.copy(), back.encoding).float().reshape(wanted.shape)
    assert float((found - wanted).abs().max()) <= 2e-3 * float(wanted.abs().max())


def test_what_is_not_packed_says_so() -> None:
    assert {name for name, *_ in GGML_TYPES.values() if packed_bits(name) is not None} == set(PACKED)
    assert {name for name, *_ in GGML_TYPES.values() if is_readable(name)} == {*PACKED, *UNPACKED}
    for name in UNPACKED:
        assert isinstance(pack_low_bit(coded_rows(torch.from_numpy(blocks_of(name)), name), torch.bfloat16), DenseWeight)
