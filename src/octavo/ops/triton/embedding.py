"""Rows of a part of an embedding table, zeros for tokens of the other parts: one launch instead of seven."""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.ops.triton.turns import overlap, take_turn

_BLOCK = 1024


@triton.jit
def _embedding_part_kernel(ids_ptr, table_ptr, out_ptr, first, rows, DIM: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    take_turn(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token) - first
    columns_here = tl.where((row >= 0) & (row < rows), DIM, 0)
    found = tl.load(table_ptr + row * DIM + d, mask=d < columns_here, other=0.0)
    tl.store(out_ptr + token * DIM + d, found, mask=d < DIM)


def embedding_part(token_ids: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
    """See `ops.registry.EmbeddingPart`."""
    tokens, (rows, dim) = len(token_ids), table.shape
    out = torch.empty(tokens, dim, dtype=table.dtype, device=table.device)
    if tokens:
        turn = overlap(tokens, table.device)
        _embedding_part_kernel[(tokens, triton.cdiv(dim, _BLOCK))](
            token_ids,
            table,
            out,
            first,
            rows,
            DIM=dim,
            BLOCK=_BLOCK,
            OVERLAP=turn,
            **({"launch_pdl": True} if turn else {}),
            num_warps=4,
        )
    return out
