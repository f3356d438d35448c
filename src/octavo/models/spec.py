"""`ModelSpec`: everything that tells one decoder architecture from another, and the parameters that follow from it.

A family file makes one from a Hugging Face config; the decoder reads nothing else. Sizes are those of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from octavo.attention.base import LayerSpec
from octavo.layers.alibi import ALIBI_WIDTH
from octavo.layers.query_growth import QueryGrowth
from octavo.layers.rope import RopeSpec
from octavo.layers.routing import Routing
from octavo.ops.registry import Activation


@dataclass(frozen=True)
class MlpSpec:
    """A dense feed-forward block."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True
    """down(activation(gate(x)) * up(x)); without a gate it is down(activation(up(x)))."""


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts: gated blocks of which each token passes a few."""

    num_experts: int
    intermediate_size: int
    """Of each expert."""
    routing: Routing
    activation: Activation = "silu"
    bias: bool = False
    router_bias: bool = False
    correction: bool = False
    """The router has a bias for the choice alone."""
    exact_router: bool = False
    """The router computes in float32 whatever the model's dtype is."""
    shared_size: int = 0
    """Of a gated block that every token passes besides; 0: there is none."""
    shared_gate: bool = False
    """The shared block's output is weighted by a sigmoid of its own."""
    routed: int = 0
    """Experts that the router chooses among, where these are only some of them; 0: these are all."""


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention; see `layers.latent_attention`."""

    q_rank: int
    """Of the query's compression; 0: there is none."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool = False
    """Of the compressing matrices and of the output's."""
    neighbours: bool = True
    """Checkpoints store the rows that rotate as neighbouring pairs."""


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
    latent: LatentSpec | None = None
    """Attention over compressed keys and values; `head_dim` is that of the queries, and `num_kv_heads` says nothing."""
    attention_sinks: bool = False
    """Each head has one more score, learned, that takes weight and gives nothing."""
    moe: MoeSpec | None = None
    moe_layers: tuple[bool, ...] = ()
    """With `moe`: which layers have it, in place of `mlp`; empty: all."""
    tied_embeddings: bool = False
    """The head is the embedding matrix."""
    qkv_bias: bool = False
    attention_out_bias: bool = False
    qk_norm: bool = False
    """A norm of q and k, before the rotation and without bias unless said otherwise, of the model's kind."""
    qk_norm_scope: Literal["head", "heads", "all"] = "head"
    """Over each head with one weight for all heads; over each with a weight of its own; or over all heads at once."""
    qk_norm_bias: bool = False
    qk_norm_last: bool = False
    """Behind the rotation, over each head with one weight."""
    clip_qkv: float | None = None
    """q, k and v lie between this and its negative, behind norms of all heads at once and before the rotation."""
    query_growth: QueryGrowth | None = None
    """Queries grow with their position, behind the rotation."""
    alibi_slopes: tuple[float, ...] = ()
    """[heads] what a score gains for each position of its key (ALiBi, Press et al. 2022); empty: nothing."""
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Norms before a block reads the residual stream, after its output (before the add), or both."""
    parallel_blocks: bool = False
    """Attention and MLP both read the residual stream as the layer finds it (GPT-J's arrangement); norms come before only."""
    shared_norm: bool = False
    """With parallel blocks: one norm for both."""
    norm_unit_offset: bool = False
    """Checkpoints store norm weights minus one; the one is added at load."""
    attention_scale: float | None = None
    """Default: head_dim ** -0.5."""
    scale_by_layer: bool = False
    """The scale of layer i is divided by i + 1."""
    attention_soft_cap: float | None = None
    """Attention scores become cap * tanh(score / cap)."""
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    """Of the embeddings, before the first layer."""
    residual_multiplier: float = 1.0
    """On each block's output before it joins the residual stream."""
    logit_scale: float = 1.0
    """On the logits, before the soft cap."""
    has_head: bool = True
    """Makes logits over the vocabulary; a model that pools does not."""
    labels: int = 0
    """Classes of a linear head over hidden states, instead; 0: there is none."""
    causal: bool = True
    """Only for models that pool: others are."""
    head_bias: bool = False
    learned_positions: int = 0
    """Rows of a table of position embeddings that is added to the token's; 0 for none."""
    layer_ropes: tuple[RopeSpec | None, ...] = ()
    """One entry a layer where they differ, None for a layer without rotation; empty: `rope` everywhere."""

    @property
    def num_layers(self) -> int:
        return len(self.sliding_windows)

    def mlp_of(self, layer: int) -> MlpSpec | MoeSpec:
        """The feed-forward block of a layer."""
        return self.moe if self.moe is not None and (not self.moe_layers or self.moe_layers[layer]) else self.mlp

    def with_ropes(self, ropes: Iterable[RopeSpec | None]) -> ModelSpec:
        """The same model with a rotation for each layer, None for none."""
        return replace(self, layer_ropes=tuple(ropes))

    def up_to(self, max_length: int) -> ModelSpec:
        """The same model for sequences of at most `max_length`, without what those do not notice."""
        idle = self.query_growth is not None and max_length <= self.query_growth.length
        return replace(self, query_growth=None) if idle else self

    @property
    def ropes(self) -> tuple[RopeSpec | None, ...]:
        """The rotation of each layer."""
        return self.layer_ropes or (self.rope,) * self.num_layers

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """What each layer's attention needs to know; the sinks, which are weights, are the decoder's to add."""
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        if (latent := self.latent) is not None:
            width = latent.kv_rank + latent.rope_dim
            return (LayerSpec(self.num_heads, 1, width, scale, value_dim=latent.kv_rank),) * self.num_layers
        width = self.head_dim + (ALIBI_WIDTH if self.alibi_slopes else 0)
        return tuple(
            LayerSpec(
                self.num_heads, self.num_kv_heads, width, scale / (i + 1 if self.scale_by_layer else 1), window, self.attention_soft_cap
            )
            for i, window in enumerate(self.sliding_windows)
        )


@dataclass(frozen=True)
class Parameter:
    """One tensor of the model as it is kept, which may be several tensors of a checkpoint side by side."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["linear", "experts", "embedding", "table", "norm", "bias", "exact"]
    """exact: kept in float32 whatever the model's dtype is."""
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Part name -> rows [start, stop) of the first dimension. Empty: it has no parts."""


def parameters(spec: ModelSpec) -> tuple[Parameter, ...]:
    """Every parameter of a model, in the order that the forward pass reads them."""
    out = [Parameter("embed", (spec.vocab_size, spec.hidden_size), "embedding")]
    if spec.embedding_norm:
        out += _norm(spec, "embed_norm")
    if spec.learned_positions:
        out.append(Parameter("positions", (spec.learned_positions, spec.hidden_size), "table"))
    for layer in range(spec.num_layers):
        out += _layer_parameters(spec, layer)
    out += _norm(spec, "norm")
    if not spec.tied_embeddings and spec.has_head:
        out.append(Parameter("head", (spec.vocab_size, spec.hidden_size), "linear"))
    if spec.labels:
        out.append(Parameter("classifier.weight", (spec.labels, spec.hidden_size), "linear"))
    if spec.head_bias and spec.has_head:
        out.append(Parameter("head.bias", (spec.vocab_size,), "bias"))
    return tuple(out)


def _layer_parameters(spec: ModelSpec, layer: int) -> list[Parameter]:
    prefix, mlp = f"layers.{layer}.", spec.mlp_of(layer)
    hidden = spec.hidden_size
    out = [
        *(_attention_parameters(spec, prefix) if spec.latent is None else _latent_parameters(spec, spec.latent, prefix)),
        *(_mlp_parameters(mlp, hidden, prefix) if isinstance(mlp, MlpSpec) else _moe_parameters(mlp, hidden, prefix)),
    ]
    if spec.norm_placement != "post":
        for name in ("attention_norm",) if spec.shared_norm else ("attention_norm", "mlp_norm"):
            out += _norm(spec, prefix + name)
    if spec.norm_placement != "pre":
        for name in ("attention_post_norm", "mlp_post_norm"):
            out += _norm(spec, prefix + name)
    return out


def _attention_parameters(spec: ModelSpec, prefix: str) -> list[Parameter]:
    hidden, head_dim = spec.hidden_size, spec.head_dim
    q_rows, kv_rows = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    qkv = {"q": (0, q_rows), "k": (q_rows, q_rows + kv_rows), "v": (q_rows + kv_rows, q_rows + 2 * kv_rows)}
    out = [
        Parameter(prefix + "qkv.weight", (q_rows + 2 * kv_rows, hidden), "linear", qkv),
        Parameter(prefix + "attention_out.weight", (hidden, q_rows), "linear"),
    ]
    if spec.qkv_bias:
        out.append(Parameter(prefix + "qkv.bias", (q_rows + 2 * kv_rows,), "bias", qkv))
    if spec.attention_out_bias:
        out.append(Parameter(prefix + "attention_out.bias", (hidden,), "bias"))
    if spec.attention_sinks:
        out.append(Parameter(prefix + "sinks", (spec.num_heads,), "exact"))
    if spec.qk_norm:
        for name, heads in (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads)):
            norm = _qk_norm(spec, prefix + name, heads)
            out += [norm, replace(norm, name=f"{norm.name}.bias", kind="bias")] if spec.qk_norm_bias else [norm]
    return out


def _latent_parameters(spec: ModelSpec, latent: LatentSpec, prefix: str) -> list[Parameter]:
    hidden, heads = spec.hidden_size, spec.num_heads
    q_rows, up_rows = heads * (latent.nope_dim + latent.rope_dim), heads * (latent.nope_dim + latent.value_dim)
    each = latent.nope_dim + latent.value_dim
    halves = {f"{h}.k": (h * each, h * each + latent.nope_dim) for h in range(heads)}
    halves |= {f"{h}.v": (h * each + latent.nope_dim, (h + 1) * each) for h in range(heads)}
    out = [
        Parameter(prefix + "q.weight", (q_rows, latent.q_rank or hidden), "linear"),
        Parameter(prefix + "kv_down.weight", (latent.kv_rank + latent.rope_dim, hidden), "linear"),
        Parameter(prefix + "kv_norm", (latent.kv_rank,), "norm"),
        Parameter(prefix + "kv_up", (up_rows, latent.kv_rank), "table", halves),
        Parameter(prefix + "attention_out.weight", (hidden, heads * latent.value_dim), "linear"),
    ]
    if latent.bias:
        out.append(Parameter(prefix + "kv_down.bias", (latent.kv_rank + latent.rope_dim,), "bias"))
        out.append(Parameter(prefix + "attention_out.bias", (hidden,), "bias"))
        out += [Parameter(prefix + "q_down.bias", (latent.q_rank,), "bias")] if latent.q_rank else []
    if latent.q_rank:
        out.append(Parameter(prefix + "q_down.weight", (latent.q_rank, hidden), "linear"))
        out.append(Parameter(prefix + "q_down_norm", (latent.q_rank,), "norm"))
    return out


def _mlp_parameters(mlp: MlpSpec, hidden: int, prefix: str) -> list[Parameter]:
    inner = mlp.intermediate_size
    rows, parts = (2 * inner, {"gate": (0, inner), "up": (inner, 2 * inner)}) if mlp.gated else (inner, {"up": (0, inner)})
    out = [
        Parameter(prefix + "gate_up.weight", (rows, hidden), "linear", parts),
        Parameter(prefix + "down.weight", (hidden, inner), "linear"),
    ]
    if mlp.bias:
        out.append(Parameter(prefix + "gate_up.bias", (rows,), "bias", parts))
        out.append(Parameter(prefix + "down.bias", (hidden,), "bias"))
    return out


def _moe_parameters(moe: MoeSpec, hidden: int, prefix: str) -> list[Parameter]:
    inner, count = moe.intermediate_size, moe.num_experts
    gates = {f"{e}.gate": (2 * e * inner, (2 * e + 1) * inner) for e in range(count)}
    ups = {f"{e}.up": ((2 * e + 1) * inner, (2 * e + 2) * inner) for e in range(count)}
    downs = {str(e): (e * hidden, (e + 1) * hidden) for e in range(count)}
    out = [
        Parameter(prefix + "router.weight", (moe.routed or count, hidden), "exact" if moe.exact_router else "linear"),
        Parameter(prefix + "experts.gate_up.weight", (count * 2 * inner, hidden), "experts", gates | ups),
        Parameter(prefix + "experts.down.weight", (count * hidden, inner), "experts", downs),
    ]
    if moe.router_bias:
        out.append(Parameter(prefix + "router.bias", (moe.routed or count,), "bias"))
    if moe.correction:
        out.append(Parameter(prefix + "router.correction", (moe.routed or count,), "exact"))
    if moe.bias:
        out.append(Parameter(prefix + "experts.gate_up.bias", (count * 2 * inner,), "bias", gates | ups))
        out.append(Parameter(prefix + "experts.down.bias", (count * hidden,), "bias", downs))
    if moe.shared_size:
        out += _mlp_parameters(MlpSpec(moe.shared_size, moe.activation), hidden, prefix + "shared.")
    if moe.shared_gate:
        out.append(Parameter(prefix + "shared_gate.weight", (1, hidden), "linear"))
    return out


def _qk_norm(spec: ModelSpec, name: str, heads: int) -> Parameter:
    match spec.qk_norm_scope:
        case "head":
            return Parameter(name, (spec.head_dim,), "norm")
        case "heads":
            return Parameter(name, (heads, spec.head_dim), "norm", {str(h): (h, h + 1) for h in range(heads)})
        case "all":
            return Parameter(name, (heads * spec.head_dim,), "norm")


def _norm(spec: ModelSpec, name: str) -> list[Parameter]:
    out = [Parameter(name, (spec.hidden_size,), "norm")]
    return [*out, Parameter(name + ".bias", (spec.hidden_size,), "bias")] if spec.norm_bias else out
