"""The attention contract: plan once a step from sizes known on the CPU, run once a layer, never sync the device.

A backend owns the KV cache tensors of its layers and the layout inside them. `plan` gets a `StepBatch` (gathered on the
device from the slot tables) and returns an `Attend`, which writes this step's keys and values into the cache and attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from octavo.attention.kv_calibration import KvCalibration
    from octavo.protocol.step import Int32


@dataclass(frozen=True)
class SharedPrefixes:
    """Which rows begin with the same blocks. Rows that share nothing are listed too."""

    order: Int32
    """[rows] the rows, sorted so that those with the most in common are neighbours."""
    common: Int32
    """[rows] tokens whose blocks each row of `order` has in common with the one before it."""


@dataclass(frozen=True)
class KindTables:
    """Where the rows of a step are in one kind of cache."""

    block_tables: torch.Tensor
    """[rows, max_blocks] int32: physical blocks, padded with the null block 0."""
    cache_slots: torch.Tensor
    """[tokens] int64: block * block_size + offset, where each token's K and V go."""


@dataclass(frozen=True)
class StepBatch:
    """One step's rows. Device tensors end in what they are indexed by; `cpu_*` are the numpy originals for planning.

    Rows are ordered decodes first (`num_decodes` rows with count 1), then prompt chunks.
    """

    cpu_start: Int32
    """[rows] first position computed."""
    cpu_count: Int32
    """[rows] tokens computed."""
    num_decodes: int
    num_tokens: int
    max_context: int
    token_ids: torch.Tensor
    """[tokens] int64."""
    positions: torch.Tensor
    """[tokens] int64."""
    row_of_token: torch.Tensor
    """[tokens] int64: which row a token belongs to."""
    block_tables: torch.Tensor
    """See `KindTables`: of the first kind of cache."""
    cache_slots: torch.Tensor
    context_lens: torch.Tensor
    """[rows] int32: start + count."""
    cpu_wanted: Int32 | None = None
    """[wanted] ascending rows whose last token is all that is needed of the last layer; None: every token of every row."""
    shared: SharedPrefixes | None = None
    """Of the decodes, where some of them begin with the same blocks."""
    sliding: KindTables | None = None
    """Of a second kind of cache, where there is one. Entries that the window has left behind name blocks of others."""

    def of_kind(self, kind: int) -> StepBatch:
        """The same step with the tables of one kind of cache in the place of the first's."""
        if not kind:
            return self
        assert self.sliding is not None
        return replace(self, block_tables=self.sliding.block_tables, cache_slots=self.sliding.cache_slots)


class Attend(Protocol):
    """Attention of one step, called by each layer of the model. It may offer `layers.attention.FusedAttend` too."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k, v in the cache, then attend causally over each row's context.

        Args:
            q: [tokens, heads, head_dim], rotated.
            k, v: [tokens, kv_heads, head_dim], k rotated.

        Returns:
            [tokens, heads, head_dim]; of a layer with `value_dim` so many numbers a head.
        """


@dataclass(frozen=True)
class LayerSpec:
    """What a layer's attention needs to know."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    """A token sees itself and the `sliding_window - 1` before it."""
    soft_cap: float | None = None
    value_dim: int | None = None
    """Values are the first `value_dim` numbers of the keys, and are not kept again (multi-head latent attention)."""
    sinks: tuple[float, ...] | None = None
    """[heads] score of one more key a head, whose value is zero (Xiao et al. 2023)."""


@dataclass(frozen=True)
class KvScales:
    """What the numbers of one layer's quantised cache must be multiplied with."""

    k: torch.Tensor
    """[1] or [kv_heads] float32"""
    v: torch.Tensor
    """As k."""


class AttentionBackend(Protocol):
    """What runs a model's attention. Classes also have `bytes_per_block(layers, block_size, dtype)` and `reads_before_window`: how many
    tokens before a layer's window a kernel may load (and ignore); None: nobody knows. Those of which somebody knows take a second kind
    of cache, `sliding=SlidingBlocks(...)`."""

    name: str

    def plan(self, batch: StepBatch) -> Attend: ...

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole blocks in every layer of their kind; all reads happen before any write.

        Args:
            src, dst: [copies] as `StepPlan` numbers them.
        """


@runtime_checkable
class Calibrated(AttentionBackend, Protocol):
    """A backend that may find the scales of its cache while the first tokens are computed."""

    @property
    def calibration(self) -> KvCalibration | None:
        """None: its scales are known."""


@dataclass(frozen=True)
class GraphShape:
    """The room of a captured step. Any step with at most these numbers fits into it."""

    rows: int
    tokens: int
    """As many as `rows` where `chunks` is 0."""
    chunks: int = 0
    """Rows with more than one token. 0: a step of decodes alone."""


@runtime_checkable
class GraphAttention(AttentionBackend, Protocol):
    """A backend whose steps can be replayed as CUDA graphs: the plan is data, copied over that of the capture."""

    def graph_plan_size(self, shape: GraphShape) -> int:
        """How many int32 numbers a plan takes."""

    def graph_plan(self, start: Int32, count: Int32, shape: GraphShape, out: Int32, shared: SharedPrefixes | None = None) -> None:
        """Plan a step on the host.

        Args:
            start, count: [rows], at most what `shape` has room for; rows of one token first.
            out: [at least graph_plan_size(shape)], overwritten. All zeros is a plan too, for a step of no rows.
            shared: which of the rows of one token begin with the same blocks.
        """

    def graph_attend(self, plan: torch.Tensor, shape: GraphShape, tables: Sequence[KindTables]) -> Attend:
        """The attention to capture.

        Args:
            plan: [graph_plan_size(shape)] int32 on the device: what replays find here, they do.
            tables: of each kind of cache, with the shape's rows and tokens.
        """
