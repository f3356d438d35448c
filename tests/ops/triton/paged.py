"""Random paged caches, poisoned wherever no one may look, and attention over them in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedCase:
    q: torch.Tensor
    """[tokens, heads, head_dim]"""
    key_cache: torch.Tensor
    """[blocks, kv_heads, block, head_dim]"""
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    starts: list[int]
    counts: list[int]
    keys: list[torch.Tensor]
    """By row: [kv_heads, context, head_dim] as cached, before the scale of a quantised cache."""
    values: list[torch.Tensor]


def paged_case(
    starts: list[int],
    counts: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    cache_dtype: torch.dtype | None = None,
    block: int = 16,
) -> PagedCase:
    """Every cache slot that holds no token of a row is NaN: the null block, spare blocks, the rest of each last block.

    The default dtype is bf16 on a GPU; Triton's interpreter cannot multiply bf16, so float16 there.
    """
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float16)
    cache_dtype = cache_dtype or dtype
    contexts = [start + count for start, count in zip(starts, counts, strict=True)]
    needed = [-(-context // block) for context in contexts]
    num_blocks = sum(needed) + 3
    order = (torch.randperm(num_blocks - 1) + 1).tolist()
    tables = torch.zeros(len(contexts), max(needed) + 2, dtype=torch.int32)
    caches = [torch.full((num_blocks, kv_heads, block, head_dim), math.nan, device=device).to(cache_dtype) for _ in range(2)]
    rows: list[list[torch.Tensor]] = [[], []]
    for row, context in enumerate(contexts):
        blocks = [order.pop() for _ in range(needed[row])]
        tables[row, : needed[row]] = torch.tensor(blocks, dtype=torch.int32)
        for cache, kept in zip(caches, rows, strict=True):
            x = torch.randn(kv_heads, context, head_dim, device=device)
            kept.append(x.to(cache_dtype))
            filled = torch.nn.functional.pad(x, (0, 0, 0, -context % block), value=math.nan).to(cache_dtype)
            # Eight bytes at a time: torch does not index float8.
            cache.view(torch.int64)[blocks] = filled.view(torch.int64).view(kv_heads, len(blocks), block, -1).transpose(0, 1)
    q = torch.randn(sum(counts), heads, head_dim, device=device).to(dtype)
    key_cache, value_cache = caches
    return PagedCase(q, key_cache, value_cache, tables.to(device), starts, counts, rows[0], rows[1])


def attention_reference(
    case: PagedCase,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens, heads, head_dim] float64."""
    outs, token = [], 0
    group = case.q.shape[1] // case.key_cache.shape[1]
    for start, count, keys, values in zip(case.starts, case.counts, case.keys, case.values, strict=True):
        k, v = keys.double(), values.double()
        if k_scale is not None and v_scale is not None:
            k, v = k * k_scale.double()[:, None, None], v * v_scale.double()[:, None, None]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        q = case.q[token : token + count].double()
        scores = torch.einsum("thd,hsd->hts", q, k) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        key_pos = torch.arange(start + count, device=q.device)
        query_pos = torch.arange(start, start + count, device=q.device)[:, None]
        hidden = key_pos > query_pos
        if sliding_window is not None:
            hidden = hidden | (key_pos <= query_pos - sliding_window)
        probabilities = scores.masked_fill(hidden, -math.inf).softmax(-1)
        outs.append(torch.einsum("hts,hsd->thd", probabilities, v))
        token += count
    return torch.cat(outs)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - ref|| / ||ref||; NaN anywhere makes it NaN, which no bound accepts."""
    return float((out.double() - reference).norm() / reference.norm())
