"""A captured step's inputs from the slot tables, in one launch, into buffers of fixed size and address.

Rows and tokens past the real ones get token 0 at position 0 and the null block's slot 0, so that they compute something harmless
and store it where nobody looks.
"""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_ENTRIES = 1024
"""Block-table entries a thread block copies at once."""
_TOKENS = 128
"""Tokens a thread block looks up."""


@dataclass(frozen=True)
class StepInputs:
    """Fixed buffers of a graph."""

    token_ids: torch.Tensor
    """[tokens] int64"""
    positions: torch.Tensor
    """[tokens] int64"""
    cache_slots: tuple[torch.Tensor, ...]
    """Of each kind of cache, [tokens] int64"""
    block_tables: tuple[torch.Tensor, ...]
    """Of each kind of cache, [rows, max_blocks] int32"""

    @classmethod
    def allocate(cls, rows: int, tokens: int, max_blocks: int, device: torch.device, *, kinds: int = 1) -> StepInputs:
        return cls(
            token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(tokens, dtype=torch.int64, device=device),
            cache_slots=tuple(torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(kinds)),
            block_tables=tuple(torch.zeros(rows, max_blocks, dtype=torch.int32, device=device) for _ in range(kinds)),
        )

    def part(self, rows: int, tokens: int) -> StepInputs:
        """The beginnings of the same buffers."""
        cache_slots, block_tables = tuple(t[:tokens] for t in self.cache_slots), tuple(t[:rows] for t in self.block_tables)
        return StepInputs(self.token_ids[:tokens], self.positions[:tokens], cache_slots, block_tables)


@triton.jit
def _gather_inputs_kernel(
    slots_ptr,
    contexts_ptr,
    num_rows_ptr,
    row_of_token_ptr,
    offsets_ptr,
    num_tokens_ptr,
    tokens_ptr,
    blocks_ptr,
    token_ids_ptr,
    positions_ptr,
    cache_slots_ptr,
    tables_ptr,
    sliding_blocks_ptr,
    sliding_slots_ptr,
    sliding_tables_ptr,
    tokens_stride,
    blocks_stride,
    tables_stride,
    tokens,
    CHUNKS: tl.constexpr,
    SLIDING: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0)
    num_rows = tl.load(num_rows_ptr)
    if row < num_rows:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        # Attention reads no entry past the context, so none is written: only what is used travels.
        used = (tl.load(contexts_ptr + row) + BLOCK - 1) // BLOCK
        for first in range(0, used, ENTRIES):
            entry = first + tl.arange(0, ENTRIES)
            entries = tl.load(blocks_ptr + slot * blocks_stride + entry, mask=entry < used, other=0)
            tl.store(tables_ptr + row.to(tl.int64) * tables_stride + entry, entries, mask=entry < used)
            if SLIDING:
                entries = tl.load(sliding_blocks_ptr + slot * blocks_stride + entry, mask=entry < used, other=0)
                tl.store(sliding_tables_ptr + row.to(tl.int64) * tables_stride + entry, entries, mask=entry < used)
    if row * TOKENS < tokens:
        t = row * TOKENS + tl.arange(0, TOKENS)
        mask = t < tokens
        if CHUNKS:
            live = t < tl.load(num_tokens_ptr)
            its_row = tl.load(row_of_token_ptr + t, mask=live, other=0)
            position = t + tl.load(offsets_ptr + its_row, mask=live, other=0)
        else:
            live = t < num_rows
            its_row = t
            position = tl.load(contexts_ptr + t, mask=live, other=0) - 1
        position = tl.where(live, position, 0)
        its_slot = tl.load(slots_ptr + its_row, mask=live, other=0).to(tl.int64)
        token = tl.load(tokens_ptr + its_slot * tokens_stride + position, mask=live, other=0)
        block = tl.load(blocks_ptr + its_slot * blocks_stride + position // BLOCK, mask=live, other=0).to(tl.int64)
        tl.store(token_ids_ptr + t, token.to(tl.int64), mask=mask)
        tl.store(positions_ptr + t, position.to(tl.int64), mask=mask)
        tl.store(cache_slots_ptr + t, tl.where(live, block * BLOCK + position % BLOCK, 0), mask=mask)
        if SLIDING:
            block = tl.load(sliding_blocks_ptr + its_slot * blocks_stride + position // BLOCK, mask=live, other=0).to(tl.int64)
            tl.store(sliding_slots_ptr + t, tl.where(live, block * BLOCK + position % BLOCK, 0), mask=mask)


def gather_step_inputs(
    slots: torch.Tensor,
    contexts: torch.Tensor,
    num_rows: torch.Tensor,
    token_table: torch.Tensor,
    block_tables: Sequence[torch.Tensor],
    block_size: int,
    inputs: StepInputs,
    *,
    row_of_token: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
) -> None:
    """Fill `inputs` for rows that each compute the last token of their context, or any number of its last tokens.

    Args:
        slots, contexts: [rows] int32, the slot of each row, and its tokens including those of this step; not read past num_rows.
        num_rows: [1] int32 on the device: how many rows are real.
        token_table: [slots, max_len] int32.
        block_tables: of each kind of cache, at most two, [slots, max_blocks] int32; of the same strides.
        row_of_token: [tokens] int32; not read past num_tokens. None: token i is that of row i.
        offsets: [rows] int32: what to add to a token's place in the step for its position. With `row_of_token`.
        num_tokens: [1] int32 on the device. With `row_of_token`.
    """
    rows, tokens = len(inputs.block_tables[0]), len(inputs.token_ids)
    chunks = row_of_token is not None
    first, last = 0, len(block_tables) - 1  # the same where there is one kind
    _gather_inputs_kernel[(max(rows, triton.cdiv(tokens, _TOKENS)),)](
        slots,
        contexts,
        num_rows,
        row_of_token if chunks else slots,
        offsets if chunks else slots,
        num_tokens if chunks else num_rows,
        token_table,
        block_tables[first],
        inputs.token_ids,
        inputs.positions,
        inputs.cache_slots[first],
        inputs.block_tables[first],
        block_tables[last],
        inputs.cache_slots[last],
        inputs.block_tables[last],
        token_table.stride(0),
        block_tables[first].stride(0),
        inputs.block_tables[first].stride(0),
        tokens,
        CHUNKS=chunks,
        SLIDING=last > 0,
        BLOCK=block_size,
        ENTRIES=_ENTRIES,
        TOKENS=_TOKENS,
        num_warps=4,
    )
