"""Softmax over keys that several thread blocks share: leave a part, tell who is last, add the parts up.

A part is the unnormalised sum, the maximum and the denominator of some rows over some keys (flash-decoding, Dao et al. 2023).
A row's place in the workspace is one of [parts, kv_heads, rows]. The last thread block to arrive adds all parts up *in part order*, so the
bits do not depend on who was last, and sets the counter back to zero for the next launch. No second launch, no host sync.
"""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def leave_part(acc, row_max, row_sum, places, kept, sums_ptr, stats_ptr, DIM: tl.constexpr):
    """Store rows of a part. acc: [rows, DIM]; row_max, row_sum, and where and whether each row is stored: [rows]."""
    places = places.to(tl.int64)
    tl.store(sums_ptr + places[:, None] * DIM + tl.arange(0, DIM)[None, :], acc, mask=kept[:, None])
    tl.store(stats_ptr + places * 2, row_max, mask=kept)
    tl.store(stats_ptr + places * 2 + 1, row_sum, mask=kept)


@triton.jit
def arrived_last(counter, num_parts):
    """Count this thread block in; true for the one that completes `num_parts`. Its loads see every part's stores."""
    # Every thread's stores come before the one thread's release, and its acquire before every thread's loads.
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1
    tl.debug_barrier()
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def add_parts(
    first_part,
    num_parts,
    kv_head,
    sums_ptr,
    stats_ptr,
    KV_HEADS: tl.constexpr,
    KEPT: tl.constexpr,
    DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """([KEPT, DIM] sums, [KEPT] denominators) of all parts together, float32; AT_ONCE parts are in flight."""
    n = tl.arange(0, AT_ONCE)
    r = tl.arange(0, KEPT)
    d = tl.arange(0, DIM)
    total = tl.zeros([KEPT, DIM], tl.float32)
    total_max = tl.full([KEPT], -1.0e30, tl.float32)
    total_sum = tl.zeros([KEPT], tl.float32)
    for p in range(0, num_parts, AT_ONCE):
        there = p + n < num_parts
        place = ((first_part + p + n).to(tl.int64) * KV_HEADS + kv_head)[:, None] * KEPT + r[None, :]
        # .cg: other SMs wrote these, so this SM's L1 may not answer.
        part_max = tl.load(stats_ptr + place * 2, mask=there[:, None], other=-1.0e30, cache_modifier=".cg")
        part_sum = tl.load(stats_ptr + place * 2 + 1, mask=there[:, None], other=0.0, cache_modifier=".cg")
        sums = tl.load(sums_ptr + place[:, :, None] * DIM + d[None, None, :], mask=there[:, None, None], other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(total_max, tl.max(part_max, 0))
        fade = tl.exp2(total_max - new_max)
        weight = tl.exp2(part_max - new_max[None, :])
        total_sum = total_sum * fade + tl.sum(weight * part_sum, 0)
        total = total * fade[:, None] + tl.sum(weight[:, :, None] * sums, 0)
        total_max = new_max
    return total, total_sum


@triton.jit
def add_parts_of_few_rows(
    first_part,
    num_parts,
    kv_head,
    sums_ptr,
    stats_ptr,
    KV_HEADS: tl.constexpr,
    KEPT: tl.constexpr,
    DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """[KEPT * DIM] softmax of all parts together, float32: what `add_parts` gives, divided.

    Each number has a thread of its own that goes through the parts, so that no sum crosses threads: a decode waits for this in the
    end, and a few rows are quicker added up so. AT_ONCE parts are in flight.
    """
    e = tl.arange(0, KEPT * DIM)
    total = tl.zeros([KEPT * DIM], tl.float32)
    total_max = tl.full([KEPT * DIM], -1.0e30, tl.float32)
    total_sum = tl.zeros([KEPT * DIM], tl.float32)
    for begin in range(0, num_parts, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            there = begin + i < num_parts
            place = ((first_part + tl.minimum(begin + i, num_parts - 1)).to(tl.int64) * KV_HEADS + kv_head) * KEPT
            # .cg: other SMs wrote these, so this SM's L1 may not answer.
            part_max = tl.load(stats_ptr + (place + e // DIM) * 2, cache_modifier=".cg")
            part_sum = tl.load(stats_ptr + (place + e // DIM) * 2 + 1, cache_modifier=".cg")
            sums = tl.load(sums_ptr + place * DIM + e, cache_modifier=".cg")
            new_max = tl.where(there, tl.maximum(total_max, part_max), total_max)
            fade = tl.exp2(total_max - new_max)
            weight = tl.where(there, tl.exp2(part_max - new_max), 0.0)
            total = total * fade + sums * weight
            total_sum = total_sum * fade + part_sum * weight
            total_max = new_max
    return total / total_sum
