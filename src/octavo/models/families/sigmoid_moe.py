"""Mixtures whose router scores experts by a sigmoid, with a bias for the choice: GLM-4.5 to 4.7, dots.llm1, MiniMax-M2."""

from __future__ import annotations

from typing import Any

from octavo.models.families.base import DECODER_WEIGHTS, Family, Target, decoder_spec, layer_windows
from octavo.models.families.deepseek import expert_groups
from octavo.models.families.moe import QK_NORMS, expert_weights, moe_spec, shared_weights
from octavo.models.hf_config import HfConfig, rope_spec
from octavo.models.spec import ModelSpec

_LAYER = "model.layers.{i}."


def _shared(config: HfConfig, architecture: str, **differences: Any) -> ModelSpec:
    """The first layers dense, then experts beside shared ones."""
    layers, first = config.integer("num_hidden_layers"), config.integer("first_k_dense_replace", 0, minimum=0)
    shared = config.integer("n_shared_experts") if config.has("n_shared_experts") else 0
    moe = moe_spec(
        config,
        "n_routed_experts",
        "moe_intermediate_size",
        routing={
            "scoring": "sigmoid",
            "normalize": config.flag("norm_topk_prob", True),
            "scale": config.number("routed_scaling_factor", 1.0),
            **expert_groups(config, 1, 1),
            "group_score": "best_two",
        },
        correction=True,
        exact_router=True,
        shared_size=shared * config.integer("moe_intermediate_size"),
    )
    return decoder_spec(
        config,
        architecture,
        qkv_bias=config.flag("attention_bias"),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        moe=moe,
        moe_layers=tuple(i >= first for i in range(layers)),
        **differences,
    )


def _head_dim(config: HfConfig) -> int:
    return config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))


def _glm(config: HfConfig) -> ModelSpec:
    rope = rope_spec(config, _head_dim(config), default_partial=0.5)
    return _shared(config, "Glm4MoeForCausalLM", rope=rope, qk_norm=config.flag("use_qk_norm"))


def _dots(config: HfConfig) -> ModelSpec:
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    first = config.integer("max_window_layers", 62, minimum=0)
    windows = layer_windows(config, window, lambda layer: layer >= first)
    return _shared(config, "Dots1ForCausalLM", qk_norm=True, attention_out_bias=config.flag("attention_bias"), sliding_windows=windows)


def _minimax(config: HfConfig) -> ModelSpec:
    head_dim = _head_dim(config)
    # rotary_dim is the older way to say which part of a head rotates.
    partial = config.integer("rotary_dim", head_dim) / head_dim
    return decoder_spec(
        config,
        "MiniMaxM2ForCausalLM",
        head_dim=head_dim,
        rope=rope_spec(config, head_dim, default_theta=5e6, default_partial=partial),
        qk_norm=True,
        qk_norm_scope="all",
        moe=moe_spec(config, "num_local_experts", "intermediate_size", routing={"scoring": "sigmoid", "normalize": True}, correction=True),
    )


_SHARED_WEIGHTS = {
    **DECODER_WEIGHTS,
    **QK_NORMS,
    **expert_weights("mlp"),
    **shared_weights("shared_experts"),
    f"{_LAYER}mlp.gate.e_score_correction_bias": Target("layers.{i}.router.correction"),
}

FAMILIES = (
    Family(name="glm4_moe", title="GLM-4.5 to 4.7, and Air", architectures=("Glm4MoeForCausalLM",), spec=_glm, weights=_SHARED_WEIGHTS),
    Family(name="dots1", title="dots.llm1", architectures=("Dots1ForCausalLM",), spec=_dots, weights=_SHARED_WEIGHTS),
    Family(
        name="minimax_m2",
        title="MiniMax-M2",
        architectures=("MiniMaxM2ForCausalLM",),
        spec=_minimax,
        weights={
            **DECODER_WEIGHTS,
            **QK_NORMS,
            **expert_weights("block_sparse_moe", gate="w1", up="w3", down="w2"),
            f"{_LAYER}block_sparse_moe.e_score_correction_bias": Target("layers.{i}.router.correction"),
        },
    ),
)
