"""A decode step's inputs from the slot tables, in one launch, into buffers of fixed size and address.

What a captured graph of `padded` rows reads: rows past the real ones get token 0 at position 0, the null block's slot 0 and
context length 0, so that they compute something harmless and store it where nobody looks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_ENTRIES = 512
"""Block-table entries a thread block copies."""


@dataclass(frozen=True)
class DecodeInputs:
    """Fixed buffers of a graph for `rows` rows."""

    token_ids: torch.Tensor
    """[rows] int64"""
    positions: torch.Tensor
    """[rows] int64"""
    cache_slots: torch.Tensor
    """[rows] int64"""
    context_lens: torch.Tensor
    """[rows] int32"""
    block_tables: torch.Tensor
    """[rows, max_blocks] int32"""

    @classmethod
    def allocate(cls, rows: int, max_blocks: int, device: torch.device) -> DecodeInputs:
        return cls(
            token_ids=torch.zeros(rows, dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            cache_slots=torch.zeros(rows, dtype=torch.int64, device=device),
            context_lens=torch.zeros(rows, dtype=torch.int32, device=device),
            block_tables=torch.zeros(rows, max_blocks, dtype=torch.int32, device=device),
        )


@triton.jit
def _gather_inputs_kernel(
    slots_ptr,
    starts_ptr,
    num_rows_ptr,
    tokens_ptr,
    blocks_ptr,
    token_ids_ptr,
    positions_ptr,
    cache_slots_ptr,
    context_lens_ptr,
    tables_ptr,
    tokens_stride,
    blocks_stride,
    tables_stride,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    row = tl.program_id(0)
    real = row < tl.load(num_rows_ptr)
    slot = tl.load(slots_ptr + row, mask=real, other=0).to(tl.int64)
    start = tl.load(starts_ptr + row, mask=real, other=0)
    used = tl.where(real, start // BLOCK + 1, 0)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    # Attention reads no entry past the context, so none is written: only what is used travels.
    entries = tl.load(blocks_ptr + slot * blocks_stride + entry, mask=entry < used, other=0)
    tl.store(tables_ptr + row.to(tl.int64) * tables_stride + entry, entries, mask=entry < used)
    if tl.program_id(1) == 0:
        token = tl.load(tokens_ptr + slot * tokens_stride + start, mask=real, other=0)
        block = tl.load(blocks_ptr + slot * blocks_stride + start // BLOCK, mask=real, other=0).to(tl.int64)
        tl.store(token_ids_ptr + row, token.to(tl.int64))
        tl.store(positions_ptr + row, start.to(tl.int64))
        tl.store(cache_slots_ptr + row, tl.where(real, block * BLOCK + start % BLOCK, 0))
        tl.store(context_lens_ptr + row, tl.where(real, start + 1, 0))


def gather_decode_inputs(
    slots: torch.Tensor,
    starts: torch.Tensor,
    num_rows: torch.Tensor,
    token_table: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    max_context: int,
    inputs: DecodeInputs,
) -> None:
    """Fill `inputs` for rows that each compute one token.

    Args:
        slots, starts: [rows] int32, the slot and the position of each row's token; entries past num_rows are not read.
        num_rows: [1] int32 on the device: how many rows are real.
        token_table: [slots, max_len] int32.
        block_table: [slots, max_blocks] int32.
        max_context: no row's context is longer: bounds the block-table entries that are looked at.
    """
    rows = inputs.token_ids.shape[0]
    _gather_inputs_kernel[(rows, triton.cdiv(triton.cdiv(max_context, block_size), _ENTRIES))](
        slots,
        starts,
        num_rows,
        token_table,
        block_table,
        inputs.token_ids,
        inputs.positions,
        inputs.cache_slots,
        inputs.context_lens,
        inputs.block_tables,
        token_table.stride(0),
        block_table.stride(0),
        inputs.block_tables.stride(0),
        BLOCK=block_size,
        ENTRIES=_ENTRIES,
        num_warps=4,
    )
