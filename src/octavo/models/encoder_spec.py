"""`EncoderSpec`: what tells one bidirectional encoder from another, and the parameters that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.attention.base import LayerSpec
from octavo.layers.rope import RopeSpec
from octavo.models.spec import Parameter
from octavo.ops.registry import Activation


@dataclass(frozen=True)
class EncoderSpec:
    """A bidirectional transformer: BERT (Devlin et al. 2019), whose blocks have norms behind them, and what came of it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: Activation
    norm_eps: float
    positions: int
    """Rows of the position table; 0: there is none."""
    first_position: int
    """Row of the first token."""
    token_types: int
    """Rows of the table that tells the texts of a pair apart; 0: there is none."""
    embedding_size: int
    """Of the tables; where it is not hidden_size a projection follows (ELECTRA)."""
    ropes: tuple[RopeSpec, ...] = ()
    """The rotation of q and k in each layer; empty: there is none."""
    windows: tuple[int | None, ...] = ()
    """Of each layer: it sees itself and so many minus one to either side; None and empty: everything."""
    relative_buckets: int = 0
    """Rows of a table of biases on attention scores by distance, which all layers share (T5, Raffel et al. 2020); 0: there is none."""
    gated: bool = False
    """down(activation(gate(x)) * up(x)) instead of down(activation(up(x)))."""
    pre_norm: bool = False
    """Norms come before the blocks, and one behind the last; the first block reads the embedding's norm."""
    biases: frozenset[str] = frozenset({"qkv", "attention_out", "up", "down", "norm", "dense"})
    """What has a bias."""
    labels: int = 0
    """Classes of the head; 0: there is none."""
    dense_activation: str = "tanh"
    """Of the layer in front of the classes."""
    dense_norm: bool = False
    """A norm follows that activation."""
    tied_embeddings: bool = False
    has_head: bool = False
    norm_unit_offset: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        windows = self.windows or (None,) * self.num_layers
        return tuple(LayerSpec(self.num_heads, self.num_heads, self.head_dim, self.head_dim**-0.5, window) for window in windows)


def encoder_parameters(spec: EncoderSpec) -> tuple[Parameter, ...]:
    """Every parameter, in the order that the forward pass reads them."""
    hidden, size, inner = spec.hidden_size, spec.embedding_size, spec.intermediate_size
    out = [Parameter("embed", (spec.vocab_size, size), "table")]
    if spec.positions:
        out.append(Parameter("positions", (spec.positions, size), "table"))
    if spec.token_types:
        out.append(Parameter("token_types", (spec.token_types, size), "table"))
    out += _norm(spec, "embed_norm", size)
    if size != hidden:
        out += _linear("embed_projection", hidden, size)
    if spec.relative_buckets:
        out.append(Parameter("relative_bias", (spec.relative_buckets, spec.num_heads), "table"))
    qkv = {"q": (0, hidden), "k": (hidden, 2 * hidden), "v": (2 * hidden, 3 * hidden)}
    gate_up = {"gate": (0, inner), "up": (inner, 2 * inner)}
    has = spec.biases.__contains__
    for i in range(spec.num_layers):
        out += _linear(f"layers.{i}.qkv", 3 * hidden, hidden, qkv, bias=has("qkv"))
        out += _linear(f"layers.{i}.attention_out", hidden, hidden, bias=has("attention_out"))
        if i or not spec.pre_norm:
            out += _norm(spec, f"layers.{i}.attention_norm", hidden)
        if spec.gated:
            out += _linear(f"layers.{i}.gate_up", 2 * inner, hidden, gate_up, bias=has("up"))
        else:
            out += _linear(f"layers.{i}.up", inner, hidden, bias=has("up"))
        out += _linear(f"layers.{i}.down", hidden, inner, bias=has("down"))
        out += _norm(spec, f"layers.{i}.mlp_norm", hidden)
    if spec.pre_norm:
        out += _norm(spec, "norm", hidden)
    if spec.labels:
        out += _linear("classifier.dense", hidden, hidden, bias=has("dense"))
        if spec.dense_norm:
            out += _norm(spec, "classifier.norm", hidden)
        out += _linear("classifier.out", spec.labels, hidden)
    return tuple(out)


def _linear(
    name: str, rows: int, columns: int, parts: Mapping[str, tuple[int, int]] | None = None, *, bias: bool = True
) -> list[Parameter]:
    out = [Parameter(f"{name}.weight", (rows, columns), "linear", parts or {})]
    return [*out, Parameter(f"{name}.bias", (rows,), "bias", parts or {})] if bias else out


def _norm(spec: EncoderSpec, name: str, size: int) -> list[Parameter]:
    out = [Parameter(name, (size,), "norm")]
    return [*out, Parameter(f"{name}.bias", (size,), "bias")] if "norm" in spec.biases else out
