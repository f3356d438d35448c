"""MXFP4: numbers equal those of transformers' own dequantisation, halves are joined in any order, and what does not fit is named."""

from __future__ import annotations

import pytest
import torch

from octavo.errors import CheckpointError
from octavo.weights.mxfp4 import dequantise, join_mxfp4
from octavo.weights.stored import StoredTensor


def stored(name: str, tensor: torch.Tensor) -> StoredTensor:
    def copy_into(destination: torch.Tensor) -> None:
        destination.copy_(tensor)

    return StoredTensor(name, tuple(tensor.shape), tensor.nbytes, "file", copy_into)


def packed(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)


def test_numbers_of_the_format() -> None:
    """E2M1 with an exponent of 127, that is one: by the tables of the specification."""
    codes = torch.arange(32, dtype=torch.uint8) % 16
    blocks = (codes[0::2] | codes[1::2] << 4).view(1, 1, 16)
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = [*positive, *(-v for v in positive)] * 2
    assert dequantise(blocks, torch.full((1, 1), 127, dtype=torch.uint8)).tolist() == [expected]
    assert dequantise(blocks, torch.full((1, 1), 125, dtype=torch.uint8)).tolist() == [[v / 4 for v in expected]]


def test_dequantisation_equals_that_of_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = packed(3, 8, 2)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(dequantise(blocks.view(-1, 2, 16), scales.view(-1, 2)).view(3, 8, 64), expected.transpose(1, 2))


@pytest.mark.parametrize("scales_first", [False, True])
def test_halves_are_joined_whichever_comes_first(scales_first: bool) -> None:
    blocks, scales = packed(3, 8, 2)
    halves = [stored("experts.down_blocks", blocks), stored("experts.down_scales", scales)]
    other = stored("norm", torch.ones(4))
    joined = list(join_mxfp4([*(reversed(halves) if scales_first else halves), other]))
    assert [t.name for t in joined] == ["experts.down_blocks", "norm"]
    assert (joined[0].shape, joined[0].nbytes) == ((3, 8, 64), blocks.nbytes + scales.nbytes)
    out = torch.empty(3, 8, 64)
    joined[0].copy_into(out)
    assert torch.equal(out.view(24, 64), dequantise(blocks.view(-1, 2, 16), scales.view(-1, 2)))


def test_what_does_not_fit_is_named() -> None:
    blocks, scales = packed(3, 8, 2)
    with pytest.raises(CheckpointError, match=r"a_scales.*a_blocks is missing"):
        list(join_mxfp4([stored("a_scales", scales)]))
    with pytest.raises(CheckpointError, match=r"a_blocks has the shape \[3, 8, 2, 16\] and its scales \[3, 8\]"):
        list(join_mxfp4([stored("a_blocks", blocks), stored("a_scales", scales[..., 0])]))
    with pytest.raises(CheckpointError, match="no number"):
        list(join_mxfp4([stored("a_blocks", blocks), stored("a_scales", torch.full_like(scales, 255))]))
