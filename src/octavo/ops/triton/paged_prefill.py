"""Causal attention of prompt chunks over the paged KV cache: any mix of rows, chunk lengths and prefixes in one launch.

The chunk's own keys and values are in the cache already. A tile's rows are tokens x the query heads of one KV head, so grouped
heads share what is loaded. Keys that every query of the tile sees go through a loop without masks; the diagonal comes last.
FlashAttention-2 (Dao 2023), in base 2. The order of additions along the keys does not depend on how a prompt was chunked
unless the plan cuts keys into parts, which it does only where queries are too few to fill the GPU.
"""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.ops.triton.gather_cache import GatheredCache
from octavo.ops.triton.prefill_plan import ITEM_FIELDS, Int32, PrefillPlan, max_prefill_parts
from octavo.ops.triton.split_softmax import add_parts, arrived_last, leave_part

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class PrefillTuning:
    rows: int
    """Tokens x query heads of a KV head in a tile."""
    tile: int
    """Keys a loop iteration."""
    warps: int
    stages: int

    def tokens_per_tile(self, group: int) -> int:
        """What `plan_prefill` must be given for this many query heads a KV head."""
        return self.rows // group


def queries_per_key(start: Int32, count: Int32) -> float:
    """How many of a step's queries look at a cached token, on average. start, count: [rows]."""
    contexts = float(start.sum(dtype=np.float64) + count.sum(dtype=np.float64))
    pairs = (count.astype(np.float64) * (start + 0.5 * count)).sum()
    return float(pairs / contexts) if contexts else 0.0


GATHER_FROM = 200.0
"""Queries a key from which copying pages into lines first (`gather_cache`) is faster than reading pages again and again."""


def prefill_tuning(head_dim: int, group: int, max_count: int, reuse: float, *, gathered: bool) -> PrefillTuning:
    """Measured on one H200 (benchmarks/gpu_attention.py).

    Args:
        group: query heads a KV head.
        max_count: the longest chunk of the batch, in tokens.
        reuse: `queries_per_key`.
    """
    rows = max(16, triton.next_power_of_2(group))
    while rows < 64 and rows < group * max_count:
        rows *= 2
    if head_dim > 128:
        return PrefillTuning(rows=rows, tile=64, warps=4, stages=2)
    if gathered:
        return (
            PrefillTuning(rows=128, tile=128, warps=8, stages=3) if reuse > 4096 else PrefillTuning(rows=rows, tile=64, warps=4, stages=3)
        )
    if group * max_count > 128 and reuse > 1024:
        return PrefillTuning(rows=128, tile=128, warps=8, stages=3)
    return PrefillTuning(rows=rows, tile=64, warps=4, stages=3)


@dataclass(frozen=True)
class PrefillWorkspace:
    """Device buffers for the parts of cut prefixes, one in use a stream at a time."""

    sums: torch.Tensor
    """[parts, kv_heads, rows, head_dim] float32, head_dim padded to a power of two."""
    stats: torch.Tensor
    """[parts, kv_heads, rows, 2] float32."""
    counters: torch.Tensor
    """[parts, kv_heads] int32, zero between launches."""

    @classmethod
    def allocate(cls, num_kv_heads: int, head_dim: int, sm_count: int, device: torch.device, *, max_rows: int = 128) -> PrefillWorkspace:
        parts = max_prefill_parts(num_kv_heads, sm_count)
        return cls(
            sums=torch.empty(parts, num_kv_heads, max_rows, triton.next_power_of_2(head_dim), dtype=torch.float32, device=device),
            stats=torch.empty(parts, num_kv_heads, max_rows, 2, dtype=torch.float32, device=device),
            counters=torch.zeros(parts, num_kv_heads, dtype=torch.int32, device=device),
        )


@triton.jit
def _softmax_step(scores, acc, row_max, row_sum, pos, query_pos, scale, MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr):
    """One tile of keys: ([rows, tile] probabilities, and the faded sums, maxima and denominators of what came before)."""
    if SOFT_CAP > 0.0:
        # cap * tanh(x / cap), tanh(y) = 1 - 2 / (1 + e^2y); `scale` then holds natural units, and base 2 comes here.
        scores = (
            SOFT_CAP - 2.0 * SOFT_CAP / (1.0 + tl.exp2(scores * (scale * (2.0 * 1.4426950408889634 / SOFT_CAP))))
        ) * 1.4426950408889634
    if MASKED:
        seen = pos[None, :] <= query_pos[:, None]
        if WINDOW > 0:
            seen = seen & (pos[None, :] > query_pos[:, None] - WINDOW)
        scores = tl.where(seen, scores, -float("inf"))
    if SOFT_CAP > 0.0:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        p = tl.exp2(scores - new_max[:, None])
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - new_max[:, None])
    fade = tl.exp2(row_max - new_max)
    return p, acc * fade[:, None], new_max, row_sum * fade + tl.sum(p, 1)


@triton.jit
def _attend_paged(
    q,
    acc,
    row_max,
    row_sum,
    query_pos,
    lo,
    hi,
    end,
    table,
    k_ptr,
    v_ptr,
    kv_offset,
    block_stride,
    scale,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    d = tl.arange(0, DIM_PAD)
    for t in tl.range(lo, hi, TILE, num_stages=STAGES):
        pos = t + tl.arange(0, TILE)
        block = tl.load(table + pos // BLOCK, mask=pos < end, other=0).to(tl.int64)
        offsets = (block * block_stride + kv_offset + (pos % BLOCK) * HEAD_DIM)[:, None] + d[None, :]
        mask = (pos < end)[:, None] & (d[None, :] < HEAD_DIM)
        if MASKED or HEAD_DIM != DIM_PAD:
            k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        else:
            k = tl.load(k_ptr + offsets)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)))
        p, acc, row_max, row_sum = _softmax_step(scores, acc, row_max, row_sum, pos, query_pos, scale, MASKED, WINDOW, SOFT_CAP)
        if MASKED or HEAD_DIM != DIM_PAD:
            v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        else:
            v = tl.load(v_ptr + offsets)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc)
    return acc, row_max, row_sum


@triton.jit
def _attend_gathered(
    q,
    acc,
    row_max,
    row_sum,
    query_pos,
    lo,
    hi,
    first_line,
    k_desc,
    v_desc,
    scale,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    for t in tl.range(lo, hi, TILE, num_stages=STAGES):
        k = k_desc.load([first_line + t, 0])
        scores = tl.dot(q, tl.trans(k))
        pos = t + tl.arange(0, TILE)
        p, acc, row_max, row_sum = _softmax_step(scores, acc, row_max, row_sum, pos, query_pos, scale, MASKED, WINDOW, SOFT_CAP)
        v = v_desc.load([first_line + t, 0])
        acc = tl.dot(p.to(q.dtype), v, acc)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
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
    k_desc,
    v_desc,
    gathered_starts_ptr,
    gathered_tokens,
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
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
    GATHERED: tl.constexpr,
):
    kv_head = tl.program_id(0)
    fields = items_ptr + tl.program_id(1) * 9
    row = tl.load(fields).to(tl.int64)
    token = tl.load(fields + 1).to(tl.int64)
    position = tl.load(fields + 2)
    count = tl.load(fields + 3)
    if count == 0:
        return
    lo = tl.load(fields + 4)
    hi = tl.load(fields + 5)
    part = tl.load(fields + 6)
    first_part = tl.load(fields + 7)
    num_parts = tl.load(fields + 8)
    v_scale = 1.0
    if SCALE_STRIDE >= 0:
        scale *= tl.load(k_scale_ptr + kv_head * SCALE_STRIDE)
        v_scale = tl.load(v_scale_ptr + kv_head * SCALE_STRIDE)

    r = tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PAD)
    query = r // GROUP
    head_offset = (kv_head * GROUP + r % GROUP) * HEAD_DIM
    valid = (query < count)[:, None] & (d[None, :] < HEAD_DIM)
    q = tl.load(q_ptr + ((token + query) * q_stride + head_offset)[:, None] + d[None, :], mask=valid, other=0.0)
    query_pos = position + tl.minimum(query, count - 1)  # padding rows repeat the last query and are not stored
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    row_max = tl.full([ROWS], -1.0e30, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    table = table_ptr + row * table_stride
    kv_offset = kv_head * head_stride

    masked_from = lo
    if WINDOW == 0:
        masked_from = tl.maximum(lo, tl.minimum(hi, (position + 1) // TILE * TILE))
    if GATHERED:
        line = kv_head * gathered_tokens + tl.load(gathered_starts_ptr + row)
        if WINDOW == 0:
            acc, row_max, row_sum = _attend_gathered(
                q, acc, row_max, row_sum, query_pos, lo, masked_from, line, k_desc, v_desc, scale, False, TILE, STAGES, WINDOW, SOFT_CAP
            )
        acc, row_max, row_sum = _attend_gathered(
            q, acc, row_max, row_sum, query_pos, masked_from, hi, line, k_desc, v_desc, scale, True, TILE, STAGES, WINDOW, SOFT_CAP
        )
    else:
        if WINDOW == 0:
            acc, row_max, row_sum = _attend_paged(
                q, acc, row_max, row_sum, query_pos, lo, masked_from, hi, table, k_ptr, v_ptr, kv_offset, block_stride, scale,
                False, HEAD_DIM, DIM_PAD, BLOCK, TILE, STAGES, WINDOW, SOFT_CAP,
            )  # fmt: skip
        acc, row_max, row_sum = _attend_paged(
            q, acc, row_max, row_sum, query_pos, masked_from, hi, hi, table, k_ptr, v_ptr, kv_offset, block_stride, scale,
            True, HEAD_DIM, DIM_PAD, BLOCK, TILE, STAGES, WINDOW, SOFT_CAP,
        )  # fmt: skip

    out_offsets = ((token + query) * out_stride + head_offset)[:, None] + d[None, :]
    if part < 0:
        tl.store(out_ptr + out_offsets, (acc * (v_scale / row_sum)[:, None]).to(out_ptr.dtype.element_ty), mask=valid)
    else:
        leave_part(acc, row_max, row_sum, part, kv_head, sums_ptr, stats_ptr, KV_HEADS, ROWS, ROWS, DIM_PAD)
        if arrived_last(counters_ptr + first_part * KV_HEADS + kv_head, num_parts):
            total, total_sum = add_parts(first_part, num_parts, kv_head, sums_ptr, stats_ptr, KV_HEADS, ROWS, DIM_PAD, PARTS_AT_ONCE)
            tl.store(out_ptr + out_offsets, (total * (v_scale / total_sum)[:, None]).to(out_ptr.dtype.element_ty), mask=valid)


def paged_prefill(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    items: torch.Tensor,
    workspace: PrefillWorkspace,
    out: torch.Tensor,
    *,
    scale: float,
    tuning: PrefillTuning,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    gathered: GatheredCache | None = None,
    gathered_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the queries in `items` over their rows' cached contexts, their own keys included.

    Args:
        q: [tokens, heads, head_dim]; a stride between tokens is fine (a slice of fused qkv).
        key_cache, value_cache: as for `paged_decode`.
        block_tables: [rows, max_blocks] int32, rows as in the plan.
        items: [items, ITEM_FIELDS] int32: `PrefillPlan.items` on the device, planned for `tuning.tokens_per_tile(group)` and
            the same `sliding_window`.
        out: [tokens, heads, head_dim]; tokens outside the plan are not written.
        k_scale, v_scale: as for `paged_decode`.
        gathered, gathered_starts: the rows' caches as `gather_cache` left them, and `GatherPlan.starts` on the device. With
            these the pages are not read again.

    Returns:
        out
    """
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    dim_pad = triton.next_power_of_2(head_dim)
    has_scale = k_scale is not None and v_scale is not None
    if items.shape[0] == 0:
        return out
    k_desc = v_desc = None
    if gathered is not None:
        tokens = gathered.keys.shape[1]
        k_desc, v_desc = (
            TensorDescriptor(t, [num_kv_heads * tokens, head_dim], [head_dim, 1], [tuning.tile, dim_pad])
            for t in (gathered.keys, gathered.values)
        )
    _prefill_kernel[(num_kv_heads, items.shape[0])](
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
        k_desc,
        v_desc,
        gathered_starts,
        gathered.keys.shape[1] if gathered is not None else 0,
        q.stride(0),
        out.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        block_tables.stride(0),
        scale if soft_cap else scale * _LOG2_E,
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        ROWS=tuning.rows,
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK=block_size,
        TILE=tuning.tile,
        STAGES=tuning.stages,
        WINDOW=sliding_window or 0,
        SOFT_CAP=soft_cap or 0.0,
        SCALE_STRIDE=-1 if k_scale is None or not has_scale else int(k_scale.numel() > 1),
        PARTS_AT_ONCE=max(1, min(16, 4096 // (tuning.rows * dim_pad))),
        GATHERED=gathered is not None,
        num_warps=tuning.warps,
    )
    return out


def prefill_items(plan: PrefillPlan, device: torch.device) -> torch.Tensor:
    """[items, ITEM_FIELDS] int32 on the device."""
    items = torch.from_numpy(plan.items).view(-1, ITEM_FIELDS)
    return items.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else items.to(device)
