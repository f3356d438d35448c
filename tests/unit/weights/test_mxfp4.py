"""MXFP4: numbers equal those of transformers' own dequantisation, halves are joined in any order, and what does not fit is named."""

from __future__ import annotations

import pytest
import torch

from octavo.errors import CheckpointError
from octavo.ops.coded import dequantize
from octavo.weights.mxfp4 import whole_experts
from octavo.weights.stored import StoredTensor

CPU = torch.device("cpu")
NAME = "layers.0.mlp.experts.down_proj"


def stored(name: str, tensor: torch.Tensor) -> StoredTensor:
    return StoredTensor(
        name, tuple(tensor.shape), tensor.nbytes, "file", lambda out: out.copy_(tensor), raw=lambda device: tensor, dtype=tensor.dtype
    )


def packed(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)


def numbers(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[experts, outputs, inputs], as a parameter gets them."""
    (joined,) = whole_experts([stored(NAME + "_blocks", blocks), stored(NAME + "_scales", scales)], CPU)
    out = torch.empty(joined.shape)
    joined.copy_into(out)
    assert joined.coded is not None
    assert torch.equal(dequantize(joined.coded()), out)
    return out.view(*blocks.shape[:2], -1)


def test_numbers_of_the_format() -> None:
    """E2M1 with an exponent of 127, that is one: by the tables of the specification."""
    codes = torch.arange(32, dtype=torch.uint8) % 16
    blocks = (codes[0::2] | codes[1::2] << 4).view(1, 1, 1, 16)
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = [*positive, *(-v for v in positive)] * 2
    assert numbers(blocks, torch.full((1, 1, 1), 127, dtype=torch.uint8)).flatten().tolist() == expected
    assert numbers(blocks, torch.full((1, 1, 1), 125, dtype=torch.uint8)).flatten().tolist() == [v / 4 for v in expected]


def test_dequantisation_equals_that_of_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = packed(3, 8, 2)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(numbers(blocks, scales), expected.transpose(1, 2))


@pytest.mark.parametrize("scales_first", [False, True])
def test_halves_are_joined_whichever_comes_first(scales_first: bool) -> None:
    blocks, scales = packed(3, 8, 2)
    halves = [stored(NAME + "_blocks", blocks), stored(NAME + "_scales", scales)]
    other = stored("norm", torch.ones(4))
    joined = list(whole_experts([*(reversed(halves) if scales_first else halves), other], CPU))
    assert [t.name for t in joined] == [NAME, "norm"]
    assert (joined[0].shape, joined[0].nbytes) == ((24, 64), blocks.nbytes + scales.nbytes)


def test_what_does_not_fit_is_named() -> None:
    blocks, scales = packed(3, 8, 2)
    with pytest.raises(CheckpointError, match=r"down_proj_scales is there without .*down_proj_blocks"):
        list(whole_experts([stored(NAME + "_scales", scales)], CPU))
    with pytest.raises(CheckpointError, match=r"down_proj_blocks has the shape \[3, 8, 2, 16\] and .* \[3, 8\]"):
        list(whole_experts([stored(NAME + "_blocks", blocks), stored(NAME + "_scales", scales[..., 0])], CPU))
    with pytest.raises(CheckpointError, match="not a number"):
        list(whole_experts([stored(NAME + "_blocks", blocks), stored(NAME + "_scales", torch.full_like(scales, 255))], CPU))
