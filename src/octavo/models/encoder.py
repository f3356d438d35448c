"""The encoder: one forward pass for every architecture that an `EncoderSpec` can describe. Names no device and no kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from octavo.attention.base import Attend
from octavo.layers.linear import Linear
from octavo.layers.mlp import GatedMlp, Mlp, PlainMlp, activate
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import cos_sin_table
from octavo.models.decoder import Weights
from octavo.models.encoder_spec import EncoderSpec
from octavo.ops.registry import Ops

FARTHEST = 128
"""Distance from which on all are in the last bucket of relative positions."""


@dataclass(frozen=True)
class _Layer:
    qkv: Linear
    attention_out: Linear
    attention_norm: LayerNorm | None
    mlp: Mlp
    mlp_norm: LayerNorm


class Encoder:
    """Holds weights and no state.

    Args:
        max_length: the longest text; positions are below it.
    """

    def __init__(self, spec: EncoderSpec, weights: Weights, ops: Ops, *, max_length: int) -> None:
        def linear(name: str) -> Linear:
            return Linear(weights.linears[f"{name}.weight"], weights.tensors.get(f"{name}.bias"), ops)

        def norm(name: str) -> LayerNorm | None:
            weight = weights.tensors.get(name)
            return None if weight is None else LayerNorm(weight, weights.tensors.get(f"{name}.bias"), spec.norm_eps)

        def mlp(prefix: str) -> Mlp:
            if spec.gated:
                return GatedMlp(linear(f"{prefix}gate_up"), linear(f"{prefix}down"), spec.activation, ops)
            return PlainMlp(linear(f"{prefix}up"), linear(f"{prefix}down"), spec.activation)

        def layer(prefix: str) -> _Layer:
            mlp_norm = norm(f"{prefix}mlp_norm")
            assert mlp_norm is not None
            return _Layer(linear(f"{prefix}qkv"), linear(f"{prefix}attention_out"), norm(f"{prefix}attention_norm"), mlp(prefix), mlp_norm)

        self.spec = spec
        self.layer_specs = spec.layer_specs
        self.weights_bytes = weights.nbytes
        self.weights_kinds = weights.kinds
        tensors = weights.tensors
        self._rope = ops.rope
        self._embed, self._positions, self._token_types = tensors["embed"], tensors.get("positions"), tensors.get("token_types")
        self._relative_bias = tensors.get("relative_bias")
        self._embed_norm = norm("embed_norm")
        self._projection = linear("embed_projection") if spec.embedding_size != spec.hidden_size else None
        self._layers = tuple(layer(f"layers.{i}.") for i in range(spec.num_layers))
        self._norm = norm("norm")
        self._tables = {rope: cos_sin_table(rope, rope.rotary_dim, max_length, self._embed.device) for rope in dict.fromkeys(spec.ropes)}
        self._dense = linear("classifier.dense") if spec.labels else None
        self._dense_norm = norm("classifier.norm")
        self._out = linear("classifier.out") if spec.labels else None

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, token_types: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states of a step's tokens.

        Args:
            token_ids, positions: [tokens] int64. Positions count from 0 in each text.
            token_types: [tokens] int64: 1 in the second text of a pair. None: 0 everywhere.

        Returns:
            [tokens, hidden]
        """
        spec = self.spec
        x = F.embedding(token_ids, self._embed)
        if self._positions is not None:
            x = x + F.embedding(positions + spec.first_position, self._positions)
        if self._token_types is not None:
            known = torch.zeros_like(token_ids) if token_types is None else token_types.clamp(max=spec.token_types - 1)
            x = x + F.embedding(known, self._token_types)
        if self._embed_norm is not None:
            x = self._embed_norm(x)
        if self._projection is not None:
            x = self._projection(x)
        rotations = {rope: table[positions] for rope, table in self._tables.items()}
        for index, layer in enumerate(self._layers):
            cos_sin = rotations[spec.ropes[index]] if spec.ropes else None
            x = self._before(index, layer, x, cos_sin, attend) if spec.pre_norm else self._behind(index, layer, x, cos_sin, attend)
        return x if self._norm is None else self._norm(x)

    def _before(self, index: int, layer: _Layer, x: torch.Tensor, cos_sin: torch.Tensor | None, attend: Attend) -> torch.Tensor:
        """A layer with norms in front of its blocks."""
        read = x if layer.attention_norm is None else layer.attention_norm(x)
        read, x = layer.mlp_norm.add(self._attention(index, layer, read, cos_sin, attend), x)
        return x + layer.mlp(read)

    def _behind(self, index: int, layer: _Layer, x: torch.Tensor, cos_sin: torch.Tensor | None, attend: Attend) -> torch.Tensor:
        """A layer with norms behind its blocks."""
        assert layer.attention_norm is not None
        x, _ = layer.attention_norm.add(self._attention(index, layer, x, cos_sin, attend), x)
        x, _ = layer.mlp_norm.add(layer.mlp(x), x)
        return x

    def _attention(self, index: int, layer: _Layer, x: torch.Tensor, cos_sin: torch.Tensor | None, attend: Attend) -> torch.Tensor:
        heads = self.spec.num_heads
        qkv = layer.qkv(x).view(x.shape[0], 3 * heads, -1)
        qk = qkv[:, : 2 * heads]
        if cos_sin is not None:
            qk = self._rope(qk, cos_sin)
        return layer.attention_out(attend(index, qk[:, :heads], qk[:, heads:], qkv[:, 2 * heads :]).flatten(1))

    def relative_bias(self, length: int) -> torch.Tensor | None:
        """[heads, length, length]: what is added to the scores of queries and keys so far apart; None: nothing is."""
        if self._relative_bias is None:
            return None
        place = torch.arange(length, device=self._relative_bias.device)
        buckets = relative_buckets(place[None, :] - place[:, None], len(self._relative_bias))
        return self._relative_bias[buckets].permute(2, 0, 1)

    @torch.inference_mode()
    def classify(self, first: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] pooled hidden states -> [rows, labels]."""
        assert self._dense is not None and self._out is not None
        x = self._dense(first)
        match self.spec.dense_activation:
            case "tanh":
                x = torch.tanh(x)
            case "relu" | "silu" | "gelu" as named:
                x = activate(x, named)
        return self._out(x if self._dense_norm is None else self._dense_norm(x))


def relative_buckets(distance: torch.Tensor, buckets: int) -> torch.Tensor:
    """The bucket of each distance (of a key behind its query): half of them for either side, exact while near, logarithmic farther off."""
    half = buckets // 2
    near = half // 2
    far = distance.abs()
    scaled = torch.log(far.clamp(min=1).float() / near) / math.log(FARTHEST / near) * (half - near)
    bucket = torch.where(far < near, far, (near + scaled.long()).clamp(max=half - 1))
    return bucket + (distance > 0) * half
