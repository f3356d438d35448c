"""Copies rows' paged keys and values into contiguous lines, which the tensor memory accelerator can stream.

Worth it where many queries read each key: a long chunk reads its prefix once here and then count / tile times at full speed.
"""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

Int32 = npt.NDArray[np.int32]

LINE_ALIGNMENT = 128
"""Rows start at multiples of this many tokens, and are padded with zeros up to it: no tile reaches beyond."""


@dataclass(frozen=True)
class GatherPlan:
    chunks: Int32
    """[chunks, 4]: row, first position, context, line to write to; each LINE_ALIGNMENT tokens."""
    starts: Int32
    """[rows] the line of each row's position 0."""
    tokens: int
    """Lines needed."""

    def tables(self) -> Int32:
        """[rows, most blocks of a row] the block tables of `GatheredCache.pages`. What lies past a row's last block is not to be read."""
        first, ends = self.starts // LINE_ALIGNMENT, np.append(self.starts[1:], self.tokens) // LINE_ALIGNMENT
        return np.add.outer(first, np.arange((ends - first).max(initial=0), dtype=np.int32))


def plan_gather(context_lens: Int32) -> GatherPlan:
    """Where each row goes. context_lens: [rows]."""
    pieces = -(-context_lens.astype(np.int64) // LINE_ALIGNMENT)
    ends = np.cumsum(pieces)
    row = np.repeat(np.arange(len(pieces)), pieces)
    line = np.arange(len(row)) * LINE_ALIGNMENT
    starts = (ends - pieces) * LINE_ALIGNMENT
    chunks = np.stack((row, line - starts[row], context_lens[row], line), axis=1).astype(np.int32)
    return GatherPlan(chunks=chunks, starts=starts.astype(np.int32), tokens=len(row) * LINE_ALIGNMENT)


@dataclass(frozen=True)
class GatheredCache:
    """Scratch for one layer at a time: [kv_heads, tokens, head_dim] each, in the queries' dtype."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(cls, num_kv_heads: int, max_tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> GatheredCache:
        tokens = -(-max_tokens // LINE_ALIGNMENT) * LINE_ALIGNMENT
        keys, values = torch.empty(2, num_kv_heads, tokens, head_dim, dtype=dtype, device=device)
        return cls(keys, values)

    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as a cache: [tokens / LINE_ALIGNMENT, kv_heads, LINE_ALIGNMENT, head_dim]."""
        heads, _, head_dim = self.keys.shape
        keys, values = (x.view(heads, -1, LINE_ALIGNMENT, head_dim).transpose(0, 1) for x in (self.keys, self.values))
        return keys, values


@triton.jit(do_not_specialize=["table_stride"])
def _gather_kernel(
    k_ptr,
    v_ptr,
    table_ptr,
    chunks_ptr,
    k_out_ptr,
    v_out_ptr,
    k_scale_ptr,
    v_scale_ptr,
    gathered_tokens,
    block_stride,
    head_stride,
    table_stride,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
):
    kv_head = tl.program_id(0)
    chunk = chunks_ptr + tl.program_id(1) * 4
    row = tl.load(chunk).to(tl.int64)
    lo = tl.load(chunk + 1)
    context = tl.load(chunk + 2)
    target = tl.load(chunk + 3)
    n = tl.arange(0, TILE)
    d = tl.arange(0, DIM_PAD)
    pos = lo + n
    live = pos < context
    block = tl.load(table_ptr + row * table_stride + pos // BLOCK, mask=live, other=0).to(tl.int64)
    offsets = (block * block_stride + kv_head * head_stride + (pos % BLOCK) * HEAD_DIM)[:, None] + d[None, :]
    in_head = d[None, :] < HEAD_DIM
    mask = live[:, None] & in_head
    k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
    v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
    if SCALE_STRIDE >= 0:
        k = k.to(tl.float32) * tl.load(k_scale_ptr + kv_head * SCALE_STRIDE)
        v = v.to(tl.float32) * tl.load(v_scale_ptr + kv_head * SCALE_STRIDE)
    lines = (kv_head.to(tl.int64) * gathered_tokens + target + n) * HEAD_DIM
    # Zeros past the context: a masked probability of 0 times whatever lay here must not be NaN.
    tl.store(k_out_ptr + lines[:, None] + d[None, :], k.to(k_out_ptr.dtype.element_ty), mask=in_head)
    tl.store(v_out_ptr + lines[:, None] + d[None, :], v.to(v_out_ptr.dtype.element_ty), mask=in_head)


def gather_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    chunks: torch.Tensor,
    gathered: GatheredCache,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Fill `gathered` with the rows of a plan. float8 caches are widened, and scaled where scales are given.

    Args:
        key_cache, value_cache: [blocks, kv_heads, block_size, head_dim], same strides, each head's block contiguous.
        block_tables: [rows, max_blocks] int32.
        chunks: `GatherPlan.chunks` on the device; the plan's tokens must fit `gathered`.
        k_scale, v_scale: float32, [1] or [kv_heads]: both or neither.
    """
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    if chunks.shape[0] == 0:
        return
    has_scale = k_scale is not None and v_scale is not None
    _gather_kernel[(num_kv_heads, chunks.shape[0])](
        key_cache,
        value_cache,
        block_tables,
        chunks,
        gathered.keys,
        gathered.values,
        k_scale if has_scale else chunks,
        v_scale if has_scale else chunks,
        gathered.keys.shape[1],
        key_cache.stride(0),
        key_cache.stride(1),
        block_tables.stride(0),
        HEAD_DIM=head_dim,
        DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK=block_size,
        TILE=LINE_ALIGNMENT,
        SCALE_STRIDE=-1 if k_scale is None or not has_scale else int(k_scale.numel() > 1),
        num_warps=8,
    )
