"""Llama 2, 3.x and the many models published under its architecture (SmolLM2, Yi, ...)."""

from __future__ import annotations

from octavo.models.families.base import DECODER_WEIGHTS, Family, decoder_spec
from octavo.models.hf_config import HfConfig
from octavo.models.spec import ModelSpec


def _spec(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    return decoder_spec(config, "LlamaForCausalLM", qkv_bias=bias, attention_out_bias=bias, mlp_bias=config.flag("mlp_bias"))


FAMILY = Family(
    name="llama",
    title="Llama 1 to 3.x, SmolLM2, Yi",
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    spec=_spec,
    weights=DECODER_WEIGHTS,
)
