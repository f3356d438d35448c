"""Qwen3 (dense): RMSNorm on each head of q and k, an explicit head size, no qkv bias unless asked for."""

from __future__ import annotations

from octavo.models.families.base import DECODER_WEIGHTS, Family, Target, decoder_spec, windows_of_upper_layers
from octavo.models.hf_config import HfConfig
from octavo.models.spec import ModelSpec

_DEFAULT_HEAD_DIM = 128


def _spec(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    return decoder_spec(
        config,
        "Qwen3ForCausalLM",
        head_dim=config.integer("head_dim", _DEFAULT_HEAD_DIM),
        qk_norm=True,
        qkv_bias=bias,
        attention_out_bias=bias,
        sliding_windows=windows_of_upper_layers(config),
    )


FAMILY = Family(
    name="qwen3",
    title="Qwen3",
    architectures=("Qwen3ForCausalLM",),
    spec=_spec,
    weights={
        **DECODER_WEIGHTS,
        "model.layers.{i}.self_attn.q_norm.weight": Target("layers.{i}.q_norm"),
        "model.layers.{i}.self_attn.k_norm.weight": Target("layers.{i}.k_norm"),
    },
)
