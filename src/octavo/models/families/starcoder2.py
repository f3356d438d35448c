"""StarCoder2: layer norms, a feed-forward block without a gate, biases everywhere, a sliding window."""

from __future__ import annotations

from octavo.models.families.base import DECODER_WEIGHTS, Family, Target, activation_of, biases, decoder_spec
from octavo.models.hf_config import HfConfig
from octavo.models.spec import MlpSpec, ModelSpec


def _spec(config: HfConfig) -> ModelSpec:
    bias = config.flag("use_bias", True)
    activation = activation_of(config, default="gelu_pytorch_tanh", gated=False)
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    return decoder_spec(
        config,
        "Starcoder2ForCausalLM",
        mlp=MlpSpec(config.integer("intermediate_size"), activation, bias, gated=False),
        norm="layer",
        norm_bias=True,
        norm_eps=config.number("norm_epsilon", 1e-5),
        qkv_bias=bias,
        attention_out_bias=bias,
        sliding_windows=(window,) * config.integer("num_hidden_layers"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family(
    name="starcoder2",
    title="StarCoder2",
    architectures=("Starcoder2ForCausalLM",),
    spec=_spec,
    weights={
        **biases(DECODER_WEIGHTS),
        **{
            f"model.layers.{{i}}.mlp.{source}.{kind}": Target(f"layers.{{i}}.{parameter}.{kind}", part)
            for kind in ("weight", "bias")
            for source, parameter, part in (("c_fc", "gate_up", "up"), ("c_proj", "down", None))
        },
    },
)
