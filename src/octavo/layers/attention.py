"""The attention block around the KV cache: fused qkv, optional QK-norm, rotation, the step's `Attend`, output projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from octavo.layers.alibi import with_positions
from octavo.layers.linear import Linear
from octavo.layers.query_growth import QueryGrowth
from octavo.layers.rope import Rotation
from octavo.ops.program import AttendLayer
from octavo.ops.registry import Ops
from octavo.parallel.group import ALONE, TensorGroup


@dataclass(frozen=True)
class QkNorm:
    """RMSNorm of each head of q and k, before the rotation (Henry et al. 2020) or behind it (Hunyuan)."""

    q: torch.Tensor
    """[head_dim]"""
    k: torch.Tensor
    """[head_dim]"""
    eps: float
    last: bool = False
    """Behind the rotation."""


@dataclass(frozen=True)
class WideQkNorm:
    """The other norms of q and k: layer norms, weights for each head, or one norm over all heads (OLMo 2)."""

    q: torch.Tensor
    """[head_dim], [heads, head_dim] or [heads * head_dim]"""
    k: torch.Tensor
    """The same with kv_heads."""
    eps: float
    kind: Literal["rms", "layer"]
    whole: bool
    """Over all heads at once, also those of other ranks."""
    group: TensorGroup = ALONE
    q_bias: torch.Tensor | None = None
    """As q."""
    k_bias: torch.Tensor | None = None

    def apply(self, qkv: torch.Tensor, heads: int, kv_heads: int) -> None:
        """Norm the q and k in qkv [tokens, heads + 2 * kv_heads, head_dim], in place."""
        for first, last, weight, bias in ((0, heads, self.q, self.q_bias), (heads, heads + kv_heads, self.k, self.k_bias)):
            part = qkv[:, first:last]
            wide = (part.flatten(1) if self.whole else part).float()
            if self.kind == "layer":
                wide = wide - self._mean(wide)
            wide = wide * torch.rsqrt(self._mean(wide.square()) + self.eps)
            normed = wide.to(qkv.dtype) * weight
            part.copy_((normed if bias is None else normed + bias).view_as(part))

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last dimension. Ranks have equally many heads (the same ones, where there are fewer than ranks): a mean of means."""
        mean = x.mean(-1, keepdim=True)
        return self.group.sum(mean) / self.group.size if self.whole and self.group.size > 1 else mean


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
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv: Linear,
        out: Linear,
        qk_norm: QkNorm | WideQkNorm | None,
        ops: Ops,
        *,
        clip: float | None = None,
        alibi: tuple[torch.Tensor, float] | None = None,
        growth: QueryGrowth | None = None,
    ) -> None:
        """
        Args:
            qkv: hidden -> (num_heads + 2 * num_kv_heads) * head_dim: all of q, then k, then v.
            out: num_heads * head_dim -> hidden.
            clip: see `ModelSpec.clip_qkv`; no norm of single heads goes with it.
            alibi: the slopes [heads], and what the attention multiplies scores with.
            growth: of the queries behind their rotation.
        """
        self.layer = layer
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.qkv = qkv
        self.out = out
        self.qk_norm = qk_norm
        self._ops = ops
        self._clip = clip
        self._alibi = alibi
        self._growth = growth

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
        projected, qk_norm = self.qkv(x), self.qk_norm
        if isinstance(qk_norm, WideQkNorm):
            qk_norm.apply(projected.view(x.shape[0], -1, self.head_dim), self.num_heads, self.num_kv_heads)
            qk_norm = None
        if self._clip is not None:
            projected = projected.clamp(-self._clip, self._clip)
        if self._alibi is not None or self._growth is not None or (qk_norm is not None and qk_norm.last):  # no fused kernel does that
            attended = self._attend(projected, rotation, qk_norm, attend)
            return self.out(attended if wanted is None else attended.index_select(0, wanted))
        if wanted is not None and isinstance(attend, WantedAttend) and attend.can_select:
            return self.out(attend.attend_wanted(self.layer, projected, rotation, qk_norm, wanted))
        if isinstance(attend, FusedAttend):
            attended = attend.attend_qkv(self.layer, projected, rotation, qk_norm)
        else:
            attended = self._attend(projected, rotation, qk_norm, attend)
        return self.out(attended if wanted is None else attended.index_select(0, wanted))

    def _attend(self, projected: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, attend: AttendLayer) -> torch.Tensor:
        """Norm, rotation and attention one after the other. [tokens, (heads + 2 * kv_heads) * head_dim] -> [tokens, heads * head_dim]"""
        ops, heads, kv_heads, tokens = self._ops, self.num_heads, self.num_kv_heads, projected.shape[0]
        cos_sin = rotation.cos_sin
        qkv = projected.view(tokens, heads + 2 * kv_heads, self.head_dim)
        if qk_norm is None or qk_norm.last:
            qk = ops.rope(qkv[:, : heads + kv_heads], cos_sin)  # one launch for q and k: they lie side by side
            q, k = qk[:, :heads], qk[:, heads:]
            if qk_norm is not None:
                q, k = ops.rms_norm(q, qk_norm.q, qk_norm.eps), ops.rms_norm(k, qk_norm.k, qk_norm.eps)
        else:
            q = ops.rope(ops.rms_norm(qkv[:, :heads], qk_norm.q, qk_norm.eps), cos_sin)
            k = ops.rope(ops.rms_norm(qkv[:, heads : heads + kv_heads], qk_norm.k, qk_norm.eps), cos_sin)
        if self._growth is not None:
            q = q * self._growth.factor(rotation.positions)[:, None, None].to(q.dtype)
        v = qkv[:, heads + kv_heads :]
        if self._alibi is not None:
            q, k, v = with_positions(q, k, v, rotation.positions, *self._alibi)
        return attend(self.layer, q, k, v)[..., : self.head_dim].reshape(tokens, heads * self.head_dim)
