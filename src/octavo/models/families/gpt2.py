"""GPT-2: learned positions, layer norms, and matrices stored as [in, out]."""

from __future__ import annotations

from octavo.layers.rope import RopeSpec
from octavo.models.families.base import Family, Target, activation_of, decoder_spec
from octavo.models.hf_config import HfConfig
from octavo.models.spec import MlpSpec, ModelSpec

_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}


def _spec(config: HfConfig) -> ModelSpec:
    config = config.renamed(_NAMES)
    layers, hidden, heads = (config.integer(k) for k in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    activation = activation_of(config, "activation_function", "gelu_new", gated=False)
    return decoder_spec(
        config,
        "GPT2LMHeadModel",
        num_kv_heads=heads,
        mlp=MlpSpec(config.integer("n_inner", 4 * hidden), activation, bias=True, gated=False),
        rope=RopeSpec(10000.0, hidden // heads // 2 * 2),
        layer_ropes=(None,) * layers,
        learned_positions=config.integer("max_position_embeddings", 1024),
        norm="layer",
        norm_bias=True,
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        qkv_bias=True,
        attention_out_bias=True,
        attention_scale=None if config.flag("scale_attn_weights", True) else 1.0,
        scale_by_layer=config.flag("scale_attn_by_inverse_layer_idx"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _layer_weights() -> dict[str, Target]:
    out: dict[str, Target] = {}
    for source, parameter, part in (
        ("attn.c_attn", "qkv", None),
        ("attn.c_proj", "attention_out", None),
        ("mlp.c_fc", "gate_up", "up"),
        ("mlp.c_proj", "down", None),
    ):
        out[f"transformer.h.{{i}}.{source}.weight"] = Target(f"layers.{{i}}.{parameter}.weight", part, transposed=True)
        out[f"transformer.h.{{i}}.{source}.bias"] = Target(f"layers.{{i}}.{parameter}.bias", part)
    for source, parameter in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
        out[f"transformer.h.{{i}}.{source}.weight"] = Target(f"layers.{{i}}.{parameter}")
        out[f"transformer.h.{{i}}.{source}.bias"] = Target(f"layers.{{i}}.{parameter}.bias")
    return out


FAMILY = Family(
    name="gpt2",
    title="GPT-2",
    architectures=("GPT2LMHeadModel",),
    spec=_spec,
    weights={
        "transformer.wte.weight": Target("embed"),
        "transformer.wpe.weight": Target("positions"),
        "transformer.ln_f.weight": Target("norm"),
        "transformer.ln_f.bias": Target("norm.bias"),
        "lm_head.weight": Target("head"),
        **_layer_weights(),
    },
    prefix="transformer.",
)
