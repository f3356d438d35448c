"""The decoder: one forward pass for every architecture that a `ModelSpec` can describe. Names no device and no kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from octavo.attention.base import Attend, KvScales, LayerSpec
from octavo.layers.attention import Attention, QkNorm, WideQkNorm
from octavo.layers.latent_attention import LatentAttention
from octavo.layers.linear import Linear
from octavo.layers.mlp import GatedMlp, Mlp, PlainMlp
from octavo.layers.moe import ExactRouter, Moe
from octavo.layers.norm import LayerNorm, Norm, RmsNorm
from octavo.layers.rope import Rotation, cos_sin_table
from octavo.models.sharding import WHOLE_MODEL, Shard, shard_spec
from octavo.models.spec import MlpSpec, ModelSpec, MoeSpec
from octavo.ops.packed import ExpertsWeight, LinearWeight, PanelWeight
from octavo.ops.registry import Ops
from octavo.parallel.group import ALONE, TensorGroup
from octavo.parallel.pipeline import NO_PIPELINE, Pipeline


class Layers(Protocol):
    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None,
        entering: torch.Tensor | None,
    ) -> torch.Tensor:
        """`Model.forward` of the layers that are here, with nothing received and nothing sent.

        Args:
            entering: [tokens, hidden], the residual stream at the first of them, where that is not the model's first. May be overwritten.

        Returns:
            what `Model.forward` does or, where other layers follow, the residual stream, [tokens, hidden].
        """


@dataclass(frozen=True)
class Stage:
    """A model's share of a pipeline, for who computes and passes on hidden states in steps of its own."""

    pipeline: Pipeline
    layers: Layers
    dtype: torch.dtype
    """Of hidden states."""

    @property
    def receives(self) -> bool:
        """Whether others have the layers before."""
        return self.pipeline.stage > 0


class Model(Protocol):
    """What a worker needs of a model."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]: ...

    @property
    def weights_bytes(self) -> int: ...

    @property
    def weights_kinds(self) -> Mapping[str, int]:
        """`weights_bytes` by what the weights are stored as, in words."""

    @property
    def kv_scales(self) -> Mapping[int, KvScales]:
        """By layer, of a float8 KV cache, where the checkpoint has them."""

    @property
    def capturable(self) -> bool:
        """Whether a forward pass never waits for the device, so that it can be part of a CUDA graph."""

    @property
    def stage(self) -> Stage | None:
        """None: all layers are here."""

    @property
    def makes_logits(self) -> bool:
        """Whether the last layer and the head are here; else another rank samples."""

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
    kinds: Mapping[str, int]
    """Bytes in memory by what they are stored as, a tied head counted again where it is packed apart from the embedding."""
    kv_scales: Mapping[int, KvScales] = field(default_factory=dict)
    """By layer, of a float8 KV cache."""
    experts: Mapping[str, ExpertsWeight] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True)
class _Layer:
    attention: Attention | LatentAttention
    mlp: Mlp
    attention_post_norm: Norm | None
    """Of the attention block's output."""
    mlp_norm: Norm | None
    """In front of the MLP."""
    mlp_post_norm: Norm | None
    """Of the MLP's output."""
    next_norm: Norm | None
    """In front of what follows: the next layer's attention, or the head."""


@dataclass(frozen=True)
class Products:
    """The linear layers that all rows of a step pass."""

    layers: tuple[tuple[Linear, ...], ...]
    """Of each layer here, without its experts."""
    head: Linear | None


class Decoder:
    """A decoder-only transformer. Holds weights and no state: the KV cache is behind `attend`."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        ops: Ops,
        *,
        max_length: int,
        group: TensorGroup = ALONE,
        pipeline: Pipeline = NO_PIPELINE,
        shard: Shard = WHOLE_MODEL,
    ) -> None:
        """
        Args:
            spec: of the whole model.
            weights: of this rank's share.
            max_length: the longest sequence served; positions are below it.
            group: the ranks that compute the model together. What a block gives is this rank's part of a sum.
            pipeline: where hidden states come from and go to, if others have the other layers.
            shard: this rank's share.
        """
        self.spec = spec
        self._group = group
        share = shard_spec(spec, shard)
        layers = shard.layers(spec.num_layers)
        self._pipeline = pipeline
        self._first, self.makes_logits = shard.first, shard.last
        self.capturable = True
        self.layer_specs = _with_sinks(share.layer_specs, weights)[layers.start : layers.stop]
        self.weights_bytes = weights.nbytes
        self.weights_kinds = weights.kinds
        self.kv_scales = weights.kv_scales
        self._ops = ops
        self._embedding = weights.tensors.get("embed")
        self._first_token = shard.rank * share.vocab_size
        norm = next(t for name, t in weights.tensors.items() if name.endswith("norm"))
        self._dtype, device = norm.dtype, norm.device
        self.stage = Stage(pipeline, self._run, self._dtype) if shard.stages > 1 else None
        # Gemma was trained with the scale in the model's own precision.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=self._dtype))
        self._positions = weights.tensors.get("positions")
        self._head = Linear(weights.linears["head"], weights.tensors.get("head.bias"), ops) if spec.has_head and shard.last else None
        self._embedding_norm = _norm("embed_norm", spec, weights, ops)
        self._plain_embedding = self._embedding_scale == 1.0 and self._embedding_norm is None and self._positions is None
        self._first_norm = _norm(f"layers.{layers.start}.attention_norm", spec, weights, ops)
        parts = _Parts(share, weights, ops, group, shard)
        self._layers = tuple(_layer(i, parts) for i in layers)
        self.products = Products(tuple(_products(i, weights, ops) for i in layers), self._head)
        tables = {rope: cos_sin_table(rope, spec.rope.rotary_dim, max_length, device) for rope in dict.fromkeys(spec.ropes)}
        self._tables = list(tables.values())
        self._rope_of_layer = [list(tables).index(spec.ropes[i]) for i in layers]

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """See `Model.forward`."""
        entering = None
        if not self._first:
            place = torch.empty(len(token_ids), self.spec.hidden_size, dtype=self._dtype, device=token_ids.device)
            entering = self._pipeline.receive(place)
        hidden = self._run(token_ids, positions, attend, wanted, entering)
        if not self.makes_logits:
            self._pipeline.send(hidden)
        return hidden

    @torch.inference_mode()
    def _run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None,
        entering: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `Layers`."""
        spec = self.spec
        rotations = [Rotation(table, positions) for table in self._tables]
        if entering is None:
            x, residual = self._enter(token_ids, positions)
        else:
            x, residual = self._begin(entering)
        wanted = wanted if self.makes_logits else None
        last = self._layers[-1]
        for index, layer in enumerate(self._layers):
            chosen = wanted if layer is last else None
            attended = layer.attention(x, rotations[self._rope_of_layer[index]], attend, chosen)
            if chosen is not None:
                x, residual = x.index_select(0, chosen), residual.index_select(0, chosen)
                if not len(chosen):
                    return residual
            if spec.parallel_blocks:
                mlp = layer.mlp(x if layer.mlp_norm is None else layer.mlp_norm(residual))
                x, residual = self._join(attended + mlp, residual, None, layer.next_norm)
                continue
            x, residual = self._join(attended, residual, layer.attention_post_norm, layer.mlp_norm)
            x, residual = self._join(layer.mlp(x), residual, layer.mlp_post_norm, layer.next_norm)
        return x if self.makes_logits else residual

    def _begin(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the first layer here reads, and the residual stream."""
        return residual if self._first_norm is None else self._first_norm(residual), residual

    def _enter(self, token_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`_begin` of the model's first layer."""
        assert self._embedding is not None
        first_norm = self._first_norm
        if self._group.size == 1:
            residual = self._ops.embedding(token_ids, self._embedding)
        else:
            part = self._ops.embedding_part(token_ids, self._embedding, self._first_token)
            if self._plain_embedding and isinstance(first_norm, RmsNorm):
                joined = self._group.add_norm(part, torch.zeros_like(part), first_norm.weight, first_norm.eps)
                if joined is not None:
                    return joined
            residual = self._group.sum(part)
        if self._embedding_scale != 1.0:
            residual = residual * self._embedding_scale
        if self._embedding_norm is not None:
            residual = self._embedding_norm(residual)
        if self._positions is not None:
            residual = residual + self._positions[positions]
        return self._begin(residual)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self.compact_logits(hidden).float()

    @torch.inference_mode()
    def compact_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.compact_logits`: as the head computes them, unless they are scaled or capped, which is done in float32."""
        assert self._head is not None, "a model that pools, or a stage with others behind it, makes no logits"
        logits = self._head(hidden)
        if self._group.size > 1:
            logits = self._group.side_by_side(logits)[:, : self.spec.vocab_size].contiguous()
        if self.spec.logit_scale == 1.0 and self.spec.logit_soft_cap is None:
            return logits
        logits = logits.float()
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if (cap := self.spec.logit_soft_cap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _join(
        self, x: torch.Tensor, residual: torch.Tensor, post_norm: Norm | None, next_norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a block's output, of which each rank has a part, to the residual stream; what the next block reads, and the new stream."""
        if isinstance(next_norm, RmsNorm) and post_norm is None and self.spec.residual_multiplier == 1.0:
            joined = self._group.add_norm(x, residual, next_norm.weight, next_norm.eps)
            if joined is not None:
                return joined
        x = self._group.sum(x)
        if post_norm is not None:
            x = post_norm(x)
        if self.spec.residual_multiplier != 1.0:
            x = x * self.spec.residual_multiplier
        if next_norm is None:
            residual = residual + x
            return residual, residual
        return next_norm.add(x, residual)


def _norm(name: str, spec: ModelSpec, weights: Weights, ops: Ops) -> Norm | None:
    weight = weights.tensors.get(name)
    if weight is None:
        return None
    if spec.norm == "rms":
        return RmsNorm(weight, spec.norm_eps, ops)
    return LayerNorm(weight, weights.tensors.get(name + ".bias"), spec.norm_eps)


@dataclass(frozen=True)
class _Parts:
    """What layers are built from."""

    spec: ModelSpec
    """Of this rank's share."""
    weights: Weights
    ops: Ops
    group: TensorGroup
    shard: Shard

    def linear(self, name: str) -> Linear:
        return Linear(self.weights.linears[f"{name}.weight"], self.weights.tensors.get(f"{name}.bias"), self.ops)

    def norm(self, name: str) -> Norm | None:
        return _norm(name, self.spec, self.weights, self.ops)


def _qk_norm(prefix: str, parts: _Parts) -> QkNorm | WideQkNorm | None:
    spec, tensors = parts.spec, parts.weights.tensors
    q, k = tensors.get(prefix + "q_norm"), tensors.get(prefix + "k_norm")
    if q is None or k is None:
        return None
    if spec.norm == "rms" and spec.qk_norm_scope == "head":
        return QkNorm(q, k, spec.norm_eps, spec.qk_norm_last)
    q_bias, k_bias = tensors.get(prefix + "q_norm.bias"), tensors.get(prefix + "k_norm.bias")
    whole = spec.qk_norm_scope == "all"
    return WideQkNorm(q, k, spec.norm_eps, spec.norm, whole=whole, group=parts.group, q_bias=q_bias, k_bias=k_bias)


def _with_sinks(layers: tuple[LayerSpec, ...], weights: Weights) -> tuple[LayerSpec, ...]:
    """The layers with the sinks of the checkpoint, where it has any."""
    sinks = (weights.tensors.get(f"layers.{i}.sinks") for i in range(len(layers)))
    return tuple(s if t is None else replace(s, sinks=tuple(t.tolist())) for s, t in zip(layers, sinks, strict=True))


def _attention(index: int, parts: _Parts) -> Attention | LatentAttention:
    prefix, spec, weights, ops = f"layers.{index}.", parts.spec, parts.weights, parts.ops

    def linear(name: str) -> Linear:
        return parts.linear(prefix + name)

    here = index - parts.shard.layers(spec.num_layers).start
    if (latent := spec.latent) is None:
        out, alibi = linear("attention_out"), None
        if spec.alibi_slopes:
            device = next(iter(weights.tensors.values())).device
            alibi = torch.tensor(spec.alibi_slopes, device=device), spec.layer_specs[index].scale
        return Attention(
            here,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            linear("qkv"),
            out,
            _qk_norm(prefix, parts),
            ops,
            clip=spec.clip_qkv,
            alibi=alibi,
            growth=spec.query_growth,
        )

    def norm(name: str) -> RmsNorm:
        return RmsNorm(weights.tensors[prefix + name], spec.norm_eps, ops)

    return LatentAttention(
        here,
        spec.num_heads,
        linear("q_down") if latent.q_rank else None,
        norm("q_down_norm") if latent.q_rank else None,
        linear("q"),
        linear("kv_down"),
        norm("kv_norm"),
        weights.tensors[prefix + "kv_up"],
        linear("attention_out"),
        nope_dim=latent.nope_dim,
        ops=ops,
    )


def _mlp(prefix: str, mlp: MlpSpec | MoeSpec, parts: _Parts) -> Mlp:
    if isinstance(mlp, MlpSpec):
        up, down = (parts.linear(prefix + name) for name in ("gate_up", "down"))
        return GatedMlp(up, down, mlp.activation, parts.ops) if mlp.gated else PlainMlp(up, down, mlp.activation)
    tensors, experts = parts.weights.tensors, parts.weights.experts
    gate_up_bias, down_bias = (tensors.get(f"{prefix}experts.{name}.bias") for name in ("gate_up", "down"))
    return Moe(
        ExactRouter(tensors[prefix + "router.weight"]) if mlp.exact_router else parts.linear(prefix + "router"),
        tensors.get(prefix + "router.correction"),
        mlp.routing,
        experts[prefix + "experts.gate_up.weight"],
        experts[prefix + "experts.down.weight"],
        gate_up_bias=None if gate_up_bias is None else gate_up_bias.view(mlp.num_experts, -1),
        down_bias=None if down_bias is None else down_bias.view(mlp.num_experts, -1),
        activation=mlp.activation,
        shared=_mlp(prefix + "shared.", MlpSpec(mlp.shared_size, mlp.activation), parts) if mlp.shared_size else None,
        shared_gate=parts.linear(prefix + "shared_gate") if mlp.shared_gate else None,
        first_expert=parts.shard.rank * mlp.num_experts if parts.shard.whole_experts else None,
        ops=parts.ops,
    )


def _products(index: int, weights: Weights, ops: Ops) -> tuple[Linear, ...]:
    return tuple(Linear(weight, None, ops) for name, weight in weights.linears.items() if name.startswith(f"layers.{index}."))


def _layer(index: int, parts: _Parts) -> _Layer:
    prefix = f"layers.{index}."
    last = index == parts.spec.num_layers - 1
    ends_here = index == parts.shard.layers(parts.spec.num_layers)[-1] and not last
    return _Layer(
        attention=_attention(index, parts),
        mlp=_mlp(prefix, parts.spec.mlp_of(index), parts),
        attention_post_norm=parts.norm(prefix + "attention_post_norm"),
        mlp_norm=parts.norm(prefix + "mlp_norm"),
        mlp_post_norm=parts.norm(prefix + "mlp_post_norm"),
        next_norm=None if ends_here else parts.norm("norm" if last else f"layers.{index + 1}.attention_norm"),
    )
