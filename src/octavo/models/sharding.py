"""How a model is divided among the ranks of a tensor-parallel group: the spec of a rank's share, and its part of every parameter.

Megatron-LM's division (Shoeybi et al. 2019): query heads, key/value heads, and the inner dimension of feed-forward blocks are dealt out;
what a rank computes of a block is a part of a sum over ranks. Experts are divided the same way, or dealt out whole. Key/value heads
that are fewer than the ranks are kept by several. The vocabulary is divided with padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from octavo.errors import ConfigError
from octavo.models.spec import MlpSpec, ModelSpec, MoeSpec, Parameter, parameters
from octavo.weights.divide import WHOLE, Part

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shard:
    """Which share of a model."""

    rank: int = 0
    size: int = 1
    whole_experts: bool = False
    """Experts are dealt out, instead of each being divided."""
    stage: int = 0
    """Which of consecutive ranges of layers."""
    stages: int = 1

    @property
    def first(self) -> bool:
        """Has the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Has the final norm and the head."""
        return self.stage == self.stages - 1

    def layers(self, count: int) -> range:
        """This stage's of `count` layers: equally many, as far as that goes."""
        return range(count * self.stage // self.stages, count * (self.stage + 1) // self.stages)


WHOLE_MODEL = Shard()


@dataclass(frozen=True)
class Piece:
    """What a rank keeps of a checkpoint's tensor, and where."""

    part: Part
    place: str | None = None
    """The part of the rank's own parameter that it fills; None: the whole."""
    pad: int = 0
    """Rows of zeros that follow."""


def shard_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The spec of a rank's share: its heads, its columns, its rows of the vocabulary.

    Raises:
        ConfigError: something does not divide; says what, and which sizes would do.
    """
    size = shard.size
    if shard.stages > spec.num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {shard.stages}: this {spec.architecture} has {spec.num_layers} layers, one for each stage at least. Lower it."
        )
    if size == 1:
        return spec
    _check(spec, shard)
    kv_heads = max(1, spec.num_kv_heads // size)
    moe = spec.moe
    if moe is not None:
        inner, count = (
            (moe.intermediate_size, moe.num_experts // size) if shard.whole_experts else (moe.intermediate_size // size, moe.num_experts)
        )
        moe = replace(moe, intermediate_size=inner, num_experts=count, shared_size=moe.shared_size // size, routed=moe.num_experts)
    return replace(
        spec,
        vocab_size=padded_vocabulary(spec, size) // size,
        num_heads=spec.num_heads // size,
        num_kv_heads=kv_heads,
        mlp=replace(spec.mlp, intermediate_size=spec.mlp.intermediate_size // size),
        moe=moe,
        attention_scale=spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
        alibi_slopes=spec.alibi_slopes[shard.rank * spec.num_heads // size : (shard.rank + 1) * spec.num_heads // size],
    )


def padded_vocabulary(spec: ModelSpec, size: int) -> int:
    """The vocabulary with as many made-up tokens as make it divide."""
    return -(-spec.vocab_size // size) * size


def possible_sizes(spec: ModelSpec, *, whole_experts: bool = False) -> list[int]:
    """Every number of ranks that the model can be divided among."""
    return [n for n in range(1, spec.num_heads + 1) if not _hindrances(spec, Shard(0, n, whole_experts))]


def _check(spec: ModelSpec, shard: Shard) -> None:
    if reasons := _hindrances(spec, shard):
        possible = ", ".join(map(str, possible_sizes(spec, whole_experts=shard.whole_experts)))
        otherwise = replace(shard, whole_experts=not shard.whole_experts)
        way = "without" if shard.whole_experts else "with"
        advice = (
            f" {way.capitalize()} --enable-expert-parallel {shard.size} will do." if spec.moe and not _hindrances(spec, otherwise) else ""
        )
        raise ConfigError(
            f"--tensor-parallel-size {shard.size}: this {spec.architecture} has {' and '.join(reasons)}, which {shard.size} ranks cannot "
            f"share evenly. Possible sizes: {possible}.{advice}"
        )


def _hindrances(spec: ModelSpec, shard: Shard) -> list[str]:
    size, moe = shard.size, spec.moe
    reasons = []
    if spec.num_heads % size:
        reasons.append(f"{spec.num_heads} attention heads")
    if spec.latent is None and spec.num_kv_heads % size and size % spec.num_kv_heads:
        reasons.append(f"{spec.num_kv_heads} key/value heads")
    if any(isinstance(spec.mlp_of(i), MlpSpec) for i in range(spec.num_layers)) and spec.mlp.intermediate_size % size:
        reasons.append(f"an intermediate size of {spec.mlp.intermediate_size}")
    if moe is not None:
        if shard.whole_experts and moe.num_experts % size:
            reasons.append(f"{moe.num_experts} experts")
        if not shard.whole_experts and moe.intermediate_size % size:
            reasons.append(f"experts with an intermediate size of {moe.intermediate_size}")
        if moe.shared_size % size:
            reasons.append(f"a shared expert of size {moe.shared_size}")
    return reasons


class Division:
    """The parameters of one rank, and how tensors of the whole model map onto them."""

    def __init__(self, spec: ModelSpec, shard: Shard) -> None:
        self.whole = spec
        self.shard = shard
        self.spec = shard_spec(spec, shard)
        self.parameters = {p.name: p for p in parameters(self.spec) if self._here(p.name)}

    def _here(self, name: str) -> bool:
        """Whether this stage has a parameter."""
        shard = self.shard
        if name.startswith("layers."):
            return int(name.split(".", 2)[1]) in shard.layers(self.spec.num_layers)
        if name == "embed":
            return shard.first or (shard.last and self.spec.tied_embeddings and self.spec.has_head)
        return shard.first if name == "positions" or name.startswith("embed_norm") else shard.last

    def piece(self, parameter: Parameter, part: str | None) -> Piece | None:
        """What this rank keeps of a tensor that fills `part` of a whole model's parameter; None: nothing.

        Args:
            part: None for all of it.
        """
        if parameter.name not in self.parameters:
            return None
        if self.shard.size == 1:
            return Piece(WHOLE, part)
        spec, head_dim = self.whole, self.whole.head_dim
        name = parameter.name.split(".", 2)[2] if parameter.name.startswith("layers.") else parameter.name
        match name.removesuffix(".weight").removesuffix(".bias"):
            case "embed" | "head":
                return self._vocabulary()
            case "qkv":
                ranges = {"q": self._heads(head_dim), "k": self._kv_heads(head_dim), "v": self._kv_heads(head_dim)}
                return self._rows(parameter, part, ranges)
            case "attention_out" if name.endswith("weight"):
                width = head_dim if spec.latent is None else spec.latent.value_dim
                return Piece(Part(columns=self._heads(width)))
            case "gate_up" | "shared.gate_up":
                return self._rows(parameter, part, dict.fromkeys(parameter.parts, self._share(self._inner(parameter))))
            case "down" | "shared.down" if name.endswith("weight"):
                return Piece(Part(columns=self._share(parameter.shape[1])))
            case "attention_out" | "down":
                return Piece(WHOLE) if self.shard.rank == 0 else Piece(Part(rows=np.zeros(0, np.int64)), pad=parameter.shape[0])
            case "sinks":
                return Piece(Part(rows=self._heads(1)))
            case "q_norm" | "k_norm" if spec.qk_norm_scope != "head":
                return self._head_norm(name, part)
            case "q" if spec.latent is not None:
                return Piece(Part(rows=self._heads(spec.latent.nope_dim + spec.latent.rope_dim)))
            case "kv_up" if spec.latent is not None:
                return Piece(Part(rows=self._heads(spec.latent.nope_dim + spec.latent.value_dim)))
            case "experts.gate_up" | "experts.down" if spec.moe is not None:
                return self._experts(name, spec.moe, parameter, part)
            case _:
                return Piece(WHOLE, part)

    @property
    def kv_heads(self) -> Indices:
        """Which key/value heads this rank keeps."""
        return np.arange(1) if self.whole.latent is not None else self._kv_heads(1)

    def _vocabulary(self) -> Piece:
        rows, total = self.spec.vocab_size, self.whole.vocab_size
        first = min(total, self.shard.rank * rows)
        kept = np.arange(first, min(total, first + rows))
        return Piece(Part(rows=kept), pad=rows - len(kept))

    def _heads(self, width: int) -> Indices:
        """Elements of this rank's query heads, where each head has `width` of them."""
        return self._share(self.whole.num_heads * width)

    def _kv_heads(self, width: int) -> Indices:
        heads, size = self.whole.num_kv_heads, self.shard.size
        first = self.shard.rank * self.spec.num_kv_heads if heads >= size else self.shard.rank // (size // heads)
        return np.arange(first * width, (first + self.spec.num_kv_heads) * width)

    def _share(self, count: int) -> Indices:
        """An equal share of `count` elements, in order."""
        each = count // self.shard.size
        return np.arange(self.shard.rank * each, (self.shard.rank + 1) * each)

    @staticmethod
    def _inner(parameter: Parameter) -> int:
        start, stop = next(iter(parameter.parts.values()))
        return stop - start

    @staticmethod
    def _rows(parameter: Parameter, part: str | None, ranges: dict[str, Indices]) -> Piece:
        """Of one part its range; of the whole parameter the ranges of all parts, one below the other."""
        if part is not None:
            return Piece(Part(rows=ranges[part]), part)
        return Piece(Part(rows=np.concatenate([parameter.parts[name][0] + rows for name, rows in ranges.items()])))

    def _head_norm(self, name: str, part: str | None) -> Piece | None:
        heads = self._heads(1) if name == "q_norm" else self._kv_heads(1)
        if self.whole.qk_norm_scope == "all":
            width = self.whole.head_dim
            return Piece(Part(rows=(heads[:, None] * width + np.arange(width)).reshape(-1)))
        if part is None:
            return Piece(Part(rows=heads))
        return Piece(WHOLE, str(int(part) - int(heads[0]))) if int(part) in heads else None

    def _experts(self, name: str, moe: MoeSpec, parameter: Parameter, part: str | None) -> Piece | None:
        count, inner, bias = moe.num_experts, moe.intermediate_size, name.endswith("bias")
        if self.shard.whole_experts:
            mine = self._share(count)
            if part is not None:
                expert, dot, rest = part.partition(".")
                return Piece(WHOLE, f"{int(expert) - int(mine[0])}{dot}{rest}") if int(expert) in mine else None
            each = parameter.shape[0] // count
            return Piece(Part(rows=(mine[:, None] * each + np.arange(each)).reshape(-1)))
        share = self._share(inner)
        if name.startswith("experts.down"):
            if not bias:
                return Piece(Part(columns=share), part)
            if self.shard.rank == 0:
                return Piece(WHOLE, part)
            start, stop = parameter.parts[part] if part is not None else (0, parameter.shape[0])
            return Piece(Part(rows=np.zeros(0, np.int64)), part, pad=stop - start)
        if part is not None:
            return Piece(Part(rows=share), part)
        both = np.concatenate((share, inner + share))
        return Piece(Part(rows=(np.arange(count)[:, None] * 2 * inner + both).reshape(-1)))
