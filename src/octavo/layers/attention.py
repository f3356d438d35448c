"""The attention block around the KV cache: fused qkv, optional QK-norm, rotation, the step's `Attend`, output projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from octavo.layers.linear import Linear
from octavo.layers.rope import Rotation
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


@runtime_checkable
class FusedAttend(Protocol):
    """What a step's `Attend` may offer besides: everything between the qkv projection and the output projection."""

    def attend_qkv(self, layer: int, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None) -> torch.Tensor:
        """Norm and rotate q and k, store k and v in the cache, attend.

        Args:
            qkv: [tokens, (heads + 2 * kv_heads) * head_dim]; may be overwritten.

        Returns:
            [tokens, heads * head_dim]
        """


@runtime_checkable
class WantedAttend(FusedAttend, Protocol):
    """What a `FusedAttend` may offer besides, if its step wants only some tokens of the last layer."""

    @property
    def can_select(self) -> bool:
        """Whether it was planned for that."""

    def attend_wanted(
        self, layer: int, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, wanted: torch.Tensor
    ) -> torch.Tensor:
        """`attend_qkv`, where only some tokens attend: keys and values of all are stored.

        Args:
            wanted: [wanted] integers, the tokens: the last ones of the rows that were named to the plan.

        Returns:
            [wanted, heads * head_dim]
        """


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

    def __call__(self, x: torch.Tensor, rotation: Rotation, attend: AttendLayer, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            x: [tokens, hidden]
            rotation: of the tokens' positions.
            attend: a `FusedAttend` is given the projection as it is.
            wanted: [wanted] integers, the tokens whose result is needed; None: all.

        Returns:
            [tokens, hidden], or [wanted, hidden].
        """
        projected = self.qkv(x)
        if wanted is not None and isinstance(attend, WantedAttend) and attend.can_select:
            return self.out(attend.attend_wanted(self.layer, projected, rotation, self.qk_norm, wanted))
        if isinstance(attend, FusedAttend):
            attended = attend.attend_qkv(self.layer, projected, rotation, self.qk_norm)
        else:
            attended = self._attend(projected, rotation, attend)
        return self.out(attended if wanted is None else attended.index_select(0, wanted))

    def _attend(self, projected: torch.Tensor, rotation: Rotation, attend: AttendLayer) -> torch.Tensor:
        """Norm, rotation and attention one after the other. [tokens, (heads + 2 * kv_heads) * head_dim] -> [tokens, heads * head_dim]"""
        ops, heads, kv_heads, tokens = self._ops, self.num_heads, self.num_kv_heads, projected.shape[0]
        cos_sin = rotation.cos_sin
        qkv = projected.view(tokens, heads + 2 * kv_heads, self.head_dim)
        if self.qk_norm is None:
            qk = ops.rope(qkv[:, : heads + kv_heads], cos_sin)  # one launch for q and k: they lie side by side
            q, k = qk[:, :heads], qk[:, heads:]
        else:
            q = ops.rope(ops.rms_norm(qkv[:, :heads], self.qk_norm.q, self.qk_norm.eps), cos_sin)
            k = ops.rope(ops.rms_norm(qkv[:, heads : heads + kv_heads], self.qk_norm.k, self.qk_norm.eps), cos_sin)
        return attend(self.layer, q, k, qkv[:, heads + kv_heads :]).reshape(tokens, heads * self.head_dim)
