"""What a family is, and what nearly all of them share: the pre-norm decoder of Llama and the names of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.hf_config import HfConfig, rope_spec
from octavo.models.spec import MlpSpec, ModelSpec
from octavo.ops.registry import Activation


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes."""

    parameter: str
    """Name of the parameter; `{i}` is the layer."""
    part: str | None = None
    """Which part of it; None: the whole."""


@dataclass(frozen=True)
class Family:
    name: str
    architectures: tuple[str, ...]
    """As `architectures` in config.json has them."""
    spec: Callable[[HfConfig], ModelSpec]
    weights: Mapping[str, Target]
    """Checkpoint tensor name -> target; `{i}` is the layer."""


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

DECODER_WEIGHTS: Mapping[str, Target] = {
    "model.embed_tokens.weight": Target("embed"),
    "model.norm.weight": Target("norm"),
    "lm_head.weight": Target("head"),
    "model.layers.{i}.input_layernorm.weight": Target("layers.{i}.attention_norm"),
    "model.layers.{i}.post_attention_layernorm.weight": Target("layers.{i}.mlp_norm"),
    **{
        f"model.layers.{{i}}.{source}.{kind}": Target(f"layers.{{i}}.{parameter}.{kind}", part)
        for kind in ("weight", "bias")
        for source, parameter, part in (
            ("self_attn.q_proj", "qkv", "q"),
            ("self_attn.k_proj", "qkv", "k"),
            ("self_attn.v_proj", "qkv", "v"),
            ("self_attn.qkv_proj", "qkv", None),
            ("self_attn.o_proj", "attention_out", None),
            ("mlp.gate_proj", "gate_up", "gate"),
            ("mlp.up_proj", "gate_up", "up"),
            ("mlp.gate_up_proj", "gate_up", None),
            ("mlp.down_proj", "down", None),
        )
    },
}
"""Names of the Llama decoder, split or fused."""


def decoder_spec(
    config: HfConfig,
    architecture: str,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    mlp_bias: bool = False,
    **differences: Any,
) -> ModelSpec:
    """The spec of a Llama-like decoder.

    Args:
        num_kv_heads, head_dim: when this family has them otherwise than Llama.
        differences: further fields of `ModelSpec`.

    Raises:
        CheckpointError: a value of the config is missing or impossible.
        UnsupportedModel: an activation or a rotary scaling that is not known.
    """
    heads = config.integer("num_attention_heads")
    kv_heads = num_kv_heads or config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"{config.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
    hidden = config.integer("hidden_size")
    head_dim = head_dim or config.integer("head_dim", hidden // heads or None)
    activation = config.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(f"{config.where}: hidden_act {activation!r} is not supported. Supported: {', '.join(ACTIVATIONS)}.")
    fields: dict[str, Any] = {
        "mlp": MlpSpec(config.integer("intermediate_size"), ACTIVATIONS[activation], mlp_bias),
        "rope": rope_spec(config, head_dim),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "sliding_windows": (None,) * config.integer("num_hidden_layers"),
        "tied_embeddings": config.flag("tie_word_embeddings"),
    }
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **(fields | differences),
    )


def windows_of_upper_layers(config: HfConfig) -> tuple[int | None, ...]:
    """Qwen's rule: with `use_sliding_window`, layers from `max_window_layers` on slide. `layer_types` wins where it is given."""
    layers = config.integer("num_hidden_layers")
    if not config.flag("use_sliding_window") or not config.has("sliding_window"):
        return (None,) * layers
    window = config.integer("sliding_window")
    kinds = config.values.get("layer_types")
    if kinds is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.fail("layer_types", f"a list of {layers} entries, each full_attention or sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
