"""Causal attention in the plainest torch that is right: the oracle that every attention backend is tested against."""

from __future__ import annotations

import torch


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: tuple[float, ...] | None = None,
) -> torch.Tensor:
    """The last `n` tokens of one sequence attend to all of it, in float64.

    Head `h` reads key/value head `h // (heads // kv_heads)` (grouped-query attention, Ainslie et al. 2023). A query at position
    p sees positions max(0, p - sliding_window + 1) .. p. With `soft_cap` c, scores s become c * tanh(s / c). With `sinks`, head h
    has one more score, sinks[h], whose value is zero.

    Args:
        q: [n, heads, head_dim], the queries of positions length - n .. length - 1.
        k, v: [length, kv_heads, head_dim]; v may have another number of dimensions.

    Returns:
        [n, heads, dimensions of v] in q's dtype.
    """
    n, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    out = q.new_empty(n, heads, v.shape[-1])
    for i in range(n):
        position = length - n + i
        first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            keys = k[first : position + 1, kv_head].double()
            scores = keys @ q[i, head].double() * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat((scores, scores.new_tensor([sinks[head]])))
            weights = torch.softmax(scores, dim=0)[: len(keys)]
            out[i, head] = (weights @ v[first : position + 1, kv_head].double()).to(q.dtype)
    return out
