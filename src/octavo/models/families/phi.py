"""Phi: the third and fourth generation are Llama with fused matrices; 1 to 2 have parallel blocks under one layer norm."""

from __future__ import annotations

from octavo.models.families.base import DECODER_WEIGHTS, Family, Target, activation_of, biases, decoder_spec
from octavo.models.hf_config import HfConfig, rope_spec
from octavo.models.spec import MlpSpec, ModelSpec


def _phi3(config: HfConfig) -> ModelSpec:
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    return decoder_spec(config, "Phi3ForCausalLM", sliding_windows=(window,) * config.integer("num_hidden_layers"))


def _phi(config: HfConfig) -> ModelSpec:
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    return decoder_spec(
        config,
        "PhiForCausalLM",
        mlp=MlpSpec(config.integer("intermediate_size"), activation_of(config, default="gelu_new", gated=False), bias=True, gated=False),
        rope=rope_spec(config, head_dim, default_partial=0.5),
        norm="layer",
        norm_bias=True,
        norm_eps=config.number("layer_norm_eps", 1e-5),
        parallel_blocks=True,
        shared_norm=True,
        qkv_bias=True,
        attention_out_bias=True,
        head_bias=True,
        qk_norm=config.flag("qk_layernorm"),
        qk_norm_bias=config.flag("qk_layernorm"),
    )


PHI3 = Family(
    name="phi3", title="Phi-3, Phi-3.5, Phi-4, Phi-4-mini", architectures=("Phi3ForCausalLM",), spec=_phi3, weights=DECODER_WEIGHTS
)
PHI = Family(
    name="phi",
    title="Phi-1, 1.5, 2",
    architectures=("PhiForCausalLM",),
    spec=_phi,
    weights={
        **biases(
            {
                **{name: target for name, target in DECODER_WEIGHTS.items() if ".mlp." not in name and ".o_proj." not in name},
                "model.final_layernorm.weight": Target("norm"),
            }
        ),
        "lm_head.bias": Target("head.bias"),
        **{
            f"model.layers.{{i}}.self_attn.{part}_layernorm.{kind}": Target(f"layers.{{i}}.{part}_norm{suffix}")
            for part in ("q", "k")
            for kind, suffix in (("weight", ""), ("bias", ".bias"))
        },
        **{
            f"model.layers.{{i}}.{source}.{kind}": Target(f"layers.{{i}}.{parameter}.{kind}", part)
            for kind in ("weight", "bias")
            for source, parameter, part in (
                ("self_attn.dense", "attention_out", None),
                ("mlp.fc1", "gate_up", "up"),
                ("mlp.fc2", "down", None),
            )
        },
    },
)
