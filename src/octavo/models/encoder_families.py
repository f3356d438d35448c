"""The families of encoders: from a config.json to an `EncoderSpec`, and how their checkpoints name the tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.layers.rope import LinearScaling, RopeSpec
from octavo.models.encoder_spec import EncoderSpec
from octavo.models.families.base import Target, activation_of, layer_windows
from octavo.models.hf_config import HfConfig, rope_spec
from octavo.ops.registry import Activation

Further = Callable[[HfConfig, EncoderSpec], EncoderSpec]


@dataclass(frozen=True)
class EncoderFamily:
    """What checkpoints of a family have in common."""

    prefixes: tuple[str, ...]
    """What checkpoints of a model with a head put in front of every name."""
    weights: Mapping[str, Target]
    ignored: str
    """Regular expression of tensors that pooling does not need."""
    further: Further = lambda config, spec: spec
    """What its config says besides what all of them say."""
    renamed: Mapping[str, str] | None = None
    """{key of its config: the usual one}"""


def _named(layer: str, norms: Mapping[str, str], linears: Mapping[str, str], top: Mapping[str, str]) -> dict[str, Target]:
    """Names of an encoder's tensors, from {theirs: ours}."""
    out: dict[str, Target] = {}
    for theirs, ours in norms.items():
        # The first TensorFlow conversions called weight and bias gamma and beta.
        for kind, suffix in (("weight", ""), ("bias", ".bias"), ("gamma", ""), ("beta", ".bias")):
            out[f"{theirs}.{kind}"] = Target(ours + suffix)
    for theirs, ours in linears.items():
        parameter, _, part = ours.partition(":")
        for kind in ("weight", "bias"):
            out[f"{layer}.{theirs}.{kind}"] = Target(f"layers.{{i}}.{parameter}.{kind}", part or None)
    return {**out, **{f"{theirs}": Target(ours) for theirs, ours in top.items()}}


_HEADS = {
    f"{theirs}.{kind}": f"{ours}.{kind}"
    for theirs, ours in (
        ("pooler.dense", "classifier.dense"),
        ("classifier", "classifier.out"),
        ("classifier.dense", "classifier.dense"),
        ("classifier.out_proj", "classifier.out"),
        ("pre_classifier", "classifier.dense"),
        ("head.dense", "classifier.dense"),
    )
    for kind in ("weight", "bias")
}
_TABLES = {
    "embeddings.word_embeddings.weight": "embed",
    "embeddings.position_embeddings.weight": "positions",
    "embeddings.token_type_embeddings.weight": "token_types",
    "embeddings_project.weight": "embed_projection.weight",
    "embeddings_project.bias": "embed_projection.bias",
    **_HEADS,
}
_BERT_LAYER = "encoder.layer.{i}"
_BERT = _named(
    _BERT_LAYER,
    {
        "embeddings.LayerNorm": "embed_norm",
        f"{_BERT_LAYER}.attention.output.LayerNorm": "layers.{i}.attention_norm",
        f"{_BERT_LAYER}.output.LayerNorm": "layers.{i}.mlp_norm",
    },
    {
        "attention.self.query": "qkv:q",
        "attention.self.key": "qkv:k",
        "attention.self.value": "qkv:v",
        "attention.output.dense": "attention_out",
        "intermediate.dense": "up",
        "output.dense": "down",
    },
    _TABLES,
)
_DISTIL_LAYER = "transformer.layer.{i}"
_DISTIL = _named(
    _DISTIL_LAYER,
    {
        "embeddings.LayerNorm": "embed_norm",
        f"{_DISTIL_LAYER}.sa_layer_norm": "layers.{i}.attention_norm",
        f"{_DISTIL_LAYER}.output_layer_norm": "layers.{i}.mlp_norm",
    },
    {
        "attention.q_lin": "qkv:q",
        "attention.k_lin": "qkv:k",
        "attention.v_lin": "qkv:v",
        "attention.out_lin": "attention_out",
        "ffn.lin1": "up",
        "ffn.lin2": "down",
    },
    _TABLES,
)
_MPNET = _named(
    _BERT_LAYER,
    {
        "embeddings.LayerNorm": "embed_norm",
        f"{_BERT_LAYER}.attention.LayerNorm": "layers.{i}.attention_norm",
        f"{_BERT_LAYER}.output.LayerNorm": "layers.{i}.mlp_norm",
    },
    {
        "attention.attn.q": "qkv:q",
        "attention.attn.k": "qkv:k",
        "attention.attn.v": "qkv:v",
        "attention.attn.o": "attention_out",
        "intermediate.dense": "up",
        "output.dense": "down",
    },
    {**_TABLES, "encoder.relative_attention_bias.weight": "relative_bias"},
)
_LLAMA_LIKE = _named(
    "layers.{i}",
    {
        "embeddings.LayerNorm": "embed_norm",
        "layers.{i}.post_attention_layernorm": "layers.{i}.attention_norm",
        "layers.{i}.post_mlp_layernorm": "layers.{i}.mlp_norm",
    },
    {
        "self_attn.q_proj": "qkv:q",
        "self_attn.k_proj": "qkv:k",
        "self_attn.v_proj": "qkv:v",
        "self_attn.o_proj": "attention_out",
        "mlp.gate_proj": "gate_up:gate",
        "mlp.up_proj": "gate_up:up",
        "mlp.down_proj": "down",
    },
    _TABLES,
)
"""As newer versions of transformers name the rotating encoders."""
_NOMIC_LAYER = "encoder.layers.{i}"
_NOMIC = {
    **_LLAMA_LIKE,
    **_named(
        _NOMIC_LAYER,
        {
            "emb_ln": "embed_norm",
            f"{_NOMIC_LAYER}.norm1": "layers.{i}.attention_norm",
            f"{_NOMIC_LAYER}.norm2": "layers.{i}.mlp_norm",
        },
        {
            "attn.Wqkv": "qkv",
            "attn.out_proj": "attention_out",
            "mlp.fc11": "gate_up:up",
            "mlp.fc12": "gate_up:gate",
            "mlp.fc1": "up",
            "mlp.fc2": "down",
        },
        _TABLES,
    ),
}


def _halves_swapped(spec: Any) -> npt.NDArray[np.int64]:
    """Stored as up, then gate."""
    rows = np.arange(2 * spec.intermediate_size)
    return np.concatenate((rows[spec.intermediate_size :], rows[: spec.intermediate_size]))


_GTE = {
    **_LLAMA_LIKE,
    **_named(
        _BERT_LAYER,
        {f"{_BERT_LAYER}.attn_ln": "layers.{i}.attention_norm", f"{_BERT_LAYER}.mlp_ln": "layers.{i}.mlp_norm"},
        {"attention.qkv_proj": "qkv", "attention.o_proj": "attention_out", "mlp.down_proj": "down"},
        {},
    ),
    f"{_BERT_LAYER}.mlp.up_gate_proj.weight": Target("layers.{i}.gate_up.weight", order=_halves_swapped),
}
_MODERN = _named(
    "layers.{i}",
    {
        "embeddings.norm": "embed_norm",
        "layers.{i}.attn_norm": "layers.{i}.attention_norm",
        "layers.{i}.mlp_norm": "layers.{i}.mlp_norm",
        "final_norm": "norm",
        "head.norm": "classifier.norm",
    },
    {"attn.Wqkv": "qkv", "attn.Wo": "attention_out", "mlp.Wi": "gate_up", "mlp.Wo": "down"},
    {"embeddings.tok_embeddings.weight": "embed", **_HEADS},
)


def _distilbert(config: HfConfig, spec: EncoderSpec) -> EncoderSpec:
    return replace(spec, token_types=0, dense_activation="relu")


def _electra(config: HfConfig, spec: EncoderSpec) -> EncoderSpec:
    return replace(spec, embedding_size=config.integer("embedding_size", spec.hidden_size), dense_activation="gelu")


def _roberta(config: HfConfig, spec: EncoderSpec) -> EncoderSpec:
    return replace(spec, first_position=config.integer("pad_token_id", 1, minimum=0) + 1)


def _mpnet(config: HfConfig, spec: EncoderSpec) -> EncoderSpec:
    return replace(spec, first_position=2, token_types=0, relative_buckets=config.integer("relative_attention_num_buckets", 32))


def _rotating(spec: EncoderSpec, rope: RopeSpec, biases: frozenset[str]) -> EncoderSpec:
    return replace(spec, positions=0, ropes=(rope,) * spec.num_layers, biases=biases)


def _nomic(config: HfConfig, spec: EncoderSpec) -> EncoderSpec:
    """The checkpoint's own config names things as GPT-2's does; transformers' has the usual names, and no choice but this."""
    for key, allowed in (("prenorm", False), ("parallel_block", False), ("use_rms_norm", False), ("rotary_emb_interleaved", False)):
        if config.flag(key, allowed) is not allowed:
            raise UnsupportedModel(f"{config.where}: {key} {not allowed} is not supported.")
    if config.values.get("num_experts") and config.values.get("moe_every_n_layers"):
        raise UnsupportedModel(f"{config.where}: encoders with experts (moe_every_n_layers) are not supported.")
    if config.values.get("rotary_emb_scale_base") is not None:
        raise UnsupportedModel(f"{config.where}: rotary_emb_scale_base is not supported.")
    named = config.text("activation_function", "")
    gated = named in ("", "swiglu", "geglu")
    theta = config.number("rotary_emb_base", 1000.0)
    if config.values.get("rotary_emb_fraction") == 0:
        raise UnsupportedModel(f"{config.where}: rotary_emb_fraction 0 (learned positions) is not supported.")
    biases = {"norm", "dense"}
    for key, names in (("qkv_proj_bias", ("qkv", "attention_out")), ("mlp_fc1_bias", ("up",)), ("mlp_fc2_bias", ("down",))):
        biases |= set(names if config.flag(key, False) else ())
    rope = rope_spec(config, spec.head_dim, default_theta=theta, default_partial=config.number("rotary_emb_fraction", 1.0))
    gates: dict[str, Activation] = {"swiglu": "silu", "geglu": "gelu"}
    kind = gates.get(named) or activation_of(config, "activation_function" if named else "hidden_act", gated=False)
    return replace(_rotating(spec, rope, frozenset(biases)), activation=kind, gated=gated)


def _gte(config: HfConfig, spec: EncoderSpec) -> EncoderSpec:
    """Its scaling "ntk" is a larger base and a little interpolation, both fixed: https://kexue.fm/archives/9706"""
    if (kind := config.text("position_embedding_type", "rope")) != "rope":
        raise UnsupportedModel(f"{config.where}: position_embedding_type {kind!r} is not supported, only rope.")
    if (kind := config.text("layer_norm_type", "layer_norm")) != "layer_norm":
        raise UnsupportedModel(f"{config.where}: layer_norm_type {kind!r} is not supported, only layer_norm.")
    scaling = config.section("rope_scaling")
    if scaling.text("type", scaling.text("rope_type", "")) == "ntk":
        if scaling.values.get("mixed_b") is not None:
            raise UnsupportedModel(f"{scaling.where}: mixed_b is not supported.")
        factor = scaling.number("factor")
        plain = HfConfig({k: v for k, v in config.values.items() if k != "rope_scaling"}, config.where)
        rope = rope_spec(plain, spec.head_dim)
        rope = replace(rope, theta=rope.theta * factor, scaling=LinearScaling(factor ** (2 / rope.rotary_dim)))
    else:
        rope = rope_spec(config, spec.head_dim, default_theta=160_000.0)
    types = config.integer("type_vocab_size", 1, minimum=0)
    return replace(_rotating(spec, rope, frozenset({"qkv", "attention_out", "down", "norm", "dense"})), gated=True, token_types=types)


def _modern(config: HfConfig, spec: EncoderSpec) -> EncoderSpec:
    """ModernBERT (Warner et al. 2024): local layers with a rotation of their own between global ones."""
    every = config.integer("global_attn_every_n_layers", 3)
    # The config counts both sides.
    windows = layer_windows(config, config.integer("local_attention", 128) // 2 + 1, lambda layer: layer % every != 0)
    ropes = {
        local: rope_spec(
            config,
            spec.head_dim,
            default_theta=config.number("local_rope_theta", 10_000.0) if local else config.number("global_rope_theta", 160_000.0),
            layer_type="sliding_attention" if local else "full_attention",
        )
        for local in (False, True)
    }
    given = {"norm": "norm_bias", "qkv": "attention_bias", "attention_out": "attention_bias", "up": "mlp_bias", "down": "mlp_bias"}
    biases = {name for name, key in (given | {"dense": "classifier_bias"}).items() if config.flag(key, False)}
    return replace(
        spec,
        norm_eps=config.number("norm_eps", 1e-5),
        positions=0,
        token_types=0,
        ropes=tuple(ropes[window is not None] for window in windows),
        windows=windows,
        gated=True,
        pre_norm=True,
        biases=frozenset(biases),
        dense_activation=config.text("classifier_activation", "gelu"),
        dense_norm=True,
    )


_UNUSED = r"^(cls|lm_head|generator_|discriminator_|vocab_)|^(bert|roberta|mpnet)\.pooler\.|^pooler\."
_GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
_DISTIL_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}
_GTE_FAMILY = EncoderFamily(("new.", "gte."), _GTE, _UNUSED, _gte)
_FAMILIES: Mapping[str, EncoderFamily] = {
    "Bert": EncoderFamily(("bert.",), _BERT, _UNUSED),
    "Roberta": EncoderFamily(("roberta.",), _BERT, _UNUSED, _roberta),
    "XLMRoberta": EncoderFamily(("roberta.",), _BERT, _UNUSED, _roberta),
    "Camembert": EncoderFamily(("roberta.",), _BERT, _UNUSED, _roberta),
    "Electra": EncoderFamily(("electra.",), _BERT, _UNUSED, _electra),
    "DistilBert": EncoderFamily(("distilbert.",), _DISTIL, _UNUSED, _distilbert, _DISTIL_KEYS),
    "MPNet": EncoderFamily(("mpnet.",), _MPNET, _UNUSED, _mpnet),
    "ModernBert": EncoderFamily(("model.",), _MODERN, r"^(head|decoder)\.", _modern, {"hidden_activation": "hidden_act"}),
    "NomicBert": EncoderFamily(("nomic_bert.", "bert."), _NOMIC, _UNUSED, _nomic, _GPT2_KEYS),
    "New": _GTE_FAMILY,
    "Gte": _GTE_FAMILY,
}
ENCODERS: tuple[str, ...] = tuple(
    f"{name}{suffix}" for name in _FAMILIES for suffix in ("Model", "ForMaskedLM", "ForSequenceClassification")
)
"""Architecture names that run as encoders."""


def encoder_spec(hf_config: Mapping[str, Any], where: str, *, labels: int) -> tuple[EncoderSpec, EncoderFamily]:
    """What an encoder checkpoint is, from its config alone.

    Args:
        labels: classes of its head; 0 to pool without one.

    Raises:
        UnsupportedModel: not an encoder that is known, or positions of a kind that is not.
        CheckpointError: a config value that is missing or impossible.
    """
    architecture = str(hf_config["architectures"][0])
    match = re.fullmatch(r"(\w+?)(Model|ForMaskedLM|ForSequenceClassification)", architecture)
    if match is None or match[1] not in _FAMILIES:
        raise UnsupportedModel(f"Encoder {architecture} is not supported. Supported: {', '.join(ENCODERS)}.")
    family = _FAMILIES[match[1]]
    config = HfConfig(hf_config, where)
    if family.renamed is not None:
        config = config.renamed(family.renamed)
    rotates = family.further in (_nomic, _gte, _modern)
    if not rotates and (kind := config.text("position_embedding_type", "absolute")) != "absolute":
        raise UnsupportedModel(f"{where}: position_embedding_type {kind!r} is not supported, only absolute.")
    hidden, heads = config.integer("hidden_size", 768), config.integer("num_attention_heads", 12)
    if hidden % heads:
        raise CheckpointError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}.")
    spec = EncoderSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=config.integer("num_hidden_layers", 12),
        num_heads=heads,
        intermediate_size=config.integer("intermediate_size", 4 * hidden),
        activation=activation_of(config, default="gelu", gated=False),
        norm_eps=config.number("layer_norm_eps", 1e-12),
        positions=config.integer("max_position_embeddings", 512),
        first_position=0,
        token_types=config.integer("type_vocab_size", 2, minimum=0),
        embedding_size=hidden,
        labels=labels,
    )
    return family.further(config, spec), family
