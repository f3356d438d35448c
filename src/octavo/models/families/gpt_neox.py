"""GPT-NeoX and Pythia: parallel blocks with a layer norm each, a quarter of each head rotates, qkv stored head by head."""

from __future__ import annotations

from octavo.models.families.base import Family, Target, activation_of, decoder_spec, neox_layers
from octavo.models.hf_config import HfConfig, rope_spec
from octavo.models.spec import MlpSpec, ModelSpec


def _spec(config: HfConfig) -> ModelSpec:
    config = config.renamed({"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"})
    bias = config.flag("attention_bias", True)
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    return decoder_spec(
        config,
        "GPTNeoXForCausalLM",
        num_kv_heads=config.integer("num_attention_heads"),
        mlp=MlpSpec(config.integer("intermediate_size"), activation_of(config, default="gelu", gated=False), bias=True, gated=False),
        rope=rope_spec(config, head_dim, default_partial=0.25),
        norm="layer",
        norm_bias=True,
        norm_eps=config.number("layer_norm_eps", 1e-5),
        parallel_blocks=config.flag("use_parallel_residual", True),
        qkv_bias=bias,
        attention_out_bias=bias,
    )


_LAYER = "gpt_neox.layers.{i}."
FAMILY = Family(
    name="gpt_neox",
    title="GPT-NeoX, Pythia",
    architectures=("GPTNeoXForCausalLM",),
    spec=_spec,
    weights={
        "gpt_neox.embed_in.weight": Target("embed"),
        "gpt_neox.final_layer_norm.weight": Target("norm"),
        "gpt_neox.final_layer_norm.bias": Target("norm.bias"),
        "embed_out.weight": Target("head"),
        **neox_layers(_LAYER, "attention"),
    },
    prefix="gpt_neox.",
)
