"""Copies of whole cache blocks, of all layers in two launches: to scratch memory and from there, so that a block may be both.

torch divides an index into a tensor of more than 2^31 numbers into some launches a layer.
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
def _copy_kernel(cache_ptr, places_ptr, scratch_ptr, layer_stride, SIZE: tl.constexpr, BYTES: tl.constexpr, FROM_CACHE: tl.constexpr):
    copy = tl.program_id(2)
    layer = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    in_cache = cache_ptr + layer * layer_stride + tl.load(places_ptr + copy) * SIZE + i
    in_scratch = scratch_ptr + (layer * tl.num_programs(2) + copy) * SIZE + i
    if FROM_CACHE:
        tl.store(in_scratch, tl.load(in_cache, mask=i < SIZE), mask=i < SIZE)
    else:
        tl.store(in_cache, tl.load(in_scratch, mask=i < SIZE), mask=i < SIZE)


def copy_blocks(cache: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """cache[:, :, destination] = cache[:, :, source]

    Args:
        cache: [layers, 2, blocks, ...], contiguous.
        source, destination: [copies] int64.
    """
    raw = cache.view(torch.uint8).view(cache.shape[0] * 2, cache.shape[2], -1)
    size = raw.shape[2]
    if not len(source):
        return
    scratch = torch.empty(len(raw), len(source), size, dtype=torch.uint8, device=cache.device)
    grid = (triton.cdiv(size, _BYTES), len(raw), len(source))
    for places, from_cache in ((source, True), (destination, False)):
        _copy_kernel[grid](raw, places, scratch, raw.stride(0), SIZE=size, BYTES=_BYTES, FROM_CACHE=from_cache, num_warps=4)
