"""Granite 3: Llama with multipliers on embeddings, residual stream, attention scores and logits."""

from __future__ import annotations

from octavo.models.families.base import DECODER_WEIGHTS, Family, decoder_spec
from octavo.models.hf_config import HfConfig
from octavo.models.spec import ModelSpec


def _spec(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    return decoder_spec(
        config,
        "GraniteForCausalLM",
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        attention_scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )


FAMILY = Family(name="granite", title="Granite 3", architectures=("GraniteForCausalLM",), spec=_spec, weights=DECODER_WEIGHTS)
