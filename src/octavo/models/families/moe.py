"""Mixtures of experts on Llama-like decoders: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, Granite-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.routing import Routing
from octavo.models.families.base import (
    DECODER_WEIGHTS,
    Family,
    Target,
    activation_of,
    decoder_spec,
    windows_of_upper_layers,
)
from octavo.models.hf_config import HfConfig
from octavo.models.spec import ModelSpec, MoeSpec

_LAYER = "model.layers.{i}."


def expert_weights(block: str, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, Target]:
    """Names of the router and of experts stored one by one in `block` of a layer."""
    experts = f"{_LAYER}{block}.experts.{{e}}."
    return {
        f"{_LAYER}{block}.gate.weight": Target("layers.{i}.router.weight"),
        f"{experts}{gate}.weight": Target("layers.{i}.experts.gate_up.weight", "{e}.gate"),
        f"{experts}{up}.weight": Target("layers.{i}.experts.gate_up.weight", "{e}.up"),
        f"{experts}{down}.weight": Target("layers.{i}.experts.down.weight", "{e}"),
    }


def shared_weights(name: str) -> dict[str, Target]:
    """Names of the block that every token passes."""
    return {
        f"{_LAYER}mlp.{name}.gate_proj.weight": Target("layers.{i}.shared.gate_up.weight", "gate"),
        f"{_LAYER}mlp.{name}.up_proj.weight": Target("layers.{i}.shared.gate_up.weight", "up"),
        f"{_LAYER}mlp.{name}.down_proj.weight": Target("layers.{i}.shared.down.weight"),
    }


QK_NORMS: Mapping[str, Target] = {
    f"{_LAYER}self_attn.q_norm.weight": Target("layers.{i}.q_norm"),
    f"{_LAYER}self_attn.k_norm.weight": Target("layers.{i}.k_norm"),
}


def moe_spec(config: HfConfig, count: str, size: str, **more: Any) -> MoeSpec:
    """The experts of a config.

    Args:
        count, size: the keys of their number and of the width of each.
        more: further fields; `routing` are fields of `Routing`.
    """
    experts, top_k = config.integer(count), config.integer("num_experts_per_tok")
    if top_k > experts:
        raise config.fail("num_experts_per_tok", f"at most {count} ({experts})")
    routing = Routing(top_k, **more.pop("routing", {}))
    return MoeSpec(experts, config.integer(size), routing, more.pop("activation", activation_of(config)), **more)


def _mixtral(config: HfConfig) -> ModelSpec:
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    return decoder_spec(
        config,
        "MixtralForCausalLM",
        moe=moe_spec(config, "num_local_experts", "intermediate_size", routing={"normalize": True}),
        sliding_windows=(window,) * config.integer("num_hidden_layers"),
    )


def _qwen_layers(config: HfConfig) -> tuple[bool, ...]:
    step, dense = config.integer("decoder_sparse_step", 1), config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.fail("mlp_only_layers", "a list of layers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(config.integer("num_hidden_layers")))


def _expert_count(config: HfConfig) -> str:
    return "num_experts" if config.has("num_experts") else "num_local_experts"


def _qwen2(config: HfConfig) -> ModelSpec:
    moe = moe_spec(
        config,
        _expert_count(config),
        "moe_intermediate_size",
        routing={"normalize": config.flag("norm_topk_prob")},
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return decoder_spec(
        config,
        "Qwen2MoeForCausalLM",
        qkv_bias=config.flag("qkv_bias", True),
        moe=moe,
        moe_layers=_qwen_layers(config),
        sliding_windows=windows_of_upper_layers(config),
    )


def _qwen3(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    slides = config.flag("use_sliding_window") and config.has("sliding_window")
    return decoder_spec(
        config,
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        qkv_bias=bias,
        attention_out_bias=bias,
        moe=moe_spec(config, _expert_count(config), "moe_intermediate_size", routing={"normalize": config.flag("norm_topk_prob")}),
        moe_layers=_qwen_layers(config),
        sliding_windows=((config.integer("sliding_window") if slides else None),) * config.integer("num_hidden_layers"),
    )


def _olmoe(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    return decoder_spec(
        config,
        "OlmoeForCausalLM",
        qk_norm=True,
        qk_norm_scope="all",
        qkv_bias=bias,
        attention_out_bias=bias,
        norm_eps=config.number("rms_norm_eps", 1e-5),
        clip_qkv=config.number("clip_qkv") if config.has("clip_qkv") else None,
        moe=moe_spec(config, "num_experts", "intermediate_size", routing={"normalize": config.flag("norm_topk_prob")}),
    )


def _granite(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    return decoder_spec(
        config,
        "GraniteMoeForCausalLM",
        qkv_bias=bias,
        attention_out_bias=bias,
        attention_scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
        moe=moe_spec(config, "num_local_experts", "intermediate_size", routing={"normalize": True}),
    )


FAMILIES = (
    Family(
        name="mixtral",
        title="Mixtral",
        architectures=("MixtralForCausalLM",),
        spec=_mixtral,
        weights={**DECODER_WEIGHTS, **expert_weights("block_sparse_moe", gate="w1", up="w3", down="w2")},
    ),
    Family(
        name="qwen2_moe",
        title="Qwen1.5-MoE, Qwen2-MoE",
        architectures=("Qwen2MoeForCausalLM",),
        spec=_qwen2,
        weights={
            **DECODER_WEIGHTS,
            **expert_weights("mlp"),
            **shared_weights("shared_expert"),
            f"{_LAYER}mlp.shared_expert_gate.weight": Target("layers.{i}.shared_gate.weight"),
        },
    ),
    Family(
        name="qwen3_moe",
        title="Qwen3-MoE",
        architectures=("Qwen3MoeForCausalLM",),
        spec=_qwen3,
        weights={**DECODER_WEIGHTS, **QK_NORMS, **expert_weights("mlp")},
    ),
    Family(
        name="olmoe",
        title="OLMoE",
        architectures=("OlmoeForCausalLM",),
        spec=_olmoe,
        weights={**DECODER_WEIGHTS, **QK_NORMS, **expert_weights("mlp")},
    ),
    Family(
        name="granitemoe",
        title="Granite 3 MoE",
        architectures=("GraniteMoeForCausalLM",),
        spec=_granite,
        weights={
            **DECODER_WEIGHTS,
            f"{_LAYER}block_sparse_moe.router.layer.weight": Target("layers.{i}.router.weight"),
            f"{_LAYER}block_sparse_moe.input_linear.weight": Target("layers.{i}.experts.gate_up.weight"),
            f"{_LAYER}block_sparse_moe.output_linear.weight": Target("layers.{i}.experts.down.weight"),
        },
    ),
)
