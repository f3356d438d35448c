"""Attention of one query token a row over the paged KV cache, in one launch: split over the SMs and combined on the spot.

Cache layout: K and V each [blocks, kv_heads, block_size, head_dim], so that one head's block is one contiguous run. All query
heads of a KV head are the rows of one tensor-core tile (grouped-query attention, Ainslie et al. 2023), so each key and value
is read once. The work list comes from `decode_plan`. Softmax is online (Milakov & Gimelshein 2018), in base 2.

Rows that begin with the same blocks may share a tile there: their heads fill the rows that one row's heads leave empty, so that
a common prefix is read once for several rows (cascade attention, Juravsky et al. 2024; Ye et al. 2025).

A row that was cut into parts is put together again by the last of them (`split_softmax`).
"""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.ops.triton.decode_plan import ITEM_FIELDS, DecodeCapacity, DecodePlan
from octavo.ops.triton.split_softmax import add_parts_of_few_rows, arrived_last, leave_part
from octavo.ops.triton.turns import overlap, take_turn

_LOG2_E = 1.4426950408889634
_MIN_DOT_ROWS = 16


@dataclass(frozen=True)
class DecodeTuning:
    tile: int
    """Tokens a loop iteration."""
    warps: int
    stages: int
    parts_at_once: int = 4
    """Parts in flight where they are added up: more hides latency, and takes registers from everyone. Does not change bits."""
    overlap: bool = False
    """Start while the kernel before still runs and wait for it on the device (programmatic dependent launch, Hopper on). The
    plan and the block tables must be older than that kernel."""


def decode_tuning(
    head_dim: int,
    cache_itemsize: int,
    max_rows: int,
    num_kv_heads: int,
    sm_count: int,
    *,
    overlap: bool = False,
) -> DecodeTuning:
    """Measured on one H200 (benchmarks/gpu_attention.py)."""
    if triton.next_power_of_2(head_dim) * cache_itemsize > 256:
        return DecodeTuning(tile=32, warps=4, stages=2, overlap=overlap)
    blocks = max_rows * num_kv_heads
    crowded = blocks > 3 * sm_count
    if crowded and cache_itemsize == 1:
        return DecodeTuning(tile=64, warps=2, stages=2, overlap=overlap)
    # Three stages are three thread blocks an SM. Where about that many whole rows make one wave, two blocks an SM with deeper
    # pipelines spread more evenly.
    stages = 4 if 19 * sm_count <= 10 * blocks <= 45 * sm_count else 3
    return DecodeTuning(tile=64, warps=4, stages=stages, overlap=overlap)


@dataclass(frozen=True)
class DecodeWorkspace:
    """Device buffers of one plan capacity, at fixed addresses so that graphs can hold them. One in use a stream at a time."""

    plan: torch.Tensor
    """[capacity.size] int32: `DecodePlan.numbers`."""
    sums: torch.Tensor
    """[parts, kv_heads, group, head_dim] float32, group and head_dim padded to powers of two."""
    stats: torch.Tensor
    """[parts, kv_heads, group, 2] float32: maximum and denominator."""
    counters: torch.Tensor
    """[parts, kv_heads] int32: parts of a row that have finished. Zero between launches."""
    capacity: DecodeCapacity

    @classmethod
    def allocate(cls, capacity: DecodeCapacity, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> DecodeWorkspace:
        group = triton.next_power_of_2(num_heads // num_kv_heads)
        dim = triton.next_power_of_2(head_dim)
        return cls(
            plan=torch.zeros(capacity.size, dtype=torch.int32, device=device),
            sums=torch.empty(capacity.parts, num_kv_heads, group, dim, dtype=torch.float32, device=device),
            stats=torch.empty(capacity.parts, num_kv_heads, group, 2, dtype=torch.float32, device=device),
            counters=torch.zeros(capacity.parts, num_kv_heads, dtype=torch.int32, device=device),
            capacity=capacity,
        )

    def load(self, plan: DecodePlan[DecodeCapacity]) -> None:
        """Copy a plan in. The plan must have been made for this capacity."""
        self.plan.copy_(torch.from_numpy(plan.numbers), non_blocking=True)


@triton.jit
def _attend_item(
    kv_head,
    row,
    lo,
    hi,
    context,
    part,
    first_part,
    num_parts,
    members,
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    members_ptr,
    out_ptr,
    sums_ptr,
    stats_ptr,
    counters_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_stride,
    out_stride,
    block_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
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
    SHARED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One item, and of each row whose parts are then complete, the output."""
    # Addresses are most of the instructions of this loop, so they are kept cheap: in lines of HEAD_DIM numbers, and the place in
    # the block does not change from tile to tile. Past the end the last block is read again.
    table = table_ptr + row * table_stride + lo // BLOCK
    last_block = (hi - 1) // BLOCK - lo // BLOCK
    n = tl.arange(0, TILE)
    at = n
    if 16 % BLOCK != 0:
        # Items begin at multiples of 16.
        at += lo % BLOCK
    # Block numbers are read one tile ahead: a tile's loads never wait for the table.
    block = tl.load(table + tl.minimum(at // BLOCK, last_block))
    lines_a_block = block_stride // HEAD_DIM
    r = tl.arange(0, ROWS)
    g = r % GROUP_PAD
    q_row = row + r * 0
    used = r < GROUP_PAD
    if SHARED:  # noqa: SIM102
        if members > 0:
            # `part` is where the item's members are listed; each has GROUP_PAD rows of the tile, and parts of its own.
            used = r // GROUP_PAD < members
            q_row = tl.load(members_ptr + (part + r // GROUP_PAD) * 4, mask=used, other=0).to(tl.int64)
    take_turn(OVERLAP)
    d = tl.arange(0, DIM_PAD)
    in_head = d[None, :] < HEAD_DIM
    real = (used & (g < GROUP))[:, None] & in_head
    head_offset = (kv_head * GROUP + g) * HEAD_DIM
    q = tl.load(q_ptr + (q_row * q_stride + head_offset)[:, None] + d[None, :], mask=real, other=0.0)
    v_scale = 1.0
    base2_scale = scale
    if SCALE_STRIDE >= 0:
        base2_scale = scale * tl.load(k_scale_ptr + kv_head * SCALE_STRIDE)
        v_scale = tl.load(v_scale_ptr + kv_head * SCALE_STRIDE)
        # float8 becomes float16 exactly and in one instruction; bf16 would take three.
        q = q.to(tl.float16)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    row_max = tl.full([ROWS], -1.0e30, tl.float32)
    # Denominators are added up over the tile's columns only in the end: a sum across warps costs two barriers.
    column_sums = tl.zeros([ROWS, TILE], tl.float32)
    for t in tl.range(0, hi - lo, TILE, num_stages=STAGES):
        live = n < hi - lo - t
        if TILE % BLOCK == 0:
            lines = block * lines_a_block + at % BLOCK
            block = tl.load(table + tl.minimum(at // BLOCK + (t + TILE) // BLOCK, last_block))
        else:
            lines = block * lines_a_block + (at + t) % BLOCK
            block = tl.load(table + tl.minimum((at + t + TILE) // BLOCK, last_block))
        offsets = (lines.to(tl.int64) * HEAD_DIM)[:, None] + d[None, :]
        if HEAD_DIM == DIM_PAD:
            k = tl.load(k_ptr + offsets)
        else:
            k = tl.load(k_ptr + offsets, mask=in_head, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype))) * base2_scale
        if SOFT_CAP > 0.0:
            # cap * tanh(x / cap), tanh(y) = 1 - 2 / (1 + e^2y); scores are in base 2 only after this.
            scores = (SOFT_CAP - 2.0 * SOFT_CAP / (1.0 + tl.exp2(scores * (2.0 * 1.4426950408889634 / SOFT_CAP)))) * 1.4426950408889634
        # Anything may lie past the context, NaN included: such keys count for nothing, and their values are never read.
        seen = live
        if WINDOW > 0:
            seen = live & (lo + t + n >= context - WINDOW)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        fade = tl.exp2(row_max - new_max)
        p = tl.exp2(scores - new_max[:, None])
        column_sums = column_sums * fade[:, None] + p
        v = tl.load(v_ptr + offsets, mask=live[:, None] & in_head, other=0.0)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * fade[:, None])
        row_max = new_max
    row_sum = tl.sum(column_sums, 1)

    if part < 0:
        out_offsets = (row * out_stride + head_offset)[:, None] + d[None, :]
        tl.store(out_ptr + out_offsets, (acc * (v_scale / row_sum)[:, None]).to(out_ptr.dtype.element_ty), mask=real)
    else:
        place = part + r * 0
        if SHARED:  # noqa: SIM102
            if members > 0:
                place = tl.load(members_ptr + (part + r // GROUP_PAD) * 4 + 1, mask=used, other=0)
        leave_part(acc, row_max, row_sum, (place * KV_HEADS + kv_head) * GROUP_PAD + g, used, sums_ptr, stats_ptr, DIM_PAD)
        rows_here = 1
        if SHARED:
            rows_here = tl.maximum(members, 1)
        for member in range(rows_here):
            if SHARED:  # noqa: SIM102
                if members > 0:
                    entry = members_ptr + (part + member) * 4
                    row = tl.load(entry).to(tl.int64)
                    first_part = tl.load(entry + 2)
                    num_parts = tl.load(entry + 3)
            if arrived_last(counters_ptr + first_part * KV_HEADS + kv_head, num_parts):
                result = add_parts_of_few_rows(
                    first_part, num_parts, kv_head, sums_ptr, stats_ptr, KV_HEADS, GROUP_PAD, DIM_PAD, PARTS_AT_ONCE
                )
                e = tl.arange(0, GROUP_PAD * DIM_PAD)
                out_offsets = row * out_stride + (kv_head * GROUP + e // DIM_PAD) * HEAD_DIM + e % DIM_PAD
                stored = (e // DIM_PAD < GROUP) & (e % DIM_PAD < HEAD_DIM)
                tl.store(out_ptr + out_offsets, (result * v_scale).to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["table_stride", "num_items"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    items_ptr,
    members_ptr,
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
    num_items,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
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
    SHARED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    k_ptr += kv_head * head_stride
    v_ptr += kv_head * head_stride
    # Not one thread block an item: empty ones would have to wait for a place on an SM like any other.
    for item in range(tl.program_id(1), num_items, tl.num_programs(1)):
        # All fields in one round trip, and only then the question whether there is work.
        fields = items_ptr + item * 8
        row = tl.load(fields).to(tl.int64)
        lo = tl.load(fields + 1)
        hi = tl.load(fields + 2)
        context = tl.load(fields + 3)
        part = tl.load(fields + 4)
        first_part = tl.load(fields + 5)
        num_parts = tl.load(fields + 6)
        members = tl.load(fields + 7)
        if hi > 0:
            _attend_item(
                kv_head, row, lo, hi, context, part, first_part, num_parts, members,
                q_ptr, k_ptr, v_ptr, table_ptr, members_ptr, out_ptr, sums_ptr, stats_ptr, counters_ptr, k_scale_ptr, v_scale_ptr, q_stride, out_stride, block_stride, table_stride, scale,
                KV_HEADS, GROUP, GROUP_PAD, ROWS, HEAD_DIM, DIM_PAD, BLOCK, TILE, STAGES, WINDOW, SOFT_CAP, SCALE_STRIDE, PARTS_AT_ONCE, SHARED, OVERLAP,
            )  # fmt: skip


def paged_decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    tuning: DecodeTuning,
) -> torch.Tensor:
    """softmax(q K^T * scale) V for rows with one query token each, over the plan in `workspace`.

    Args:
        q: [rows, heads, head_dim]; a stride between rows is fine (a slice of fused qkv).
        key_cache, value_cache: [blocks, kv_heads, block_size, head_dim], bf16, fp16, or float8_e4m3fn; each head's block
            contiguous, and both with the same strides, which are multiples of head_dim.
        block_tables: [rows, max_blocks] int32. What lies past a row's last block is not read.
        workspace: holds a plan made with the same `sliding_window`.
        out: [rows, heads, head_dim]. Rows without work in the plan are not written.
        k_scale, v_scale: float32, [1] or [kv_heads]: what a cached number must be multiplied with. Both or neither.

    Returns:
        out
    """
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    group = num_heads // num_kv_heads
    group_pad, dim_pad = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    has_scale = k_scale is not None and v_scale is not None
    capacity = workspace.capacity
    turn = overlap(len(q), q.device) if tuning.overlap else 0
    _decode_kernel[(num_kv_heads, min(capacity.items, capacity.at_once))](
        q,
        key_cache,
        value_cache,
        block_tables,
        workspace.plan,
        workspace.plan[capacity.items * ITEM_FIELDS :],
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
        capacity.items,
        # A soft cap works on natural scores; without one the change to base 2 is folded into the scale.
        scale if soft_cap else scale * _LOG2_E,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=group_pad,
        ROWS=max(_MIN_DOT_ROWS, group_pad),
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK=block_size,
        TILE=tuning.tile,
        STAGES=tuning.stages,
        WINDOW=sliding_window or 0,
        SOFT_CAP=soft_cap or 0.0,
        SCALE_STRIDE=-1 if k_scale is None or not has_scale else int(k_scale.numel() > 1),
        PARTS_AT_ONCE=tuning.parts_at_once,
        SHARED=capacity.members > 0,
        OVERLAP=turn,
        **({"launch_pdl": True} if turn else {}),
        num_warps=tuning.warps,
    )
    return out
