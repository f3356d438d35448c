"""Llama 2, 3.x and the many models published under its architecture (SmolLM2, Yi, ...)."""

from __future__ import annotations

from octavo.models.families.base import DECODER_WEIGHTS, Family, Target, decoder_spec
from octavo.models.hf_config import HfConfig
from octavo.models.spec import ModelSpec

_LAYER = "transformer.h.{i}."
_EXAONE = {"num_layers": "num_hidden_layers", "activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps"}


def _spec(config: HfConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    return decoder_spec(config, "LlamaForCausalLM", qkv_bias=bias, attention_out_bias=bias, mlp_bias=config.flag("mlp_bias"))


EXAONE_WEIGHTS = {
    "transformer.wte.weight": Target("embed"),
    "transformer.ln_f.weight": Target("norm"),
    f"{_LAYER}ln_1.weight": Target("layers.{i}.attention_norm"),
    f"{_LAYER}ln_2.weight": Target("layers.{i}.mlp_norm"),
    f"{_LAYER}attn.attention.q_proj.weight": Target("layers.{i}.qkv.weight", "q"),
    f"{_LAYER}attn.attention.k_proj.weight": Target("layers.{i}.qkv.weight", "k"),
    f"{_LAYER}attn.attention.v_proj.weight": Target("layers.{i}.qkv.weight", "v"),
    f"{_LAYER}attn.attention.out_proj.weight": Target("layers.{i}.attention_out.weight"),
    f"{_LAYER}mlp.c_fc_0.weight": Target("layers.{i}.gate_up.weight", "gate"),
    f"{_LAYER}mlp.c_fc_1.weight": Target("layers.{i}.gate_up.weight", "up"),
    f"{_LAYER}mlp.c_proj.weight": Target("layers.{i}.down.weight"),
}
"""Llama under other names, which transformers also writes with Llama's class in the config."""

FAMILY = Family(
    name="llama",
    title="Llama 1 to 3.x, SmolLM2, Yi",
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    spec=_spec,
    weights={**DECODER_WEIGHTS, **EXAONE_WEIGHTS},
)
EXAONE = Family(
    name="exaone",
    title="EXAONE 3, 3.5, Deep",
    architectures=("ExaoneForCausalLM",),
    spec=lambda config: _spec(config.renamed(_EXAONE)),
    weights={**EXAONE_WEIGHTS, "lm_head.weight": Target("head")},
    prefix="transformer.",
)
