"""Writes a step's block-table diffs, in one launch whose number of diffs is data: a captured graph replays it."""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

_DIFFS_AT_ONCE = 128


@triton.jit
def _write_diffs_kernel(diffs_ptr, count_ptr, blocks_ptr, blocks_stride, capacity, AT_ONCE: tl.constexpr):
    i = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    mask = i < tl.load(count_ptr)
    slot = tl.load(diffs_ptr + i, mask=mask, other=0).to(tl.int64)
    index = tl.load(diffs_ptr + capacity + i, mask=mask, other=0)
    block = tl.load(diffs_ptr + 2 * capacity + i, mask=mask, other=0)
    tl.store(blocks_ptr + slot * blocks_stride + index, block, mask=mask)


def write_block_table_diffs(diffs: torch.Tensor, count: torch.Tensor, block_table: torch.Tensor) -> None:
    """block_table[slot, index] = block for the first `count` diffs.

    Args:
        diffs: [3, capacity] int32: slots, indices, blocks.
        count: [1] int32.
        block_table: [slots, max_blocks] int32.
    """
    capacity = diffs.shape[1]
    _write_diffs_kernel[(triton.cdiv(capacity, _DIFFS_AT_ONCE),)](
        diffs, count, block_table, block_table.stride(0), capacity, AT_ONCE=_DIFFS_AT_ONCE, num_warps=4
    )
