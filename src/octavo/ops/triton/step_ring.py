"""A captured step's way in and out: the first and the last launch of it. No copy engine, no waiting for one.

The host fills a line of a ring of pinned memory and launches; the first kernel reads the line over the bus, and the last one
writes the sampled tokens into a line of another ring. Which line is a counter on the device, which the last kernel moves on: so
a replayed graph, whose addresses are fixed, finds the next line each time, and the host counts along.
"""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

_NUMBERS = 512
"""A thread block of the first launch reads so many."""
_DIFFS = 128


@triton.jit
def _receive_kernel(
    ring_ptr,
    turn_ptr,
    received_ptr,
    blocks_ptr,
    line_size,
    size,
    num_diffs_at,
    diffs_at,
    capacity,
    blocks_stride,
    COPIES: tl.constexpr,
    NUMBERS: tl.constexpr,
    DIFFS: tl.constexpr,
):
    program = tl.program_id(0)
    line = ring_ptr + tl.load(turn_ptr).to(tl.int64) * line_size
    if program < COPIES:
        i = program * NUMBERS + tl.arange(0, NUMBERS)
        # Host memory changes behind the caches' back: never served from one.
        tl.store(received_ptr + i, tl.load(line + i, mask=i < size, other=0, cache_modifier=".cv"), mask=i < size)
    else:
        d = (program - COPIES) * DIFFS + tl.arange(0, DIFFS)
        mask = d < tl.load(line + num_diffs_at, cache_modifier=".cv")
        slot = tl.load(line + diffs_at + d, mask=mask, other=0, cache_modifier=".cv").to(tl.int64)
        index = tl.load(line + diffs_at + capacity + d, mask=mask, other=0, cache_modifier=".cv")
        block = tl.load(line + diffs_at + 2 * capacity + d, mask=mask, other=0, cache_modifier=".cv")
        tl.store(blocks_ptr + slot * blocks_stride + index, block, mask=mask)


def receive(
    ring: torch.Tensor,
    turn: torch.Tensor,
    received: torch.Tensor,
    size: int,
    block_table: torch.Tensor,
    *,
    num_diffs_at: int,
    diffs_at: int,
    capacity: int,
) -> None:
    """received[:size] = ring[turn, :size], and block_table[slot, index] = block for the diffs in that line.

    Args:
        ring: [lines, line_size] int32, pinned where there is a device.
        turn: [1] int32 on the device.
        received: [at least size] int32 on the device.
        block_table: [slots, max_blocks] int32.
        num_diffs_at: where in a line the number of diffs stands.
        diffs_at, capacity: where their slots, then indices, then blocks stand, room for `capacity` of each.
    """
    copies = triton.cdiv(size, _NUMBERS)
    _receive_kernel[(copies + triton.cdiv(capacity, _DIFFS),)](
        ring,
        turn,
        received,
        block_table,
        ring.stride(0),
        size,
        num_diffs_at,
        diffs_at,
        capacity,
        block_table.stride(0),
        COPIES=copies,
        NUMBERS=_NUMBERS,
        DIFFS=_DIFFS,
        num_warps=4,
    )


@triton.jit
def _publish_kernel(tokens_ptr, count_ptr, ring_ptr, turn_ptr, line_size, rows, lines, AT_ONCE: tl.constexpr):
    turn = tl.load(turn_ptr)
    count = tl.load(count_ptr)
    line = ring_ptr + turn.to(tl.int64) * line_size
    for first in range(0, rows, AT_ONCE):
        row = first + tl.arange(0, AT_ONCE)
        tl.store(line + row, tl.load(tokens_ptr + row, mask=row < count, other=0), mask=row < count)
    tl.debug_barrier()
    tl.store(turn_ptr, (turn + 1) % lines)


def publish(tokens: torch.Tensor, count: torch.Tensor, ring: torch.Tensor, turn: torch.Tensor) -> None:
    """ring[turn, :count] = tokens[:count], then turn moves on.

    Args:
        tokens: [rows] int32.
        count: [1] int32, at most rows.
        ring: [lines, at least rows] int32, pinned where there is a device.
        turn: [1] int32.
    """
    rows = len(tokens)
    _publish_kernel[(1,)](
        tokens,
        count,
        ring,
        turn,
        ring.stride(0),
        rows,
        ring.shape[0],
        AT_ONCE=min(1024, triton.next_power_of_2(rows)),
        num_warps=4,
    )
