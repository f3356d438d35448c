"""Attention whose bits depend on a query's own sequence and position alone: one kernel for decodes and prompt chunks.

The batch, the chunk that a token was computed in, graphs, and how the work was cut do not matter, because
* every query is computed by the same instructions: one tile shape, one loop body, explicit fused multiply-adds;
* keys come in tiles and *segments* that begin at fixed positions. Each segment has a softmax of its own, and segments are folded
  into the result from the first to the last: in one thread block as it goes along, or, where segments of one query were spread
  over several, by the last of these, from the workspace, with the same operations;
* a key that a query must not see adds an exact zero, so neither later keys of a tile nor padding change anything.

Cache layout and float8 scales: as in `paged_decode`. Softmax in base 2 (FlashAttention-2, Dao 2023).
"""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton.invariant_plan import SEGMENT, WORKSPACE_ROWS
from octavo.ops.triton.split_softmax import arrived_last

_LOG2_E = 1.4426950408889634
_ROWS = 64
"""Queries x heads of a KV head in a tile: the fewest that Hopper's matrix instruction takes, for every number of queries."""
_TILE = 64


def tile_rows(group: int) -> int:
    """Queries x query heads of a KV head that a tile holds."""
    rows: int = triton.next_power_of_2(group)
    return max(_ROWS, rows)


@dataclass(frozen=True)
class InvariantWorkspace:
    """What cut tiles leave for each segment; one in use a stream at a time, shared by steps and graphs of any size."""

    sums: torch.Tensor
    """[WORKSPACE_ROWS, kv_heads, head_dim] float32, head_dim padded to a power of two."""
    stats: torch.Tensor
    """[WORKSPACE_ROWS, kv_heads, 2] float32: maximum and denominator."""
    counters: torch.Tensor
    """[WORKSPACE_ROWS, kv_heads] int32: items of a tile that have finished. Zero between launches."""

    @classmethod
    def allocate(cls, num_kv_heads: int, head_dim: int, device: torch.device) -> InvariantWorkspace:
        rows = WORKSPACE_ROWS
        return cls(
            sums=torch.empty(rows, num_kv_heads, triton.next_power_of_2(head_dim), dtype=torch.float32, device=device),
            stats=torch.empty(rows, num_kv_heads, 2, dtype=torch.float32, device=device),
            counters=torch.zeros(rows, num_kv_heads, dtype=torch.int32, device=device),
        )


@triton.jit
def _fold(total, total_max, total_sum, acc, acc_max, acc_sum):
    """Take one segment's sums, maxima and denominators into those of all segments before it."""
    new_max = tl.maximum(total_max, acc_max)
    fade = tl.exp2(total_max - new_max)
    weight = tl.exp2(acc_max - new_max)
    return tl.fma(total, fade[:, None], acc * weight[:, None]), new_max, tl.fma(total_sum, fade, acc_sum * weight)


@triton.jit(do_not_specialize=["table_stride"])
def _invariant_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    items_ptr,
    out_ptr,
    sums_ptr,
    stats_ptr,
    counters_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_stride,
    out_stride,
    block_stride,
    head_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    FIELDS: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    fields = items_ptr + tl.program_id(1) * FIELDS
    hi = tl.load(fields + 5)
    if hi == 0:
        return
    row = tl.load(fields).to(tl.int64)
    token = tl.load(fields + 1).to(tl.int64)
    position = tl.load(fields + 2)
    count = tl.load(fields + 3)
    lo = tl.load(fields + 4)
    part = tl.load(fields + 6)
    first_part = tl.load(fields + 7)
    num_items = tl.load(fields + 8)
    counter = tl.load(fields + 9)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()

    v_scale = 1.0
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PAD)
    n = tl.arange(0, TILE)
    in_head = d[None, :] < HEAD_DIM
    query = r // GROUP
    used = query < count
    head_offset = (kv_head * GROUP + r % GROUP) * HEAD_DIM
    q = tl.load(q_ptr + ((token + query) * q_stride + head_offset)[:, None] + d[None, :], mask=used[:, None] & in_head, other=0.0)
    if SCALE_STRIDE >= 0:
        scale *= tl.load(k_scale_ptr + kv_head * SCALE_STRIDE)
        v_scale = tl.load(v_scale_ptr + kv_head * SCALE_STRIDE)
        # float8 becomes float16 exactly and in one instruction; bf16 would take three.
        q = q.to(tl.float16)
    query_pos = position + tl.minimum(query, count - 1)  # padding rows repeat the last query and are not stored
    table = table_ptr + row * table_stride
    kv_offset = kv_head * head_stride

    total = tl.zeros([ROWS, DIM_PAD], tl.float32)
    total_max = tl.full([ROWS], -1.0e30, tl.float32)
    total_sum = tl.zeros([ROWS], tl.float32)
    place = (part + r).to(tl.int64) * KV_HEADS + kv_head
    for segment in range(lo, hi, SEGMENT):
        end = tl.minimum(segment + SEGMENT, hi)
        acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
        row_max = tl.full([ROWS], -1.0e30, tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        for t in tl.range(segment, end, TILE, num_stages=STAGES):
            pos = t + n
            live = pos < end
            block = tl.load(table + pos // BLOCK, mask=live, other=0).to(tl.int64)
            offsets = (block * block_stride + kv_offset + (pos % BLOCK) * HEAD_DIM)[:, None] + d[None, :]
            mask = live[:, None] & in_head
            k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
            scores = tl.dot(q, tl.trans(k.to(q.dtype)))
            unit = scale
            if SOFT_CAP > 0.0:
                # cap * tanh(x / cap), tanh(y) = 1 - 2 / (1 + e^2y); scores are in base 2 only after this.
                grown = tl.exp2(scores * (scale * (2.0 * 1.4426950408889634 / SOFT_CAP)))
                scores = SOFT_CAP - 2.0 * SOFT_CAP / (1.0 + grown)
                unit = 1.4426950408889634
            seen = pos[None, :] <= query_pos[:, None]
            if WINDOW > 0:
                seen = seen & (pos[None, :] > query_pos[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1) * unit)
            fade = tl.exp2(row_max - new_max)
            p = tl.exp2(tl.fma(scores, unit, -new_max[:, None]))
            row_sum = tl.fma(row_sum, fade, tl.sum(p, 1))
            # Past the context, and in the null block, anything may lie, NaN included: it is not read.
            v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
            acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * fade[:, None])
            row_max = new_max
        left = query < tl.where(part < 0, 0, count)
        tl.store(sums_ptr + place[:, None] * DIM_PAD + d[None, :], acc, mask=left[:, None])
        tl.store(stats_ptr + place * 2, row_max, mask=left)
        tl.store(stats_ptr + place * 2 + 1, row_sum, mask=left)
        place += count * GROUP * KV_HEADS
        total, total_max, total_sum = _fold(total, total_max, total_sum, acc, row_max, row_sum)

    out_offsets = ((token + query) * out_stride + head_offset)[:, None] + d[None, :]
    if part < 0:
        result = total * (v_scale / total_sum)[:, None]
        tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=used[:, None] & in_head)
    elif arrived_last(counters_ptr + counter * KV_HEADS + kv_head, num_items):
        tile_rows = count * GROUP
        tile_lo = lo - (part - first_part) // tile_rows * SEGMENT
        total = tl.zeros([ROWS, DIM_PAD], tl.float32)
        total_max = tl.full([ROWS], -1.0e30, tl.float32)
        total_sum = tl.zeros([ROWS], tl.float32)
        place = (first_part + r).to(tl.int64) * KV_HEADS + kv_head
        for _segment in range(tile_lo, position + count, SEGMENT):
            # .cg: other SMs wrote these, so this SM's L1 may not answer.
            acc = tl.load(sums_ptr + place[:, None] * DIM_PAD + d[None, :], mask=used[:, None], other=0.0, cache_modifier=".cg")
            row_max = tl.load(stats_ptr + place * 2, mask=used, other=-1.0e30, cache_modifier=".cg")
            row_sum = tl.load(stats_ptr + place * 2 + 1, mask=used, other=1.0, cache_modifier=".cg")
            place += tile_rows * KV_HEADS
            total, total_max, total_sum = _fold(total, total_max, total_sum, acc, row_max, row_sum)
        result = total * (v_scale / total_sum)[:, None]
        tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=used[:, None] & in_head)


def invariant_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    items: torch.Tensor,
    workspace: InvariantWorkspace,
    out: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Causal attention of the queries in `items` over their rows' cached contexts, their own keys included.

    Args:
        q: [tokens, heads, head_dim]; a stride between tokens is fine (a slice of fused qkv).
        key_cache, value_cache: [blocks, kv_heads, block_size, head_dim], bf16, fp16 or float8_e4m3fn; each head's block
            contiguous, and both with the same strides.
        block_tables: [rows, max_blocks] int32.
        items: [items, ITEM_FIELDS] int32 on the device, planned for `tile_rows(group) // group` tokens a tile and the same
            `sliding_window`.
        out: [tokens, heads, head_dim]; tokens outside the plan are not written.
        k_scale, v_scale: float32, [1] or [kv_heads]: what a cached number must be multiplied with. Both or neither.
        overlap: start while the kernel before still runs, and wait for it on the device (Hopper on). `items` must be older than
            that kernel.

    Returns:
        out
    """
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    if items.shape[0] == 0:
        return out
    group, dim_pad = num_heads // num_kv_heads, triton.next_power_of_2(head_dim)
    has_scale = k_scale is not None and v_scale is not None
    _invariant_kernel[(num_kv_heads, items.shape[0])](
        q,
        key_cache,
        value_cache,
        block_tables,
        items,
        out,
        workspace.sums,
        workspace.stats,
        workspace.counters,
        k_scale if has_scale else q,
        v_scale if has_scale else q,
        q.stride(0),
        out.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        block_tables.stride(0),
        # A soft cap works on natural scores; without one the change to base 2 is folded into the scale.
        scale if soft_cap else scale * _LOG2_E,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=tile_rows(group),
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK=block_size,
        TILE=_TILE,
        SEGMENT=SEGMENT,
        FIELDS=items.shape[1],
        STAGES=2 if dim_pad > 128 else 3,
        WINDOW=sliding_window or 0,
        SOFT_CAP=soft_cap or 0.0,
        SCALE_STRIDE=-1 if k_scale is None or not has_scale else int(k_scale.numel() > 1),
        OVERLAP=overlap,
        **({"launch_pdl": True} if overlap else {}),
        num_warps=8 if dim_pad > 128 else 4,
    )
    return out
