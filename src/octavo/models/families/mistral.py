"""Mistral 7B and its successors: Llama with a sliding window in every layer (v0.1), or without one (from v0.2 on); Ministral 3, whose queries
grow with their position."""

from __future__ import annotations

from octavo.layers.query_growth import QueryGrowth
from octavo.models.families.base import DECODER_WEIGHTS, Family, decoder_spec
from octavo.models.hf_config import HfConfig
from octavo.models.spec import ModelSpec

_DEFAULT_WINDOW = 4096
_DEFAULT_KV_HEADS = 8


def _spec(config: HfConfig) -> ModelSpec:
    # An explicit null means no window; only a missing key has the default of the first release.
    null = "sliding_window" in config.values and config.values["sliding_window"] is None
    window = None if null else config.integer("sliding_window", _DEFAULT_WINDOW)
    kv_heads = None if "num_key_value_heads" in config.values else _DEFAULT_KV_HEADS
    layers = config.integer("num_hidden_layers")
    return decoder_spec(config, "MistralForCausalLM", sliding_windows=(window,) * layers, num_kv_heads=kv_heads)


def _ministral3(config: HfConfig) -> ModelSpec:
    rope = config.section("rope_parameters")
    growth = None
    if rope.has("llama_4_scaling_beta"):
        growth = QueryGrowth(rope.number("llama_4_scaling_beta"), rope.integer("original_max_position_embeddings"))
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    return decoder_spec(
        config,
        "Ministral3ForCausalLM",
        norm_eps=config.number("rms_norm_eps", 1e-5),
        sliding_windows=(window,) * config.integer("num_hidden_layers"),
        query_growth=growth,
    )


MINISTRAL3 = Family(
    name="ministral3",
    title="Ministral 3",
    architectures=("Ministral3ForCausalLM",),
    spec=_ministral3,
    weights=DECODER_WEIGHTS,
)
FAMILY = Family(
    name="mistral",
    title="Mistral 7B and its successors",
    architectures=("MistralForCausalLM",),
    spec=_spec,
    weights=DECODER_WEIGHTS,
)
