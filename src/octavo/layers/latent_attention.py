"""Multi-head latent attention (DeepSeek-V2, 2024): the cache keeps one compressed vector a token, for all heads.

The matrices that would expand it are applied to the queries and to the outputs instead, so that attention runs on the compressed
vectors themselves: one key/value head of kv_rank + rope_dim numbers, whose first kv_rank are the value.
"""

from __future__ import annotations

import torch

from octavo.layers.linear import Linear
from octavo.layers.norm import RmsNorm
from octavo.layers.rope import Rotation
from octavo.ops.program import AttendLayer
from octavo.ops.registry import Ops


class LatentAttention:
    """One layer's attention. Called as `layers.attention.Attention` is."""

    def __init__(
        self,
        layer: int,
        num_heads: int,
        q_down: Linear | None,
        q_norm: RmsNorm | None,
        q: Linear,
        kv_down: Linear,
        kv_norm: RmsNorm,
        kv_up: torch.Tensor,
        out: Linear,
        *,
        nope_dim: int,
        ops: Ops,
    ) -> None:
        """
        Args:
            q_down, q_norm: the query's own compression; None: there is none.
            q: -> num_heads * (nope_dim + rope_dim). kv_down: hidden -> kv_rank + rope_dim.
            kv_up: [num_heads * (nope_dim + value_dim), kv_rank]: for each head what makes its keys, then its values.
            out: num_heads * value_dim -> hidden.
            nope_dim: dimensions of a head that do not rotate.
        """
        self.layer = layer
        self.num_heads = num_heads
        self.q_down = q_down
        self.q_norm = q_norm
        self.q = q
        self.kv_down = kv_down
        self.kv_norm = kv_norm
        self.out = out
        self.nope_dim = nope_dim
        self.kv_rank = kv_up.shape[1]
        per_head = kv_up.view(num_heads, -1, self.kv_rank)
        self._key_up = per_head[:, :nope_dim]
        """[heads, nope_dim, kv_rank]"""
        self._value_up = per_head[:, nope_dim:].transpose(1, 2)
        """[heads, kv_rank, value_dim]"""
        self._rope = ops.rope

    def __call__(self, x: torch.Tensor, rotation: Rotation, attend: AttendLayer, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """See `layers.attention.Attention`."""
        tokens, cos_sin = x.shape[0], rotation.cos_sin
        compressed = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        q = self.q(compressed).view(tokens, self.num_heads, -1)
        q_latent = torch.bmm(q[..., : self.nope_dim].transpose(0, 1), self._key_up).transpose(0, 1)
        query = torch.cat((q_latent, self._rope(q[..., self.nope_dim :].contiguous(), cos_sin)), -1)

        kv = self.kv_down(x)
        latent = self.kv_norm(kv[:, : self.kv_rank].contiguous())
        rotated = self._rope(kv[:, self.kv_rank :].unsqueeze(1).contiguous(), cos_sin)
        key = torch.cat((latent.unsqueeze(1), rotated), -1)

        attended = attend(self.layer, query, key, key[..., : self.kv_rank])
        if wanted is not None:
            attended = attended.index_select(0, wanted)
        values = torch.bmm(attended.transpose(0, 1), self._value_up).transpose(0, 1)
        return self.out(values.flatten(1))
