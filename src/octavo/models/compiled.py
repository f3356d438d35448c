"""`CompiledDecoder`: the same decoder as `decoder.py` where the device runs a whole forward pass in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.attention.base import Attend
from octavo.config.types import CpuActivations
from octavo.layers.rope import cos_sin_table, no_rotation
from octavo.models.decoder import Decoder, Model, Weights
from octavo.models.sharding import WHOLE_MODEL, Shard
from octavo.models.spec import ModelSpec
from octavo.ops.program import DecoderKernels, DecoderProgram, LayerProgram
from octavo.ops.registry import Draw, Ops
from octavo.parallel.group import ALONE, TensorGroup
from octavo.parallel.pipeline import NO_PIPELINE, Pipeline

if TYPE_CHECKING:
    from octavo.attention.native_cpu import NativeCpuAttention
    from octavo.ops.cpu.steps import CpuSteps, SlotMemory


def build_decoder(
    spec: ModelSpec,
    weights: Weights,
    ops: Ops,
    *,
    max_length: int,
    threads: int = 1,
    activations: CpuActivations = "int8",
    group: TensorGroup = ALONE,
    pipeline: Pipeline = NO_PIPELINE,
    shard: Shard = WHOLE_MODEL,
) -> Model:
    """The decoder for these weights: compiled where `ops` can, and the weights were packed for it.

    Args:
        max_length: the longest sequence served; positions are below it.
        threads, activations: see `ops.program.CompileDecoder`.
        group, pipeline, shard: see `Decoder`.
    """
    if ops.decoder is None:
        return Decoder(spec, weights, ops, max_length=max_length, group=group, pipeline=pipeline, shard=shard)
    return CompiledDecoder(spec, weights, ops.decoder, max_length=max_length, threads=threads, activations=activations)


class CompiledDecoder:
    """Implements `Model`. Holds weights and no state between calls."""

    capturable = False
    makes_logits = True

    def __init__(
        self, spec: ModelSpec, weights: Weights, kernels: DecoderKernels, *, max_length: int, threads: int, activations: CpuActivations
    ) -> None:
        self.spec = spec
        self.layer_specs = spec.layer_specs
        self.weights_bytes = weights.nbytes
        self.weights_kinds = weights.kinds
        self.kv_scales = weights.kv_scales
        self._compiled = kernels.compile(describe(spec, weights, max_length), threads=threads, activations=activations)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """See `Model.forward`."""
        return self._compiled.forward(token_ids, positions, attend, wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self._compiled.logits(hidden)

    def compact_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.compact_logits`: the kernels make float32 anyway."""
        return self._compiled.logits(hidden)

    @property
    def draw(self) -> Draw:
        """See `ops.program.CompiledDecoder`."""
        return self._compiled.draw

    def steps(self, attention: NativeCpuAttention, memory: SlotMemory) -> CpuSteps:
        """Whole steps over the attention's KV cache."""
        return self._compiled.steps(attention.caches, memory)


def compilable(spec: ModelSpec) -> bool:
    """Whether a `DecoderProgram` can say all that the spec does."""
    plain_norms = spec.norm == "rms" and spec.qk_norm_scope == "head"
    plain_rope = {spec.rope.rotary_dim} >= {rope.rotary_dim for rope in spec.ropes if rope is not None} and not spec.learned_positions
    return (
        plain_norms
        and plain_rope
        and spec.moe is None
        and spec.latent is None
        and not spec.attention_sinks
        and spec.mlp.gated
        and not spec.parallel_blocks
        and not spec.head_bias
        and spec.clip_qkv is None
        and not spec.alibi_slopes
        and not spec.embedding_norm
    )


def describe(spec: ModelSpec, weights: Weights, max_length: int) -> DecoderProgram:
    """The decoder as data."""
    tensors, panels = weights.tensors, weights.panels
    embed = panels["embed"]
    device = torch.device("cpu")
    tables = {
        rope: no_rotation(spec.rope.rotary_dim, max_length, device) if rope is None else cos_sin_table(rope, max_length, device)
        for rope in dict.fromkeys(spec.ropes)
    }
    return DecoderProgram(
        layers=tuple(_layer(i, weights, tables[rope]) for i, rope in enumerate(spec.ropes)),
        embed=embed,
        head=embed if spec.tied_embeddings else panels["head"],
        final_norm=tensors["norm"],
        hidden=spec.hidden_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        inner=spec.mlp.intermediate_size,
        vocab=spec.vocab_size,
        activation=spec.mlp.activation,
        norm_eps=spec.norm_eps,
        embedding_scale=spec.embedding_scale,
        residual_multiplier=spec.residual_multiplier,
        logit_scale=spec.logit_scale,
        logit_soft_cap=spec.logit_soft_cap,
    )


def _layer(index: int, weights: Weights, cos_sin: torch.Tensor) -> LayerProgram:
    tensors, panels, prefix = weights.tensors, weights.panels, f"layers.{index}."
    return LayerProgram(
        qkv=panels[prefix + "qkv.weight"],
        out=panels[prefix + "attention_out.weight"],
        gate_up=panels[prefix + "gate_up.weight"],
        down=panels[prefix + "down.weight"],
        qkv_bias=tensors.get(prefix + "qkv.bias"),
        out_bias=tensors.get(prefix + "attention_out.bias"),
        gate_up_bias=tensors.get(prefix + "gate_up.bias"),
        down_bias=tensors.get(prefix + "down.bias"),
        attention_norm=tensors.get(prefix + "attention_norm"),
        attention_post_norm=tensors.get(prefix + "attention_post_norm"),
        mlp_norm=tensors.get(prefix + "mlp_norm"),
        mlp_post_norm=tensors.get(prefix + "mlp_post_norm"),
        q_norm=tensors.get(prefix + "q_norm"),
        k_norm=tensors.get(prefix + "k_norm"),
        cos_sin=cos_sin,
    )
