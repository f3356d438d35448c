"""Attention of whole prompts, without a KV cache: for models that pool.

The step's tokens lie one prompt after the other. They are padded to a rectangle for torch's fused attention; prompts of a step are
of similar length (`worker/pooling.py` sees to it), so little is wasted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from octavo.attention.base import LayerSpec


class PromptAttention:
    """The attention of one step. Implements `Attend`."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        lengths: Sequence[int],
        device: torch.device,
        *,
        causal: bool,
        bias: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            lengths: tokens of each prompt, in the order of the step.
            causal: False: every token sees its whole prompt, or its window to both sides.
            bias: [heads, longest, longest] added to the scores of every layer; for layers without soft cap and sinks.
        """
        self._layers = layers
        self._causal = causal
        self._rows, self._longest = len(lengths), max(lengths)
        counts = torch.tensor(lengths)
        self._padded = int(counts.min()) < self._longest
        place = torch.arange(self._longest).expand(self._rows, -1)
        real = place < counts[:, None]
        self._places = real.flatten().nonzero().squeeze(1).to(device)
        """[tokens] where each token of the step lies in the rectangle."""
        self._real = real.to(device)
        self._bias = bias
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `Attend`."""
        spec = self._layers[layer]
        queries, keys, values = (self._rectangle(t) for t in (q, k, v))
        group = spec.num_heads // spec.num_kv_heads
        if group > 1:
            keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
        mask = self._mask(spec.sliding_window)
        plain = mask is None and self._causal
        if spec.soft_cap is None and spec.sinks is None:
            if self._bias is not None:
                mask = self._bias[None] if mask is None else torch.where(mask, self._bias, -torch.inf)
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=plain, scale=spec.scale)
        else:
            scores = queries.float() @ keys.float().transpose(-1, -2) * spec.scale
            if spec.soft_cap is not None:
                scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
            seen = mask if mask is not None else self._square(None) if self._causal else None
            scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
            if spec.sinks is not None:
                sinks = scores.new_tensor(spec.sinks)[:, None, None].expand(*scores.shape[:-1], 1)
                scores = torch.cat((scores, sinks), -1)
            out = (scores.softmax(-1)[..., : self._longest] @ values.float()).to(q.dtype)
        return out.transpose(1, 2).reshape(-1, *out.shape[1::2])[self._places]

    def _rectangle(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] -> [rows, heads, longest, dim], zeros where there is no token."""
        wide = x.new_zeros(self._rows * self._longest, *x.shape[1:])
        wide[self._places] = x
        return wide.view(self._rows, self._longest, *x.shape[1:]).transpose(1, 2)

    def _mask(self, window: int | None) -> torch.Tensor | None:
        """[rows or 1, 1, longest, longest] or [rows, 1, 1, longest]: true where a query sees a key; None: causality, if any, is all."""
        if window is not None and window >= self._longest:
            window = None
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> torch.Tensor | None:
        if self._causal:  # padding lies behind every token, so that no token sees any
            return None if window is None else self._square(window)
        padding = self._real[:, None, None, :] if self._padded else None
        if window is None:
            return padding
        square = self._square(window)
        # A query in the padding may see nothing at all; its own place keeps its row finite.
        return square if padding is None else (square & padding) | torch.eye(self._longest, dtype=torch.bool, device=square.device)

    def _square(self, window: int | None) -> torch.Tensor:
        place = torch.arange(self._longest, device=self._real.device)
        distance = place[:, None] - place[None, :]
        seen = distance >= 0 if self._causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            seen = seen & (distance.abs() < window)
        return seen[None, None]
