"""`ModelSpec`: everything that tells one decoder architecture from another, and the parameters that follow from it.

A family file makes one from a Hugging Face config; the decoder reads nothing else. Sizes are those of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from octavo.attention.base import LayerSpec
from octavo.layers.rope import RopeSpec
from octavo.ops.registry import Activation


@dataclass(frozen=True)
class MlpSpec:
    """A gated feed-forward block. A mixture of experts is another class in the same place of `ModelSpec`."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """One decoder architecture with its sizes."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: MlpSpec
    rope: RopeSpec
    norm_eps: float
    sliding_windows: tuple[int | None, ...]
    """One entry a layer: how many tokens a token sees, itself included; None for all."""
    tied_embeddings: bool = False
    """The head is the embedding matrix."""
    qkv_bias: bool = False
    attention_out_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each head of q and k before the rotation."""
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Norms before a block reads the residual stream, after its output (before the add), or both."""
    norm_unit_offset: bool = False
    """Checkpoints store norm weights minus one; the one is added at load."""
    attention_scale: float | None = None
    """Default: head_dim ** -0.5."""
    attention_soft_cap: float | None = None
    """Attention scores become cap * tanh(score / cap)."""
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_multiplier: float = 1.0
    """On each block's output before it joins the residual stream."""
    logit_scale: float = 1.0
    """On the logits, before the soft cap."""

    @property
    def num_layers(self) -> int:
        return len(self.sliding_windows)

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """What each layer's attention needs to know."""
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        return tuple(
            LayerSpec(self.num_heads, self.num_kv_heads, self.head_dim, scale, window, self.attention_soft_cap)
            for window in self.sliding_windows
        )


@dataclass(frozen=True)
class Parameter:
    """One tensor of the model as it is kept, which may be several tensors of a checkpoint side by side."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["linear", "embedding", "norm", "bias"]
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Part name -> rows [start, stop) of the first dimension. Empty: it has no parts."""


def parameters(spec: ModelSpec) -> tuple[Parameter, ...]:
    """Every parameter of a model, in the order that the forward pass reads them."""
    out = [Parameter("embed", (spec.vocab_size, spec.hidden_size), "embedding")]
    for layer in range(spec.num_layers):
        out += _layer_parameters(spec, f"layers.{layer}.")
    out.append(Parameter("norm", (spec.hidden_size,), "norm"))
    if not spec.tied_embeddings:
        out.append(Parameter("head", (spec.vocab_size, spec.hidden_size), "linear"))
    return tuple(out)


def _layer_parameters(spec: ModelSpec, prefix: str) -> list[Parameter]:
    hidden, inner, head_dim = spec.hidden_size, spec.mlp.intermediate_size, spec.head_dim
    q_rows, kv_rows = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    qkv = {"q": (0, q_rows), "k": (q_rows, q_rows + kv_rows), "v": (q_rows + kv_rows, q_rows + 2 * kv_rows)}
    gate_up = {"gate": (0, inner), "up": (inner, 2 * inner)}

    out = [
        Parameter(prefix + "qkv.weight", (q_rows + 2 * kv_rows, hidden), "linear", qkv),
        Parameter(prefix + "attention_out.weight", (hidden, q_rows), "linear"),
        Parameter(prefix + "gate_up.weight", (2 * inner, hidden), "linear", gate_up),
        Parameter(prefix + "down.weight", (hidden, inner), "linear"),
    ]
    if spec.qkv_bias:
        out.append(Parameter(prefix + "qkv.bias", (q_rows + 2 * kv_rows,), "bias", qkv))
    if spec.attention_out_bias:
        out.append(Parameter(prefix + "attention_out.bias", (hidden,), "bias"))
    if spec.mlp.bias:
        out.append(Parameter(prefix + "gate_up.bias", (2 * inner,), "bias", gate_up))
        out.append(Parameter(prefix + "down.bias", (hidden,), "bias"))
    if spec.qk_norm:
        out += [Parameter(prefix + name, (head_dim,), "norm") for name in ("q_norm", "k_norm")]
    if spec.norm_placement != "post":
        out += [Parameter(prefix + name, (hidden,), "norm") for name in ("attention_norm", "mlp_norm")]
    if spec.norm_placement != "pre":
        out += [Parameter(prefix + name, (hidden,), "norm") for name in ("attention_post_norm", "mlp_post_norm")]
    return out
