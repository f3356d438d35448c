"""The encoder: one forward pass for every architecture that an `EncoderSpec` can describe. Names no device and no kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from octavo.attention.base import Attend
from octavo.layers.linear import Linear
from octavo.layers.mlp import PlainMlp
from octavo.layers.norm import LayerNorm
from octavo.models.decoder import Weights
from octavo.models.encoder_spec import EncoderSpec
from octavo.ops.registry import Ops


@dataclass(frozen=True)
class _Layer:
    qkv: Linear
    attention_out: Linear
    attention_norm: LayerNorm
    mlp: PlainMlp
    mlp_norm: LayerNorm


class Encoder:
    """Holds weights and no state."""

    def __init__(self, spec: EncoderSpec, weights: Weights, ops: Ops) -> None:
        def linear(name: str) -> Linear:
            return Linear(weights.linears[f"{name}.weight"], weights.tensors[f"{name}.bias"], ops)

        def norm(name: str) -> LayerNorm:
            return LayerNorm(weights.tensors[name], weights.tensors[f"{name}.bias"], spec.norm_eps)

        self.spec = spec
        self.layer_specs = spec.layer_specs
        self.weights_bytes = weights.nbytes
        self.weights_kinds = weights.kinds
        tensors = weights.tensors
        self._embed, self._positions, self._token_types = tensors["embed"], tensors["positions"], tensors.get("token_types")
        self._embed_norm = norm("embed_norm")
        self._projection = linear("embed_projection") if spec.embedding_size != spec.hidden_size else None
        self._layers = tuple(
            _Layer(
                linear(f"layers.{i}.qkv"),
                linear(f"layers.{i}.attention_out"),
                norm(f"layers.{i}.attention_norm"),
                PlainMlp(linear(f"layers.{i}.up"), linear(f"layers.{i}.down"), spec.activation),
                norm(f"layers.{i}.mlp_norm"),
            )
            for i in range(spec.num_layers)
        )
        self._dense = linear("classifier.dense") if spec.labels else None
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
        x = F.embedding(token_ids, self._embed) + F.embedding(positions + self.spec.first_position, self._positions)
        if self._token_types is not None:
            known = torch.zeros_like(token_ids) if token_types is None else token_types.clamp(max=self.spec.token_types - 1)
            x = x + F.embedding(known, self._token_types)
        x = self._embed_norm(x)
        if self._projection is not None:
            x = self._projection(x)
        heads = self.spec.num_heads
        for index, layer in enumerate(self._layers):
            q, k, v = layer.qkv(x).view(x.shape[0], 3, heads, -1).unbind(1)
            x, _ = layer.attention_norm.add(layer.attention_out(attend(index, q, k, v).flatten(1)), x)
            x, _ = layer.mlp_norm.add(layer.mlp(x), x)
        return x

    @torch.inference_mode()
    def classify(self, first: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] hidden states of the first tokens -> [rows, labels]."""
        assert self._dense is not None and self._out is not None
        x = self._dense(first)
        match self.spec.dense_activation:
            case "relu":
                x = F.relu(x)
            case "gelu":
                x = F.gelu(x)
            case _:
                x = torch.tanh(x)
        return self._out(x)
