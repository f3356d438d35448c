"""What a family is, and what nearly all of them share: the pre-norm decoder of Llama and the names of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.hf_config import HfConfig, rope_spec
from octavo.models.spec import MlpSpec, ModelSpec
from octavo.ops.registry import Activation

RowOrder = Callable[[Any], npt.NDArray[np.int64]]
"""From the spec, a `ModelSpec` or an `EncoderSpec`, to which stored row each row is."""


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes."""

    parameter: str
    """Name of the parameter; `{i}` is the layer."""
    part: str | None = None
    """Which part of it; None: the whole. `{e}` is the second number in the tensor's name (an expert, a head)."""
    order: RowOrder | None = None
    """Which stored row each row is, where the checkpoint has them otherwise."""
    transposed: bool = False
    """Stored as [in_features, out_features]."""


@dataclass(frozen=True)
class Family:
    name: str
    title: str
    """What people call the models of this family, for the table of supported ones."""
    architectures: tuple[str, ...]
    """As `architectures` in config.json has them."""
    spec: Callable[[HfConfig], ModelSpec]
    weights: Mapping[str, Target]
    """Checkpoint tensor name -> target; `{i}` is the layer, `{e}` a second number."""
    prefix: str = "model."
    """What checkpoints of the bare model, without its head, leave out in front of every name."""
    quantizations: tuple[str, ...] = ()
    """`quant_method`s of config.json whose tensors `weights` names."""


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
UNGATED_ONLY: frozenset[Activation] = frozenset({"relu", "relu2"})

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


MAX_LAYERS = 10_000
"""No model has nearly as many; a number that is wrong would fill the memory before any weight is missed."""


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
    if config.integer("num_hidden_layers") > MAX_LAYERS:
        raise config.fail("num_hidden_layers", f"at most {MAX_LAYERS}")
    heads = config.integer("num_attention_heads")
    kv_heads = num_kv_heads or config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"{config.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
    hidden = config.integer("hidden_size")
    head_dim = head_dim or config.integer("head_dim", hidden // heads or None)
    fields: dict[str, Any] = {
        "mlp": differences.get("mlp") or MlpSpec(config.integer("intermediate_size"), activation_of(config), mlp_bias),
        "rope": differences.get("rope") or rope_spec(config, head_dim),
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


def activation_of(config: HfConfig, key: str = "hidden_act", default: str = "silu", *, gated: bool = True) -> Activation:
    """The activation that a config names.

    Raises:
        UnsupportedModel: it is not known, or not in a gated block.
        CheckpointError: it is no name.
    """
    otherwise = config.has("activation_function") or config.has("hidden_activation")
    if key == "hidden_act" and config.values.get(key, default) is None and not otherwise:
        raise config.fail(key, "the name of an activation, or left out")
    name = config.text(key, default)
    allowed = [known for known, ours in ACTIVATIONS.items() if not gated or ours not in UNGATED_ONLY]
    if name not in allowed:
        raise UnsupportedModel(f"{config.where}: {key} {name!r} is not supported. Supported: {', '.join(allowed)}.")
    return ACTIVATIONS[name]


def layer_windows(config: HfConfig, window: int | None, default: Callable[[int], bool] = lambda layer: True) -> tuple[int | None, ...]:
    """The window of each layer: `layer_types` says which layers have one, else `default` does.

    Raises:
        CheckpointError: `layer_types` is not one known kind a layer, or layers are to have a window and the config says that there is none.
    """
    layers = config.integer("num_hidden_layers")
    kinds = config.values.get("layer_types")
    denied = config.values.get("sliding_window", window) is None
    if kinds is None:
        windows = tuple(window if default(i) else None for i in range(layers))
        if denied and any(windows):
            raise config.fail("sliding_window", "a whole number from 1: this architecture has layers with a window")
        return windows
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.fail("layer_types", f"a list of {layers} entries, each full_attention or sliding_attention")
    if "sliding_attention" in kinds and (denied or window is None):
        raise config.fail(
            "sliding_window", "a whole number from 1, and in use (use_sliding_window), since layer_types has layers with sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def paired_halves(heads: int, head_dim: int, rotary_dim: int | None = None) -> npt.NDArray[np.int64]:
    """Row order for q or k of a model that rotates neighbours (2i, 2i + 1): ours rotates (i, i + rotary_dim / 2).

    A rotation of other pairs is the same rotation with the rows of q and k in another order; scores do not change.
    """
    rotary_dim = rotary_dim or head_dim
    head = np.concatenate((np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2), np.arange(rotary_dim, head_dim)))
    return (np.arange(heads)[:, None] * head_dim + head).reshape(-1)


def grouped_qkv(spec: ModelSpec) -> npt.NDArray[np.int64]:
    """Row order for a fused qkv that stores the query heads of a group, then their k, then their v, group after group."""
    group, head_dim = spec.num_heads // spec.num_kv_heads, spec.head_dim
    stored = np.arange(spec.num_kv_heads * (group + 2) * head_dim).reshape(spec.num_kv_heads, group + 2, head_dim)
    return np.concatenate([stored[:, part].reshape(-1) for part in (slice(0, group), group, group + 1)])


def biases(names: Mapping[str, Target]) -> dict[str, Target]:
    """The same names with the biases of layer norms: each norm's `.weight` has a `.bias` beside it."""
    norms = {n: t for n, t in names.items() if n.endswith(".weight") and t.parameter.rpartition(".")[2].endswith("norm")}
    return {**names, **{n.removesuffix("weight") + "bias": replace(t, parameter=t.parameter + ".bias") for n, t in norms.items()}}


def windows_of_upper_layers(config: HfConfig) -> tuple[int | None, ...]:
    """Qwen's rule: with `use_sliding_window`, layers from `max_window_layers` on slide. `layer_types` wins where it is given."""
    if not config.flag("use_sliding_window") or not config.has("sliding_window"):
        return layer_windows(config, None)
    first = config.integer("max_window_layers", 28, minimum=0)
    return layer_windows(config, config.integer("sliding_window"), lambda layer: layer >= first)


NEOX_NORMS = (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm"))


def neox_layers(layer: str, attention: str, norms: Sequence[tuple[str, str]] = NEOX_NORMS) -> dict[str, Target]:
    """Weights and biases of layers named as GPT-NeoX names them: qkv in one tensor, group by group.

    Args:
        layer: what stands in front of a layer's names, with `{i}` for its number.
        attention: the attention's name.
        norms: (name, parameter).
    """
    linears = (
        (f"{attention}.query_key_value", "qkv", None),
        (f"{attention}.dense", "attention_out", None),
        ("mlp.dense_h_to_4h", "gate_up", "up"),
        ("mlp.dense_4h_to_h", "down", None),
    )
    targets = {
        f"{layer}{source}.{kind}": Target(f"layers.{{i}}.{parameter}{suffix}")
        for source, parameter in norms
        for kind, suffix in (("weight", ""), ("bias", ".bias"))
    }
    return targets | {
        f"{layer}{source}.{kind}": Target(f"layers.{{i}}.{parameter}.{kind}", part, grouped_qkv if parameter == "qkv" else None)
        for kind in ("weight", "bias")
        for source, parameter, part in linears
    }
