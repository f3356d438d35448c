"""OLMo 2 and 3: norms behind the blocks only, q and k normed over all heads at once; 3 adds windows in three of four layers."""

from __future__ import annotations

from typing import Any

from octavo.models.families.base import DECODER_WEIGHTS, Family, Target, decoder_spec, layer_windows
from octavo.models.hf_config import HfConfig, rope_spec
from octavo.models.spec import ModelSpec


def _common(config: HfConfig, architecture: str, **differences: Any) -> ModelSpec:
    bias = config.flag("attention_bias")
    return decoder_spec(
        config,
        architecture,
        norm_placement="post",
        qk_norm=True,
        qk_norm_scope="all",
        qkv_bias=bias,
        attention_out_bias=bias,
        norm_eps=config.number("rms_norm_eps", 1e-5),
        **differences,
    )


def _olmo2(config: HfConfig) -> ModelSpec:
    return _common(config, "Olmo2ForCausalLM")


def _olmo3(config: HfConfig) -> ModelSpec:
    """Rope scaling, where there is any, is for the layers without a window."""
    windows = layer_windows(config, config.integer("sliding_window", 4096), lambda layer: (layer + 1) % 4 != 0)
    head_dim = config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))
    rope = rope_spec(config, head_dim, default_theta=5e5, layer_type="full_attention")
    local = rope_spec(config, head_dim, default_theta=5e5, layer_type="sliding_attention")
    if config.has("rope_scaling"):
        local = rope_spec(HfConfig({**config.values, "rope_scaling": None, "rope_parameters": None}, config.where), head_dim)
    ropes = tuple(rope if window is None else local for window in windows)
    return _common(config, "Olmo3ForCausalLM", sliding_windows=windows, rope=rope, layer_ropes=ropes)


_LAYER = "model.layers.{i}."
_WEIGHTS = {
    **DECODER_WEIGHTS,
    _LAYER + "post_attention_layernorm.weight": Target("layers.{i}.attention_post_norm"),
    _LAYER + "post_feedforward_layernorm.weight": Target("layers.{i}.mlp_post_norm"),
    _LAYER + "self_attn.q_norm.weight": Target("layers.{i}.q_norm"),
    _LAYER + "self_attn.k_norm.weight": Target("layers.{i}.k_norm"),
}

OLMO2 = Family(name="olmo2", title="OLMo 2", architectures=("Olmo2ForCausalLM",), spec=_olmo2, weights=_WEIGHTS)
OLMO3 = Family(name="olmo3", title="OLMo 3", architectures=("Olmo3ForCausalLM",), spec=_olmo3, weights=_WEIGHTS)
