"""Unpacking of every block format against the gguf package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from octavo.checkpoint.gguf_file import GGML_TYPES
from octavo.weights.gguf_blocks import unpack

BYTES = {name: (values, size) for name, values, size in GGML_TYPES.values()}
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def random_blocks(name: str, rows: int, blocks: int) -> np.ndarray:
    """Random bytes whose half-precision scales are finite: the exponent's top bit is cleared in every possible place."""
    raw = np.random.default_rng(3).integers(0, 256, (rows, blocks * BYTES[name][1]), dtype=np.uint8)
    return raw & 0xBF


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_equals_the_gguf_package(name: str) -> None:
    raw = random_blocks(name, 5, 3)
    expected = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[name]))
    out = unpack(raw.copy(), name)
    assert out.shape == (5, 3 * BYTES[name][0])
    assert expected.isfinite().all()
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_undoes_quantisation(name: str) -> None:
    values = np.random.default_rng(1).standard_normal((4, 64), dtype=np.float32)
    out = unpack(quants.quantize(values, GGMLQuantizationType[name]), name)
    bits = int(name[1])
    assert (out - torch.from_numpy(values)).abs().max() < 8.0 / 2**bits


@pytest.mark.parametrize("name", FLOATS)
def test_float_types_are_taken_as_they_are(name: str) -> None:
    values = torch.randn(3, 8).to(FLOATS[name])
    out = unpack(values.view(torch.uint8).numpy().copy(), name)
    assert torch.equal(out, values)


@pytest.mark.parametrize("name", ["Q8_1", "I32", "Q8_K"])
def test_types_that_hold_no_weights(name: str) -> None:
    with pytest.raises(NotImplementedError):
        unpack(random_blocks(name, 1, 1), name)
