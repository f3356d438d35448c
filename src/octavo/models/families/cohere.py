"""Command R (Cohere) and R7B (Cohere2): parallel blocks under one layer norm without bias, neighbouring pairs rotate.

Cohere2 rotates in the layers with a window only: the others have no positions at all.
"""

from __future__ import annotations

from typing import Any

from octavo.models.families.base import DECODER_WEIGHTS, Family, Target, decoder_spec, layer_windows, paired_halves
from octavo.models.hf_config import HfConfig
from octavo.models.spec import ModelSpec


def _common(config: HfConfig, architecture: str, **differences: Any) -> ModelSpec:
    bias = config.flag("attention_bias")
    return decoder_spec(
        config,
        architecture,
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        parallel_blocks=True,
        shared_norm=True,
        qkv_bias=bias,
        attention_out_bias=bias,
        logit_scale=config.number("logit_scale", 0.0625),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        **differences,
    )


def _cohere(config: HfConfig) -> ModelSpec:
    return _common(config, "CohereForCausalLM", qk_norm=config.flag("use_qk_norm"), qk_norm_scope="heads")


def _cohere2(config: HfConfig) -> ModelSpec:
    period = config.integer("sliding_window_pattern", 4)
    windows = layer_windows(config, config.integer("sliding_window", 4096), lambda layer: (layer + 1) % period != 0)
    spec = _common(config, "Cohere2ForCausalLM", sliding_windows=windows)
    return spec.with_ropes(None if window is None else spec.rope for window in windows)


_Q = "model.layers.{i}.self_attn.q_"
_K = "model.layers.{i}.self_attn.k_"
_WEIGHTS = {
    **DECODER_WEIGHTS,
    **{
        f"{source}{name}": Target(f"layers.{{i}}.{parameter}", part, order)
        for source, part_name, order in (
            (_Q, "q", lambda spec: paired_halves(spec.num_heads, spec.head_dim)),
            (_K, "k", lambda spec: paired_halves(spec.num_kv_heads, spec.head_dim)),
        )
        for name, parameter, part in (
            ("proj.weight", "qkv.weight", part_name),
            ("proj.bias", "qkv.bias", part_name),
            ("norm.weight", f"{part_name}_norm", None),
        )
    },
}

COHERE = Family(name="cohere", title="Command R", architectures=("CohereForCausalLM",), spec=_cohere, weights=_WEIGHTS)
COHERE2 = Family(name="cohere2", title="Command R7B", architectures=("Cohere2ForCausalLM",), spec=_cohere2, weights=_WEIGHTS)
