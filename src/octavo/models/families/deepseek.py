"""DeepSeek-V2 and V3 (and R1), GLM-4.7-Flash: latent attention, the first layers dense, then experts beside shared ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.errors import UnsupportedModel
from octavo.models.families.base import DECODER_WEIGHTS, Family, Target, decoder_spec, paired_halves
from octavo.models.families.moe import expert_weights, moe_spec, shared_weights
from octavo.models.hf_config import HfConfig, rope_spec, yarn_magnitude
from octavo.models.spec import LatentSpec, ModelSpec

_LAYER = "model.layers.{i}."


def _spec(config: HfConfig, architecture: str) -> ModelSpec:
    newer = architecture != "DeepseekV2ForCausalLM"
    latent = LatentSpec(
        q_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else 0,
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        bias=config.flag("attention_bias"),
        neighbours=not newer or config.flag("rope_interleave", True),
    )
    layers, head_dim = config.integer("num_hidden_layers"), latent.nope_dim + latent.rope_dim
    first, every = config.integer("first_k_dense_replace", 0, minimum=0), config.integer("moe_layer_freq", 1)
    size = config.integer("moe_intermediate_size")
    moe = moe_spec(
        config,
        "n_routed_experts",
        "moe_intermediate_size",
        routing=_v3_routing(config) if newer else _v2_routing(config),
        correction=newer,
        exact_router=True,
        shared_size=size * config.integer("n_shared_experts") if config.has("n_shared_experts") else 0,
    )
    return decoder_spec(
        config,
        architecture,
        head_dim=head_dim,
        rope=rope_spec(HfConfig({**config.values, "head_dim": latent.rope_dim}, config.where), latent.rope_dim),
        latent=latent,
        attention_scale=head_dim**-0.5 * yarn_magnitude(config) ** 2,
        moe=moe,
        moe_layers=_stated_layers(config) or tuple(i >= first and i % every == 0 for i in range(layers)),
        norm_eps=config.number("rms_norm_eps", 1e-6),
    )


_GLM_DEFAULTS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5}


def _glm(config: HfConfig) -> ModelSpec:
    """One dense layer where the config does not say how many."""
    stated = {key: value for key, value in config.values.items() if value is not None}
    return _spec(HfConfig({**_GLM_DEFAULTS, "first_k_dense_replace": 1, **stated}, config.where), "Glm4MoeLiteForCausalLM")


def _stated_layers(config: HfConfig) -> tuple[bool, ...]:
    """Which layers have experts, where the config lists them."""
    kinds, layers = config.values.get("mlp_layer_types"), config.integer("num_hidden_layers")
    if kinds is None:
        return ()
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise config.fail("mlp_layer_types", f"a list of {layers} entries, each dense or sparse")
    return tuple(kind == "sparse" for kind in kinds)


def _v2_routing(config: HfConfig) -> dict[str, object]:
    method = config.text("topk_method", "greedy")
    routing: dict[str, object] = {"scale": config.number("routed_scaling_factor", 1.0)}
    if method == "group_limited_greedy":
        routing |= expert_groups(config)
    elif method != "greedy":
        raise UnsupportedModel(f"{config.where}: topk_method {method!r} is not supported. Supported: greedy, group_limited_greedy.")
    return routing


def _v3_routing(config: HfConfig) -> dict[str, object]:
    return {
        "scoring": "sigmoid",
        "normalize": config.flag("norm_topk_prob", True),
        "scale": config.number("routed_scaling_factor", 2.5),
        **expert_groups(config, 8, 4),
        "group_score": "best_two",
    }


def expert_groups(config: HfConfig, groups: int | None = None, top: int | None = None) -> dict[str, object]:
    """Which experts can be chosen together. The numbers are for configs that do not say."""
    groups, top, experts = config.integer("n_group", groups), config.integer("topk_group", top), config.integer("n_routed_experts")
    if experts % groups:
        raise config.fail("n_group", f"a divisor of n_routed_experts ({experts})")
    if top > groups:
        raise config.fail("topk_group", f"at most n_group ({groups})")
    return {"groups": groups, "top_groups": top}


def q_order(spec: ModelSpec) -> npt.NDArray[np.int64]:
    """Of each head, the rows that rotate are stored as neighbouring pairs."""
    assert spec.latent is not None
    nope, width = spec.latent.nope_dim, spec.head_dim
    head = np.concatenate((np.arange(nope), nope + _rotated(spec.latent)))
    return (np.arange(spec.num_heads)[:, None] * width + head).reshape(-1)


def kv_order(spec: ModelSpec) -> npt.NDArray[np.int64]:
    assert spec.latent is not None
    return np.concatenate((np.arange(spec.latent.kv_rank), spec.latent.kv_rank + _rotated(spec.latent)))


def _rotated(latent: LatentSpec) -> npt.NDArray[np.int64]:
    return paired_halves(1, latent.rope_dim) if latent.neighbours else np.arange(latent.rope_dim)


_WEIGHTS = {
    **DECODER_WEIGHTS,
    f"{_LAYER}self_attn.q_proj.weight": Target("layers.{i}.q.weight", order=q_order),
    f"{_LAYER}self_attn.q_a_proj.weight": Target("layers.{i}.q_down.weight"),
    f"{_LAYER}self_attn.q_a_proj.bias": Target("layers.{i}.q_down.bias"),
    f"{_LAYER}self_attn.kv_a_proj_with_mqa.bias": Target("layers.{i}.kv_down.bias", order=kv_order),
    f"{_LAYER}self_attn.q_a_layernorm.weight": Target("layers.{i}.q_down_norm"),
    f"{_LAYER}self_attn.q_b_proj.weight": Target("layers.{i}.q.weight", order=q_order),
    f"{_LAYER}self_attn.kv_a_proj_with_mqa.weight": Target("layers.{i}.kv_down.weight", order=kv_order),
    f"{_LAYER}self_attn.kv_a_layernorm.weight": Target("layers.{i}.kv_norm"),
    f"{_LAYER}self_attn.kv_b_proj.weight": Target("layers.{i}.kv_up"),
    **expert_weights("mlp"),
    **shared_weights("shared_experts"),
    f"{_LAYER}mlp.gate.e_score_correction_bias": Target("layers.{i}.router.correction"),
}

FAMILIES = (
    Family(
        name="deepseek_v2",
        title="DeepSeek-V2",
        architectures=("DeepseekV2ForCausalLM",),
        spec=lambda config: _spec(config, "DeepseekV2ForCausalLM"),
        weights=_WEIGHTS,
    ),
    Family(
        name="deepseek_v3",
        title="DeepSeek-V3, R1",
        architectures=("DeepseekV3ForCausalLM",),
        spec=lambda config: _spec(config, "DeepseekV3ForCausalLM"),
        weights=_WEIGHTS,
    ),
    Family(
        name="glm4_moe_lite",
        title="GLM-4.7-Flash",
        architectures=("Glm4MoeLiteForCausalLM",),
        spec=_glm,
        weights=_WEIGHTS,
    ),
)
