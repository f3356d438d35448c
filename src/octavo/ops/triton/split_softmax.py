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
    """([KEPT, DIM] sums, [KEPT, 1] denominators) of all parts together, float32; AT_ONCE parts are in flight."""
    n = tl.arange(0, AT_ONCE)[:, None, None]
    r = tl.arange(0, KEPT)[None, :, None]
    d = tl.arange(0, DIM)[None, None, :]
    total = tl.zeros([KEPT, DIM], tl.float32)
    total_max = tl.full([KEPT, 1], -1.0e30, tl.float32)
    total_sum = tl.zeros([KEPT, 1], tl.float32)
    for p in range(0, num_parts, AT_ONCE):
        there = p + n < num_parts
        place = ((first_part + p + n).to(tl.int64) * KV_HEADS + kv_head) * KEPT + r
        # .cg: other SMs wrote these, so this SM's L1 may not answer.
        sums = tl.load(sums_ptr + place * DIM + d, mask=there, other=0.0, cache_modifier=".cg")
        part_max = tl.load(stats_ptr + place * 2, mask=there, other=-1.0e30, cache_modifier=".cg")
        part_sum = tl.load(stats_ptr + place * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(total_max, tl.max(part_max, 0))
        fade = tl.exp2(total_max - new_max)
        weight = tl.exp2(part_max - new_max[None, :, :])
        total_sum = total_sum * fade + tl.sum(weight * part_sum, 0)
        total = total * fade + tl.sum(weight * sums, 0)
        total_max = new_max
    return total, total_sum
