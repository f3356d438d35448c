"""Gemma 1, 2 and 3 (text): norm weights around zero, scaled embeddings; from 2 on norms on both sides and alternating windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.models.families.base import DECODER_WEIGHTS, Family, Target, activation_of, decoder_spec, layer_windows
from octavo.models.hf_config import HfConfig, rope_spec
from octavo.models.spec import MlpSpec, ModelSpec

_DEFAULT_HEAD_DIM = 256
_LAYER = "model.layers.{i}."


def _common(config: HfConfig, architecture: str, **differences: Any) -> ModelSpec:
    # The first release wrote hidden_act: gelu and meant the approximation; hidden_activation is the newer key.
    key = "hidden_activation" if config.has("hidden_activation") or not config.has("hidden_act") else "hidden_act"
    activation = activation_of(config, key, "gelu_pytorch_tanh")
    bias = config.flag("attention_bias")
    return decoder_spec(
        config,
        architecture,
        head_dim=config.integer("head_dim", _DEFAULT_HEAD_DIM),
        mlp=MlpSpec(config.integer("intermediate_size"), "gelu_tanh" if activation == "gelu" else activation),
        norm_unit_offset=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        attention_out_bias=bias,
        **differences,
    )


def _gemma(config: HfConfig) -> ModelSpec:
    return _common(config, "GemmaForCausalLM")


def _gemma2(config: HfConfig) -> ModelSpec:
    return _common(
        config,
        "Gemma2ForCausalLM",
        sliding_windows=layer_windows(config, config.integer("sliding_window", 4096), lambda layer: layer % 2 == 0),
        norm_placement="both",
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=config.number("attn_logit_softcapping") if config.has("attn_logit_softcapping") else None,
        logit_soft_cap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else None,
    )


def _gemma3(config: HfConfig) -> ModelSpec:
    """Layers with a window have a rotation of their own, without the scaling that stretches the others."""
    head_dim = config.integer("head_dim", _DEFAULT_HEAD_DIM)
    period = config.integer("sliding_window_pattern", 6)
    windows = layer_windows(config, config.integer("sliding_window", 4096), lambda layer: (layer + 1) % period != 0)
    rope = rope_spec(config, head_dim, default_theta=1e6, layer_type="full_attention")
    local = rope_spec(config, head_dim, layer_type="sliding_attention")
    if not any(isinstance(v, dict) for v in config.section("rope_parameters").values.values()):
        local = replace(rope, theta=config.number("rope_local_base_freq", 10000.0), scaling=None)
    return _common(
        config,
        "Gemma3ForCausalLM",
        rope=rope,
        layer_ropes=tuple(rope if window is None else local for window in windows),
        sliding_windows=windows,
        norm_placement="both",
        qk_norm=True,
        # Scores of Gemma 3 have no soft cap, whatever its config says.
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        logit_soft_cap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else None,
    )


_BOTH_NORMS = {
    **DECODER_WEIGHTS,
    _LAYER + "post_attention_layernorm.weight": Target("layers.{i}.attention_post_norm"),
    _LAYER + "pre_feedforward_layernorm.weight": Target("layers.{i}.mlp_norm"),
    _LAYER + "post_feedforward_layernorm.weight": Target("layers.{i}.mlp_post_norm"),
    _LAYER + "self_attn.q_norm.weight": Target("layers.{i}.q_norm"),
    _LAYER + "self_attn.k_norm.weight": Target("layers.{i}.k_norm"),
}

GEMMA = Family(name="gemma", title="Gemma", architectures=("GemmaForCausalLM",), spec=_gemma, weights=DECODER_WEIGHTS)
GEMMA2 = Family(name="gemma2", title="Gemma 2", architectures=("Gemma2ForCausalLM",), spec=_gemma2, weights=_BOTH_NORMS)
GEMMA3 = Family(name="gemma3", title="Gemma 3 (text)", architectures=("Gemma3ForCausalLM",), spec=_gemma3, weights=_BOTH_NORMS)
