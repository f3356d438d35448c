"""The decoder: one forward pass for every architecture that a `ModelSpec` can describe. Names no device and no kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.attention.base import Attend, LayerSpec
from octavo.layers.attention import Attention, QkNorm
from octavo.layers.linear import Linear
from octavo.layers.mlp import GatedMlp
from octavo.layers.rope import Rotation, cos_sin_table
from octavo.models.spec import ModelSpec
from octavo.ops.packed import LinearWeight, PanelWeight
from octavo.ops.registry import Ops


class Model(Protocol):
    """What a worker needs of a model."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]: ...

    @property
    def weights_bytes(self) -> int: ...

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of a step's tokens, which may belong to any number of sequences.

        Args:
            token_ids: [tokens] int64
            positions: [tokens] int64, below the longest sequence served.
            attend: this step's attention, which knows which token belongs to whom.
            wanted: [wanted] integers, ascending: the tokens whose hidden states are wanted; None: all. The last layer computes only the
                keys and values of the others.

        Returns:
            [tokens, hidden], or [wanted, hidden], after the final norm.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] float32."""

    def compact_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab]: the same numbers in the narrowest dtype that holds them exactly."""


@dataclass(frozen=True)
class Weights:
    """The filled parameters, by name (see `spec.parameters`)."""

    tensors: Mapping[str, torch.Tensor]
    """Embedding, norms and biases."""
    linears: Mapping[str, LinearWeight]
    """Packed; `head` is among them also when it is tied."""
    panels: Mapping[str, PanelWeight]
    """Linear layers and embedding instead, where they were packed for a compiled decoder; a tied head is `embed`."""
    nbytes: int
    """All of it in memory, a tied head counted again where it is packed apart from the embedding."""


@dataclass(frozen=True)
class _Layer:
    attention: Attention
    mlp: GatedMlp
    attention_post_norm: torch.Tensor | None
    """[hidden]; norm of the attention block's output."""
    mlp_norm: torch.Tensor | None
    """[hidden]; norm in front of the MLP."""
    mlp_post_norm: torch.Tensor | None
    """[hidden]; norm of the MLP's output."""
    next_norm: torch.Tensor | None
    """[hidden]; the norm in front of what follows: the next layer's attention, or the head."""


class Decoder:
    """A decoder-only transformer. Holds weights and no state: the KV cache is behind `attend`."""

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops, *, max_length: int) -> None:
        """
        Args:
            max_length: the longest sequence served; positions are below it.
        """
        self.spec = spec
        self.layer_specs = spec.layer_specs
        self.weights_bytes = weights.nbytes
        self._ops = ops
        self._embedding = weights.tensors["embed"]
        self._head = Linear(weights.linears["head"], None, ops)
        self._first_norm = weights.tensors.get("layers.0.attention_norm")
        self._layers = tuple(_layer(i, spec, weights, ops) for i in range(spec.num_layers))
        self._cos_sin = cos_sin_table(spec.rope, max_length, self._embedding.device)

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """See `Model.forward`."""
        ops, spec = self._ops, self.spec
        rotation = Rotation(self._cos_sin, positions)
        residual = ops.embedding(token_ids, self._embedding)
        if spec.embedding_scale != 1.0:
            residual = residual * spec.embedding_scale
        x = residual if self._first_norm is None else ops.rms_norm(residual, self._first_norm, spec.norm_eps)
        last = self._layers[-1]
        for layer in self._layers:
            chosen = wanted if layer is last else None
            x = layer.attention(x, rotation, attend, chosen)
            if chosen is not None:
                residual = residual.index_select(0, chosen)
                if not len(chosen):
                    return residual
            x, residual = self._join(x, residual, layer.attention_post_norm, layer.mlp_norm)
            x, residual = self._join(layer.mlp(x), residual, layer.mlp_post_norm, layer.next_norm)
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self.compact_logits(hidden).float()

    @torch.inference_mode()
    def compact_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.compact_logits`: as the head computes them, unless they are scaled or capped, which is done in float32."""
        logits = self._head(hidden)
        if self.spec.logit_scale == 1.0 and self.spec.logit_soft_cap is None:
            return logits
        logits = logits.float()
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if (cap := self.spec.logit_soft_cap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _join(
        self, x: torch.Tensor, residual: torch.Tensor, post_norm: torch.Tensor | None, next_norm: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a block's output to the residual stream; what the next block reads, and the new stream."""
        eps = self.spec.norm_eps
        if post_norm is not None:
            x = self._ops.rms_norm(x, post_norm, eps)
        if self.spec.residual_multiplier != 1.0:
            x = x * self.spec.residual_multiplier
        if next_norm is None:
            residual = residual + x
            return residual, residual
        return self._ops.add_rms_norm(x, residual, next_norm, eps)


def _layer(index: int, spec: ModelSpec, weights: Weights, ops: Ops) -> _Layer:
    def tensor(name: str) -> torch.Tensor | None:
        return weights.tensors.get(f"layers.{index}.{name}")

    def linear(name: str) -> Linear:
        return Linear(weights.linears[f"layers.{index}.{name}.weight"], tensor(name + ".bias"), ops)

    q_norm, k_norm = tensor("q_norm"), tensor("k_norm")
    qk_norm = None if q_norm is None or k_norm is None else QkNorm(q_norm, k_norm, spec.norm_eps)
    last = index == spec.num_layers - 1
    return _Layer(
        attention=Attention(index, spec.num_heads, spec.num_kv_heads, spec.head_dim, linear("qkv"), linear("attention_out"), qk_norm, ops),
        mlp=GatedMlp(linear("gate_up"), linear("down"), spec.mlp.activation, ops),
        attention_post_norm=tensor("attention_post_norm"),
        mlp_norm=tensor("mlp_norm"),
        mlp_post_norm=tensor("mlp_post_norm"),
        next_norm=weights.tensors["norm"] if last else weights.tensors.get(f"layers.{index + 1}.attention_norm"),
    )
