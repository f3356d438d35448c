"""Everything between the fused qkv projection and attention in one launch: QK-norm, rotation, and the write to the cache.

Q is rotated where it lies. K goes, rotated, to the cache and optionally back; V goes to the cache. A float8 cache is scaled
and saturated on the way in.
"""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.ops.triton.turns import overlap, take_turn

_HEADS_AT_ONCE = 4
_MANY_TOKENS = 1024
"""From here on there is work enough for larger thread blocks, each with several tokens in flight."""
_TOKENS_AT_ONCE = 8


@triton.jit(do_not_specialize=["tokens"])
def _rope_cache_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_scale_ptr,
    v_scale_ptr,
    tokens,
    qkv_stride,
    cos_sin_stride,
    block_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TOKENS: tl.constexpr,
    NORM: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    KEEP_KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    # Rows of the tiles: AT_ONCE heads of one token, then those of the next.
    group = tl.program_id(1)
    i = tl.arange(0, TOKENS * AT_ONCE)
    token = tl.program_id(0).to(tl.int64) * TOKENS + i // AT_ONCE
    in_tokens = token < tokens
    q_groups: tl.constexpr = (HEADS + AT_ONCE - 1) // AT_ONCE
    kv_groups: tl.constexpr = (KV_HEADS + AT_ONCE - 1) // AT_ONCE
    is_q = group < q_groups
    is_v = group >= q_groups + kv_groups
    first = tl.where(is_q, group, tl.where(is_v, group - q_groups - kv_groups, group - q_groups)) * AT_ONCE
    head = first + i % AT_ONCE
    in_rows = in_tokens & (head < tl.where(is_q, HEADS, KV_HEADS))
    line = head + tl.where(is_q, 0, tl.where(is_v, HEADS + KV_HEADS, HEADS))
    base = qkv_ptr + token[:, None] * qkv_stride + line[:, None] * HEAD_DIM

    slot = tl.load(slots_ptr + token, mask=in_tokens, other=-1)[:, None]
    target = (slot // BLOCK) * block_stride + head[:, None].to(tl.int64) * head_stride + (slot % BLOCK) * HEAD_DIM
    stored = in_rows[:, None] & (slot >= 0)

    if is_v:
        d = tl.arange(0, DIM_PAD)
        mask = d[None, :] < HEAD_DIM
        v = tl.load(base + d[None, :], mask=in_rows[:, None] & mask, other=0.0)
        if SCALE_STRIDE >= 0:
            v_scale = tl.load(v_scale_ptr + head * SCALE_STRIDE, mask=in_rows, other=1.0)
            v = tl.clamp(v.to(tl.float32) / v_scale[:, None], -448.0, 448.0)
        tl.store(v_cache_ptr + target + d[None, :], v.to(v_cache_ptr.dtype.element_ty), mask=stored & mask)
        return

    r = tl.arange(0, HALF_PAD)
    in_half = r < ROTARY_HALF
    mask = in_rows[:, None] & in_half[None, :]
    x1 = tl.load(base + r[None, :], mask=mask, other=0.0)
    x2 = tl.load(base + ROTARY_HALF + r[None, :], mask=mask, other=0.0)
    dtype = x1.dtype
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    position = tl.load(positions_ptr + token, mask=in_tokens, other=0)[:, None]
    cos = tl.load(cos_sin_ptr + position * cos_sin_stride + r[None, :], mask=mask, other=0.0)
    sin = tl.load(cos_sin_ptr + position * cos_sin_stride + ROTARY_HALF + r[None, :], mask=mask, other=0.0)
    if REST_PAD > 0:
        rest = 2 * ROTARY_HALF + tl.arange(0, REST_PAD)
        in_rest = rest < HEAD_DIM
        x3 = tl.load(base + rest[None, :], mask=in_rows[:, None] & in_rest[None, :], other=0.0).to(tl.float32)
    if NORM:
        weight_ptr = k_weight_ptr
        if is_q:
            weight_ptr = q_weight_ptr
        squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
        if REST_PAD > 0:
            squares += tl.sum(x3 * x3, 1)
        inverse = (1.0 / tl.sqrt(squares / HEAD_DIM + eps))[:, None]
        w1 = tl.load(weight_ptr + r, mask=in_half, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(weight_ptr + ROTARY_HALF + r, mask=in_half, other=0.0).to(tl.float32)[None, :]
        # Rounded where a norm op of its own would round.
        x1 = ((x1 * inverse).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
        x2 = ((x2 * inverse).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
        if REST_PAD > 0:
            w3 = tl.load(weight_ptr + rest, mask=in_rest, other=0.0).to(tl.float32)[None, :]
            x3 = ((x3 * inverse).to(dtype).to(tl.float32) * w3).to(dtype).to(tl.float32)
    y1 = (x1 * cos - x2 * sin).to(dtype)
    y2 = (x2 * cos + x1 * sin).to(dtype)
    if is_q or KEEP_KEYS:
        tl.store(base + r[None, :], y1, mask=mask)
        tl.store(base + ROTARY_HALF + r[None, :], y2, mask=mask)
        if REST_PAD > 0 and NORM:
            tl.store(base + rest[None, :], x3.to(dtype), mask=in_rows[:, None] & in_rest[None, :])
    if group >= q_groups:
        cache_type = k_cache_ptr.dtype.element_ty
        c1, c2 = y1.to(tl.float32), y2.to(tl.float32)
        if SCALE_STRIDE >= 0:
            k_scale = tl.load(k_scale_ptr + head * SCALE_STRIDE, mask=in_rows, other=1.0)[:, None]
            c1 = tl.clamp(c1 / k_scale, -448.0, 448.0)
            c2 = tl.clamp(c2 / k_scale, -448.0, 448.0)
        tl.store(k_cache_ptr + target + r[None, :], c1.to(cache_type), mask=stored & in_half[None, :])
        tl.store(k_cache_ptr + target + ROTARY_HALF + r[None, :], c2.to(cache_type), mask=stored & in_half[None, :])
        if REST_PAD > 0:
            c3 = x3
            if SCALE_STRIDE >= 0:
                c3 = tl.clamp(c3 / k_scale, -448.0, 448.0)
            tl.store(k_cache_ptr + target + rest[None, :], c3.to(cache_type), mask=stored & in_rest[None, :])


def rope_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache_slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    keep_keys: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Norm and rotate q and k, store k and v in the cache.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim]; its q part is overwritten, and with `keep_keys` its k part.
        positions: [tokens] int64.
        cos_sin: [max_positions, rotary_dim] float32, cosines, then sines. Dimensions from rotary_dim on pass through.
        cache_slots: [tokens] int64, block * block_size + offset; negative ones are not stored.
        key_cache, value_cache: [blocks, kv_heads, block_size, head_dim], same strides, each head's block contiguous.
        q_weight, k_weight: [head_dim]: RMSNorm over each head before the rotation (both or neither).
        k_scale, v_scale: float32, [1] or [kv_heads]: cached number * scale = value (both or neither).
        batch_invariant: one form however many tokens there are: larger thread blocks add up a norm in another order.

    Returns:
        [tokens, heads, head_dim] the rotated q, a view of qkv.
    """
    tokens = qkv.shape[0]
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    rotary_dim = cos_sin.shape[1]
    rest = head_dim - rotary_dim
    norm = q_weight is not None and k_weight is not None
    scaled = k_scale is not None and v_scale is not None
    groups = triton.cdiv(num_heads, _HEADS_AT_ONCE) + 2 * triton.cdiv(num_kv_heads, _HEADS_AT_ONCE)
    turn = overlap(len(qkv), qkv.device)
    at_once = _TOKENS_AT_ONCE if tokens >= _MANY_TOKENS and not batch_invariant else 1
    if tokens:
        _rope_cache_kernel[(triton.cdiv(tokens, at_once), groups)](
            qkv,
            positions,
            cos_sin,
            cache_slots,
            key_cache,
            value_cache,
            q_weight if norm else qkv,
            k_weight if norm else qkv,
            k_scale if scaled else cos_sin,
            v_scale if scaled else cos_sin,
            tokens,
            qkv.stride(0),
            cos_sin.stride(0),
            key_cache.stride(0),
            key_cache.stride(1),
            eps,
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            ROTARY_HALF=rotary_dim // 2,
            HALF_PAD=triton.next_power_of_2(rotary_dim // 2),
            REST_PAD=triton.next_power_of_2(rest) if rest else 0,
            DIM_PAD=triton.next_power_of_2(head_dim),
            BLOCK=block_size,
            AT_ONCE=_HEADS_AT_ONCE,
            TOKENS=at_once,
            NORM=norm,
            SCALE_STRIDE=-1 if k_scale is None or not scaled else int(k_scale.numel() > 1),
            KEEP_KEYS=keep_keys,
            OVERLAP=turn,
            **({"launch_pdl": True} if turn else {}),
            num_warps=1 if at_once == 1 else 4,
        )
    return qkv[:, : num_heads * head_dim].view(tokens, num_heads, head_dim)
