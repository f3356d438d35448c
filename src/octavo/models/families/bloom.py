"""BLOOM and MPT: scores gain linear biases in place of positions. BLOOM norms its embeddings; MPT's norms have no bias, nor has anything else."""

from __future__ import annotations

import math
from typing import Any

from octavo.errors import UnsupportedModel
from octavo.layers.alibi import alibi_slopes
from octavo.layers.rope import RopeSpec
from octavo.models.families.base import Family, Target, decoder_spec, neox_layers
from octavo.models.hf_config import HfConfig
from octavo.models.spec import MlpSpec, ModelSpec


def _common(config: HfConfig, architecture: str, slopes: tuple[float, ...], **differences: Any) -> ModelSpec:
    heads, hidden, layers = (config.integer(key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    return decoder_spec(
        config,
        architecture,
        num_kv_heads=heads,
        rope=RopeSpec(10000.0, hidden // heads // 2 * 2),
        layer_ropes=(None,) * layers,
        alibi_slopes=slopes,
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        **differences,
    )


def _bloom(config: HfConfig) -> ModelSpec:
    config = config.renamed({"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"})
    if config.flag("apply_residual_connection_post_layernorm"):
        raise UnsupportedModel(f"{config.where}: apply_residual_connection_post_layernorm is not supported.")
    return _common(
        config,
        "BloomForCausalLM",
        alibi_slopes(config.integer("num_attention_heads")),
        mlp=MlpSpec(4 * config.integer("hidden_size"), "gelu_tanh", bias=True, gated=False),
        norm_bias=True,
        qkv_bias=True,
        attention_out_bias=True,
        embedding_norm=True,
    )


def _mpt(config: HfConfig) -> ModelSpec:
    config = config.renamed({"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"})
    attention, heads = config.section("attn_config"), config.integer("num_attention_heads")
    for section, key, default, served in (
        (attention, "alibi", True, True),
        (attention, "qk_ln", False, False),
        (attention, "prefix_lm", False, False),
        (config, "no_bias", True, True),
    ):
        if section.flag(key, default) != served:
            raise UnsupportedModel(f"{section.where}: {key} {str(not served).lower()} is not supported.")
    if config.has("logit_scale"):
        raise UnsupportedModel(f"{config.where}: logit_scale is not supported.")
    return _common(
        config,
        "MptForCausalLM",
        _mpt_slopes(heads, attention.number("alibi_bias_max", 8)),
        mlp=MlpSpec(config.integer("expansion_ratio", 4) * config.integer("hidden_size"), "gelu", gated=False),
        clip_qkv=attention.number("clip_qkv") if attention.has("clip_qkv") else None,
        attention_scale=attention.number("softmax_scale") if attention.has("softmax_scale") else None,
    )


def _mpt_slopes(heads: int, most: float) -> tuple[float, ...]:
    """Of the next longer series every other one, and then the others."""
    power = 2 ** math.ceil(math.log2(heads))
    series = [2.0 ** (-most * (i + 1) / power) for i in range(power)]
    return tuple(series if power == heads else [*series[1::2], *series[::2]][:heads])


_LAYER = "transformer.h.{i}."
_BLOCK = "transformer.blocks.{i}."

BLOOM = Family(
    name="bloom",
    title="BLOOM",
    architectures=("BloomForCausalLM",),
    spec=_bloom,
    weights={
        "transformer.word_embeddings.weight": Target("embed"),
        "transformer.word_embeddings_layernorm.weight": Target("embed_norm"),
        "transformer.word_embeddings_layernorm.bias": Target("embed_norm.bias"),
        "transformer.ln_f.weight": Target("norm"),
        "transformer.ln_f.bias": Target("norm.bias"),
        "lm_head.weight": Target("head"),
        **neox_layers(_LAYER, "self_attention"),
    },
    prefix="transformer.",
)
MPT = Family(
    name="mpt",
    title="MPT",
    architectures=("MptForCausalLM", "MPTForCausalLM"),
    spec=_mpt,
    weights={
        "transformer.wte.weight": Target("embed"),
        "transformer.norm_f.weight": Target("norm"),
        "lm_head.weight": Target("head"),
        f"{_BLOCK}norm_1.weight": Target("layers.{i}.attention_norm"),
        f"{_BLOCK}norm_2.weight": Target("layers.{i}.mlp_norm"),
        f"{_BLOCK}attn.Wqkv.weight": Target("layers.{i}.qkv.weight"),
        f"{_BLOCK}attn.out_proj.weight": Target("layers.{i}.attention_out.weight"),
        f"{_BLOCK}ffn.up_proj.weight": Target("layers.{i}.gate_up.weight", "up"),
        f"{_BLOCK}ffn.down_proj.weight": Target("layers.{i}.down.weight"),
    },
    prefix="transformer.",
)
