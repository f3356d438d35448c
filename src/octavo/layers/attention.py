"""The attention block around the KV cache: fused qkv, optional QK-norm, rotation, the step's `Attend`, output projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.layers.linear import Linear
from octavo.ops.program import AttendLayer
from octavo.ops.registry import Ops


@dataclass(frozen=True)
class QkNorm:
    """RMSNorm of each head of q and k, before the rotation (Henry et al. 2020)."""

    q: torch.Tensor
    """[head_dim]"""
    k: torch.Tensor
    """[head_dim]"""
    eps: float


class Attention:
    """One layer's attention."""

    def __init__(
        self, layer: int, num_heads: int, num_kv_heads: int, head_dim: int, qkv: Linear, out: Linear, qk_norm: QkNorm | None, ops: Ops
    ) -> None:
        """
        Args:
            qkv: hidden -> (num_heads + 2 * num_kv_heads) * head_dim: all of q, then k, then v.
            out: num_heads * head_dim -> hidden.
        """
        self.layer = layer
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.qkv = qkv
        self.out = out
        self.qk_norm = qk_norm
        self._ops = ops

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, attend: AttendLayer) -> torch.Tensor:
        """
        Args:
            x: [tokens, hidden]
            cos_sin: [tokens, rotary_dim] float32, of the tokens' positions.

        Returns:
            [tokens, hidden]
        """
        ops, heads, kv_heads = self._ops, self.num_heads, self.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        if self.qk_norm is None:
            qk = ops.rope(qkv[:, : heads + kv_heads], cos_sin)  # one launch for q and k: they lie side by side
            q, k = qk[:, :heads], qk[:, heads:]
        else:
            q = ops.rope(ops.rms_norm(qkv[:, :heads], self.qk_norm.q, self.qk_norm.eps), cos_sin)
            k = ops.rope(ops.rms_norm(qkv[:, heads : heads + kv_heads], self.qk_norm.k, self.qk_norm.eps), cos_sin)
        attended = attend(self.layer, q, k, qkv[:, heads + kv_heads :])
        return self.out(attended.reshape(x.shape[0], heads * self.head_dim))
