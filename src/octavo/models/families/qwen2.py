"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and windows in the upper layers when switched on."""

from __future__ import annotations

from octavo.models.families.base import DECODER_WEIGHTS, Family, decoder_spec, windows_of_upper_layers
from octavo.models.hf_config import HfConfig
from octavo.models.spec import ModelSpec


def _spec(config: HfConfig) -> ModelSpec:
    return decoder_spec(config, "Qwen2ForCausalLM", qkv_bias=True, sliding_windows=windows_of_upper_layers(config))


FAMILY = Family(
    name="qwen2",
    title="Qwen2, Qwen2.5",
    architectures=("Qwen2ForCausalLM",),
    spec=_spec,
    weights=DECODER_WEIGHTS,
)
