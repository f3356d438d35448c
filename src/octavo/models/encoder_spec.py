"""`EncoderSpec`: what tells one BERT-like encoder from another, the parameters that follow from it, and the families."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.attention.base import LayerSpec
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.families.base import Target, activation_of
from octavo.models.hf_config import HfConfig
from octavo.models.spec import Parameter
from octavo.ops.registry import Activation


@dataclass(frozen=True)
class EncoderSpec:
    """A bidirectional transformer with norms behind its blocks (BERT, Devlin et al. 2019) and learned positions."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: Activation
    norm_eps: float
    positions: int
    """Rows of the position table."""
    first_position: int
    """Row of the first token."""
    token_types: int
    """Rows of the table that tells the texts of a pair apart; 0: there is none."""
    embedding_size: int
    """Of the tables; where it is not hidden_size a projection follows (ELECTRA)."""
    labels: int = 0
    """Classes of the head; 0: there is none."""
    dense_activation: str = "tanh"
    """Of the layer in front of the classes."""
    tied_embeddings: bool = False
    has_head: bool = False
    norm_unit_offset: bool = False

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        head_dim = self.hidden_size // self.num_heads
        return (LayerSpec(self.num_heads, self.num_heads, head_dim, head_dim**-0.5),) * self.num_layers


def encoder_parameters(spec: EncoderSpec) -> tuple[Parameter, ...]:
    """Every parameter, in the order that the forward pass reads them."""
    hidden, size = spec.hidden_size, spec.embedding_size
    out = [Parameter("embed", (spec.vocab_size, size), "table"), Parameter("positions", (spec.positions, size), "table")]
    if spec.token_types:
        out.append(Parameter("token_types", (spec.token_types, size), "table"))
    out += _norm("embed_norm", size)
    if size != hidden:
        out += _linear("embed_projection", hidden, size)
    qkv = {"q": (0, hidden), "k": (hidden, 2 * hidden), "v": (2 * hidden, 3 * hidden)}
    for i in range(spec.num_layers):
        out += _linear(f"layers.{i}.qkv", 3 * hidden, hidden, qkv)
        out += _linear(f"layers.{i}.attention_out", hidden, hidden)
        out += _norm(f"layers.{i}.attention_norm", hidden)
        out += _linear(f"layers.{i}.up", spec.intermediate_size, hidden)
        out += _linear(f"layers.{i}.down", hidden, spec.intermediate_size)
        out += _norm(f"layers.{i}.mlp_norm", hidden)
    if spec.labels:
        out += [*_linear("classifier.dense", hidden, hidden), *_linear("classifier.out", spec.labels, hidden)]
    return tuple(out)


def _linear(name: str, rows: int, columns: int, parts: Mapping[str, tuple[int, int]] | None = None) -> list[Parameter]:
    return [Parameter(f"{name}.weight", (rows, columns), "linear", parts or {}), Parameter(f"{name}.bias", (rows,), "bias", parts or {})]


def _norm(name: str, size: int) -> list[Parameter]:
    return [Parameter(name, (size,), "norm"), Parameter(f"{name}.bias", (size,), "bias")]


@dataclass(frozen=True)
class EncoderFamily:
    """One way to name the same tensors."""

    prefixes: tuple[str, ...]
    """What checkpoints of a model with a head put in front of every name."""
    weights: Mapping[str, Target]
    ignored: str
    """Regular expression of tensors that pooling does not need."""


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


_BERT_LAYER = "encoder.layer.{i}"
_HEADS = {
    f"{theirs}.{kind}": f"{ours}.{kind}"
    for theirs, ours in (
        ("pooler.dense", "classifier.dense"),
        ("classifier", "classifier.out"),
        ("classifier.dense", "classifier.dense"),
        ("classifier.out_proj", "classifier.out"),
        ("pre_classifier", "classifier.dense"),
    )
    for kind in ("weight", "bias")
}
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
    {
        "embeddings.word_embeddings.weight": "embed",
        "embeddings.position_embeddings.weight": "positions",
        "embeddings.token_type_embeddings.weight": "token_types",
        "embeddings_project.weight": "embed_projection.weight",
        "embeddings_project.bias": "embed_projection.bias",
        **_HEADS,
    },
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
    {"embeddings.word_embeddings.weight": "embed", "embeddings.position_embeddings.weight": "positions", **_HEADS},
)
_UNUSED = r"^(cls|lm_head|generator_|discriminator_|vocab_)|^(bert|roberta)\.pooler\.|^pooler\."

_FAMILIES: Mapping[str, EncoderFamily] = {
    "Bert": EncoderFamily(("bert.",), _BERT, _UNUSED),
    "Roberta": EncoderFamily(("roberta.",), _BERT, _UNUSED),
    "XLMRoberta": EncoderFamily(("roberta.",), _BERT, _UNUSED),
    "Camembert": EncoderFamily(("roberta.",), _BERT, _UNUSED),
    "Electra": EncoderFamily(("electra.",), _BERT, _UNUSED),
    "DistilBert": EncoderFamily(("distilbert.",), _DISTIL, _UNUSED),
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
        UnsupportedModel: not an encoder that is known, or relative positions.
        CheckpointError: a config value that is missing or impossible.
    """
    architecture = str(hf_config["architectures"][0])
    match = re.fullmatch(r"(\w+?)(Model|ForMaskedLM|ForSequenceClassification)", architecture)
    if match is None or match[1] not in _FAMILIES:
        raise UnsupportedModel(f"Encoder {architecture} is not supported. Supported: {', '.join(ENCODERS)}.")
    name = match[1]
    config = HfConfig(hf_config, where)
    if name == "DistilBert":
        config = config.renamed(
            {
                "dim": "hidden_size",
                "n_layers": "num_hidden_layers",
                "n_heads": "num_attention_heads",
                "hidden_dim": "intermediate_size",
                "activation": "hidden_act",
            }
        )
    if (kind := config.text("position_embedding_type", "absolute")) != "absolute":
        raise UnsupportedModel(f"{where}: position_embedding_type {kind!r} is not supported, only absolute.")
    hidden, heads = config.integer("hidden_size", 768), config.integer("num_attention_heads", 12)
    if hidden % heads:
        raise CheckpointError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}.")
    shifted = name in ("Roberta", "XLMRoberta", "Camembert")
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
        first_position=config.integer("pad_token_id", 1, minimum=0) + 1 if shifted else 0,
        token_types=0 if name == "DistilBert" else config.integer("type_vocab_size", 2),
        embedding_size=config.integer("embedding_size", hidden) if name == "Electra" else hidden,
        labels=labels,
        dense_activation={"DistilBert": "relu", "Electra": "gelu"}.get(name, "tanh"),
    )
    return spec, _FAMILIES[name]
