"""Copies of cache blocks against torch's."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.triton.copy_blocks import copy_blocks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(3, 2, 9, 2, 16, 64), (1, 2, 6, 5, 4, 36), (2, 2, 5, 8, 16, 128)])
@pytest.mark.parametrize(
    ("source", "destination"), [([2], [4]), ([1, 1, 3], [4, 2, 0]), ([1, 2, 4], [2, 1, 0]), ([0, 0], [0, 0]), ([], [])]
)
def test_blocks_of_all_layers(
    shape: tuple[int, ...], dtype: torch.dtype, source: list[int], destination: list[int], device: torch.device
) -> None:
    cache = torch.randn(shape, device=device).to(dtype)
    src, dst = torch.tensor(source, device=device).long(), torch.tensor(destination, device=device).long()
    expected = cache.view(torch.uint8).clone()
    expected[:, :, dst] = expected[:, :, src]
    copy_blocks(cache, src, dst)
    assert torch.equal(cache.view(torch.uint8), expected)
