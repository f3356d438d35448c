"""Families that differ from Llama in one or two respects: SmolLM3, GLM-4, Arcee, Nemotron, Ministral, Seed-OSS, ERNIE 4.5, EXAONE 4, Hunyuan."""

from __future__ import annotations

from octavo.models.families.base import (
    DECODER_WEIGHTS,
    Family,
    Target,
    activation_of,
    biases,
    decoder_spec,
    layer_windows,
    paired_halves,
)
from octavo.models.hf_config import HfConfig, rope_spec
from octavo.models.spec import MlpSpec, ModelSpec

_LAYER = "model.layers.{i}."


def _smollm3(config: HfConfig) -> ModelSpec:
    """Every fourth layer has no rotation (NoPE, Yang et al. 2025)."""
    layers, interval = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval", 4)
    rotates = config.values.get("no_rope_layers")  # despite its name: 1 where a layer rotates
    if rotates is None:
        rotates = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(rotates, list) or len(rotates) != layers or not set(rotates) <= {0, 1}:
        raise config.fail("no_rope_layers", f"a list of {layers} entries, each 0 or 1")
    window = config.integer("sliding_window") if config.flag("use_sliding_window") and config.has("sliding_window") else None
    bias = config.flag("attention_bias")
    spec = decoder_spec(
        config,
        "SmolLM3ForCausalLM",
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        sliding_windows=layer_windows(config, window),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
    return spec.with_ropes(spec.rope if rotate else None for rotate in rotates)


def _glm(config: HfConfig, architecture: str, *, both_norms: bool) -> ModelSpec:
    head_dim = config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))
    return decoder_spec(
        config,
        architecture,
        head_dim=head_dim,
        rope=rope_spec(config, head_dim, default_partial=0.5),
        qkv_bias=config.flag("attention_bias"),
        norm_placement="both" if both_norms else "pre",
    )


def _arcee(config: HfConfig) -> ModelSpec:
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    mlp = MlpSpec(config.integer("intermediate_size"), activation_of(config, default="relu2", gated=False), mlp_bias, gated=False)
    return decoder_spec(config, "ArceeForCausalLM", mlp=mlp, qkv_bias=bias, attention_out_bias=bias)


def _nemotron(config: HfConfig) -> ModelSpec:
    """Layer norms with weights around zero."""
    head_dim = config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    return decoder_spec(
        config,
        "NemotronForCausalLM",
        mlp=MlpSpec(config.integer("intermediate_size"), activation_of(config, default="relu2", gated=False), mlp_bias, gated=False),
        rope=rope_spec(config, head_dim, default_partial=0.5),
        norm="layer",
        norm_bias=True,
        norm_unit_offset=True,
        norm_eps=config.number("norm_eps", 1e-5),
        qkv_bias=bias,
        attention_out_bias=bias,
    )


def _ministral(config: HfConfig) -> ModelSpec:
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    return decoder_spec(config, "MinistralForCausalLM", sliding_windows=layer_windows(config, window))


def _seed(config: HfConfig) -> ModelSpec:
    return decoder_spec(
        config,
        "SeedOssForCausalLM",
        head_dim=config.integer("head_dim", 128),
        qkv_bias=config.flag("attention_bias", True),
        attention_out_bias=config.flag("attention_out_bias"),
        mlp_bias=config.flag("mlp_bias"),
    )


def _ernie(config: HfConfig) -> ModelSpec:
    bias = config.flag("use_bias")
    tied = config.flag("tie_word_embeddings", True)
    return decoder_spec(
        config,
        "Ernie4_5ForCausalLM",
        head_dim=config.integer("head_dim", 128),
        rope=rope_spec(config, config.integer("head_dim", 128), default_theta=5e5),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        tied_embeddings=tied,
    )


def _exaone4(config: HfConfig) -> ModelSpec:
    """Where some layers have a window (32B), only those rotate."""
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    pattern = config.values.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):  # LLLG: three local layers, then a global one
        windows = layer_windows(config, window, lambda layer: pattern[layer % len(pattern)] == "L")
    else:
        period = config.integer("sliding_window_pattern", 4, minimum=0)
        windows = layer_windows(config, window, lambda layer: window is not None and period > 0 and (layer + 1) % period != 0)
    spec = decoder_spec(
        config,
        "Exaone4ForCausalLM",
        norm_placement="post",
        norm_eps=config.number("rms_norm_eps", 1e-5),
        qk_norm=True,
        sliding_windows=windows,
    )
    return spec if window is None else spec.with_ropes(None if one is None else spec.rope for one in windows)


def _hunyuan(config: HfConfig) -> ModelSpec:
    """q and k are normed behind the rotation. Its "dynamic" scaling with an alpha is another base, the same for all lengths."""
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    head_dim = config.integer("head_dim", config.integer("attention_head_dim", hidden // heads))
    rope = config.section("rope_scaling") if config.values.get("rope_scaling") else config.section("rope_parameters")
    if rope.text("rope_type", rope.text("type", "default")) == "dynamic" and rope.has("alpha"):
        theta = rope.number("rope_theta", config.number("rope_theta", 10000.0)) * rope.number("alpha") ** (head_dim / (head_dim - 2))
        config = HfConfig({**config.values, "rope_scaling": None, "rope_parameters": {"rope_theta": theta}}, config.where)
    bias = config.flag("attention_bias")
    return decoder_spec(
        config,
        "HunYuanDenseV1ForCausalLM",
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", 1e-5),
        qkv_bias=bias,
        attention_out_bias=bias,
        qk_norm=True,
        qk_norm_last=True,
    )


_NEIGHBOURS = {
    **DECODER_WEIGHTS,
    **{
        f"{_LAYER}self_attn.q_proj.{kind}": Target(
            f"layers.{{i}}.qkv.{kind}", "q", lambda spec: paired_halves(spec.num_heads, spec.head_dim, spec.rope.rotary_dim)
        )
        for kind in ("weight", "bias")
    },
    **{
        f"{_LAYER}self_attn.k_proj.{kind}": Target(
            f"layers.{{i}}.qkv.{kind}", "k", lambda spec: paired_halves(spec.num_kv_heads, spec.head_dim, spec.rope.rotary_dim)
        )
        for kind in ("weight", "bias")
    },
}
"""GLM rotates neighbouring pairs."""
_UNGATED = {
    **DECODER_WEIGHTS,
    _LAYER + "mlp.up_proj.weight": Target("layers.{i}.gate_up.weight", "up"),
    _LAYER + "mlp.up_proj.bias": Target("layers.{i}.gate_up.bias", "up"),
}

FAMILIES = (
    Family(name="smollm3", title="SmolLM3", architectures=("SmolLM3ForCausalLM",), spec=_smollm3, weights=DECODER_WEIGHTS),
    Family(
        name="glm",
        title="GLM-4-9B",
        architectures=("GlmForCausalLM",),
        spec=lambda config: _glm(config, "GlmForCausalLM", both_norms=False),
        weights=_NEIGHBOURS,
    ),
    Family(
        name="glm4",
        title="GLM-4-0414",
        architectures=("Glm4ForCausalLM",),
        spec=lambda config: _glm(config, "Glm4ForCausalLM", both_norms=True),
        weights={
            **_NEIGHBOURS,
            _LAYER + "post_self_attn_layernorm.weight": Target("layers.{i}.attention_post_norm"),
            _LAYER + "post_mlp_layernorm.weight": Target("layers.{i}.mlp_post_norm"),
        },
    ),
    Family(name="arcee", title="AFM-4.5B", architectures=("ArceeForCausalLM",), spec=_arcee, weights=_UNGATED),
    Family(name="nemotron", title="Nemotron-4, Minitron", architectures=("NemotronForCausalLM",), spec=_nemotron, weights=biases(_UNGATED)),
    Family(name="seed_oss", title="Seed-OSS", architectures=("SeedOssForCausalLM",), spec=_seed, weights=DECODER_WEIGHTS),
    Family(name="ernie4_5", title="ERNIE 4.5 (dense)", architectures=("Ernie4_5ForCausalLM",), spec=_ernie, weights=_NEIGHBOURS),
    Family(
        name="exaone4",
        title="EXAONE 4",
        architectures=("Exaone4ForCausalLM",),
        spec=_exaone4,
        weights={
            **DECODER_WEIGHTS,
            _LAYER + "post_attention_layernorm.weight": Target("layers.{i}.attention_post_norm"),
            _LAYER + "post_feedforward_layernorm.weight": Target("layers.{i}.mlp_post_norm"),
            _LAYER + "self_attn.q_norm.weight": Target("layers.{i}.q_norm"),
            _LAYER + "self_attn.k_norm.weight": Target("layers.{i}.k_norm"),
        },
    ),
    Family(
        name="hunyuan_v1_dense",
        title="Hunyuan (dense), Hunyuan-MT",
        architectures=("HunYuanDenseV1ForCausalLM",),
        spec=_hunyuan,
        weights={
            **DECODER_WEIGHTS,
            _LAYER + "self_attn.query_layernorm.weight": Target("layers.{i}.q_norm"),
            _LAYER + "self_attn.key_layernorm.weight": Target("layers.{i}.k_norm"),
        },
    ),
    Family(name="ministral", title="Ministral", architectures=("MinistralForCausalLM",), spec=_ministral, weights=DECODER_WEIGHTS),
)
