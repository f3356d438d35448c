"""Copies of whole cache blocks, of all layers in one launch.

torch divides an index into a tensor of more than 2^31 numbers into a launch a layer or so, and copies twice.
"""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

_BYTES = 8192
"""Of a thread block."""


@triton.jit
def _copy_kernel(cache_ptr, source_ptr, destination_ptr, layer_stride, SIZE: tl.constexpr, BYTES: tl.constexpr):
    copy = tl.program_id(2)
    source = tl.load(source_ptr + copy)
    destination = tl.load(destination_ptr + copy)
    i = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    layer = cache_ptr + tl.program_id(1).to(tl.int64) * layer_stride
    x = tl.load(layer + source * SIZE + i, mask=i < SIZE)
    tl.store(layer + destination * SIZE + i, x, mask=i < SIZE)


def copy_blocks(cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """cache[:, :, destination] = cache[:, :, source]

    Args:
        cache: [layers, 2, blocks, ...], contiguous.
        source, destination: [copies] int64; no block is both, but for copies of one onto itself.
    """
    raw = cache.view(torch.uint8).view(cache.shape[0] * 2, cache.shape[2], -1)
    size = raw.shape[2]
    if len(source):
        _copy_kernel[(triton.cdiv(size, _BYTES), len(raw), len(source))](
            raw, source, destination, raw.stride(0), SIZE=size, BYTES=_BYTES, num_warps=4
        )
