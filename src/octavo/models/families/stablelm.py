"""StableLM: Llama with layer norms, a quarter of each head rotated, and (12B) parallel blocks and norms for each head."""

from __future__ import annotations

from octavo.models.families.base import DECODER_WEIGHTS, Family, Target, biases, decoder_spec
from octavo.models.hf_config import HfConfig, rope_spec
from octavo.models.spec import ModelSpec


def _spec(config: HfConfig) -> ModelSpec:
    parallel = config.flag("use_parallel_residual")
    config = config.renamed({"rope_pct": "partial_rotary_factor"})
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    return decoder_spec(
        config,
        "StableLmForCausalLM",
        rope=rope_spec(config, head_dim, default_partial=0.25),
        norm="layer",
        norm_bias=True,
        norm_eps=config.number("layer_norm_eps", 1e-5),
        parallel_blocks=parallel,
        shared_norm=parallel,
        qkv_bias=config.flag("use_qkv_bias"),
        qk_norm=config.flag("qk_layernorm"),
        qk_norm_scope="heads",
    )


FAMILY = Family(
    name="stablelm",
    title="StableLM",
    architectures=("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    spec=_spec,
    weights={
        **biases(DECODER_WEIGHTS),
        "model.layers.{i}.self_attn.q_layernorm.norms.{e}.weight": Target("layers.{i}.q_norm", "{e}"),
        "model.layers.{i}.self_attn.k_layernorm.norms.{e}.weight": Target("layers.{i}.k_norm", "{e}"),
    },
)
