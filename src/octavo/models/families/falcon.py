"""Falcon: parallel blocks; one key/value head (7B), groups of heads with two norms a layer (40B, 11B), or one a query head (RW)."""

from __future__ import annotations

from typing import Any

from octavo.layers.alibi import alibi_slopes
from octavo.models.families.base import NEOX_NORMS, Family, Target, activation_of, decoder_spec, neox_layers
from octavo.models.hf_config import HfConfig
from octavo.models.spec import MlpSpec, ModelSpec


def _spec(config: HfConfig) -> ModelSpec:
    heads, hidden, layers = (config.integer(key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    # Falcon scales its linear biases with the scores.
    positions: dict[str, Any] = {}
    if config.flag("alibi"):
        scale = (hidden // heads) ** -0.5
        positions = {"alibi_slopes": tuple(slope * scale for slope in alibi_slopes(heads)), "layer_ropes": (None,) * layers}
    newer, bias = config.flag("new_decoder_architecture"), config.flag("bias")
    if newer:
        kv_heads = config.integer("num_kv_heads", heads)
    else:
        kv_heads = 1 if config.flag("multi_query", True) else heads
    parallel = newer or config.flag("parallel_attn", True)
    two_norms = newer and config.integer("num_ln_in_parallel_attn", 2) == 2
    activation = activation_of(config, "activation", "gelu", gated=False)
    return decoder_spec(
        config,
        "FalconForCausalLM",
        num_kv_heads=kv_heads,
        mlp=MlpSpec(config.integer("ffn_hidden_size", 4 * hidden), activation, bias, gated=False),
        norm="layer",
        norm_bias=True,
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        parallel_blocks=parallel,
        shared_norm=parallel and not two_norms,
        qkv_bias=bias,
        attention_out_bias=bias,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        **positions,
    )


_LAYER = "transformer.h.{i}."
FAMILY = Family(
    name="falcon",
    title="Falcon",
    architectures=("FalconForCausalLM",),
    spec=_spec,
    weights={
        "transformer.word_embeddings.weight": Target("embed"),
        "transformer.ln_f.weight": Target("norm"),
        "transformer.ln_f.bias": Target("norm.bias"),
        "lm_head.weight": Target("head"),
        **neox_layers(_LAYER, "self_attention", (*NEOX_NORMS, ("ln_attn", "attention_norm"), ("ln_mlp", "mlp_norm"))),
    },
    prefix="transformer.",
)
