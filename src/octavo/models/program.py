"""Decoders as data, for devices that run a whole forward pass in one call: which models can be said so, and how. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.layers.rope import rotation_table, unrotated_table
from octavo.models.spec import ModelSpec
from octavo.ops.packed import PanelWeight
from octavo.ops.program import DecoderProgram, Float32, LayerProgram


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
        and spec.query_growth is None
        and not spec.qk_norm_last
        and not spec.embedding_norm
    )


def describe(spec: ModelSpec, arrays: Mapping[str, Float32], panels: Mapping[str, PanelWeight], max_length: int) -> DecoderProgram:
    """The decoder as data.

    Args:
        arrays: norms and biases, by the parameters' names (see `spec.parameters`).
        panels: linear layers and embedding; a tied head is `embed`.
        max_length: the longest sequence served; positions are below it.
    """
    embed = panels["embed"]
    tables = {
        rope: unrotated_table(spec.rope.rotary_dim, max_length) if rope is None else rotation_table(rope, max_length)
        for rope in dict.fromkeys(spec.ropes)
    }
    return DecoderProgram(
        layers=tuple(_layer(i, arrays, panels, tables[rope]) for i, rope in enumerate(spec.ropes)),
        embed=embed,
        head=embed if spec.tied_embeddings else panels["head"],
        final_norm=arrays["norm"],
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


def _layer(index: int, arrays: Mapping[str, Float32], panels: Mapping[str, PanelWeight], cos_sin: Float32) -> LayerProgram:
    prefix = f"layers.{index}."
    return LayerProgram(
        qkv=panels[prefix + "qkv.weight"],
        out=panels[prefix + "attention_out.weight"],
        gate_up=panels[prefix + "gate_up.weight"],
        down=panels[prefix + "down.weight"],
        qkv_bias=arrays.get(prefix + "qkv.bias"),
        out_bias=arrays.get(prefix + "attention_out.bias"),
        gate_up_bias=arrays.get(prefix + "gate_up.bias"),
        down_bias=arrays.get(prefix + "down.bias"),
        attention_norm=arrays.get(prefix + "attention_norm"),
        attention_post_norm=arrays.get(prefix + "attention_post_norm"),
        mlp_norm=arrays.get(prefix + "mlp_norm"),
        mlp_post_norm=arrays.get(prefix + "mlp_post_norm"),
        q_norm=arrays.get(prefix + "q_norm"),
        k_norm=arrays.get(prefix + "k_norm"),
        cos_sin=cos_sin,
    )
