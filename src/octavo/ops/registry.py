"""The operations that layers are made of: their signatures, and the table of implementations for a device.

An operation exists first in `ops/reference` (plain torch, the oracle of the tests); `ops/cpu` and `ops/triton` replace some
of them. A layer is handed an `Ops` and calls through it, so that no model names a device or a kernel.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from octavo.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from octavo.ops.coded import CodedRows
    from octavo.ops.packed import ExpertsWeight, LinearWeight
    from octavo.ops.program import DecoderKernels

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped"]
"""relu2 is max(x, 0) squared (So et al. 2021); the relu kinds come without a gate. swiglu_clamped is that of gpt-oss, for experts
only: gate * sigmoid(1.702 * gate) * (up + 1), with gate at most 7 and up within 7 of zero."""


class RmsNorm(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension, the mean of squares in float32 (Zhang & Sennrich 2019).

        Args:
            x: [..., dim]
            weight: [dim]

        Returns:
            [..., dim] in x's dtype.
        """


class AddRmsNorm(Protocol):
    def __call__(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream and the norm that reads it, in one pass over memory. May overwrite x and residual.

        Args:
            x, residual: [tokens, dim]
            weight: [dim]

        Returns:
            (rms_norm(x + residual), x + residual), each [tokens, dim] in x's dtype.
        """


class Rope(Protocol):
    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """Rotate pairs (i, i + rotary_dim / 2) of each head, as Llama does (RoFormer, Su et al. 2021). May overwrite x.

        Args:
            x: [tokens, heads, head_dim]; strided in the first dimension is fine (a slice of fused qkv).
            cos_sin: [tokens, rotary_dim] float32: cosines, then sines. Dimensions from rotary_dim on pass through.

        Returns:
            [tokens, heads, head_dim] in x's dtype; computed in float32.
        """


class GatedMul(Protocol):
    def __call__(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(gate) * up (GLU variants, Shazeer 2020).

        Args:
            gate_up: [tokens, 2 * dim]: gate, then up.

        Returns:
            [tokens, dim]
        """


class PackLinear(Protocol):
    def __call__(self, weight: torch.Tensor) -> LinearWeight:
        """Put a weight into the layout that `linear` likes best. The caller drops its own reference: one copy stays.

        Args:
            weight: [out_features, in_features]
        """


class PackCoded(Protocol):
    def __call__(self, rows: CodedRows, dtype: torch.dtype) -> LinearWeight:
        """Put a low-bit weight into the layout that `linear` likes best. The caller drops its own reference.

        Args:
            dtype: of the activations; also of the weight, where no kernel takes it as it is.
        """


class Linear(Protocol):
    def __call__(self, x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """x @ weight.T + bias.

        Whoever owns the weight has seen to it that all of it is in memory: on a GPU, that the device has been waited for since a kernel
        wrote any of it (once, after the last weight, is enough). A product begins to read its weight before it waits for the kernel
        in front of it, which may not have stored all that it computed by then.

        Args:
            x: [tokens, in_features]
            bias: [out_features]

        Returns:
            [tokens, out_features]
        """


class PackExperts(Protocol):
    def __call__(self, weight: torch.Tensor) -> ExpertsWeight:
        """Put the weights of experts into the layout that `experts` likes best. The caller drops its own reference.

        Args:
            weight: [experts, out_features, in_features]
        """


class PackCodedExperts(Protocol):
    def __call__(self, rows: CodedRows, num_experts: int, dtype: torch.dtype) -> ExpertsWeight:
        """Put low-bit weights of experts into the layout that `experts` likes best. The caller drops its own reference.

        Args:
            rows: [experts * out_features, in_features]
            dtype: see `PackCoded`.
        """


class Experts(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        gate_up: ExpertsWeight,
        down: ExpertsWeight,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        activation: Activation,
    ) -> torch.Tensor:
        """Each token through its experts' gated blocks; the weighted sum of what comes out (Shazeer et al. 2017).

        Args:
            x: [tokens, hidden]
            chosen: [tokens, top_k] int64: experts of a token, all different.
            weights: [tokens, top_k] float32
            gate_up: [experts, 2 * inner, hidden]: gate, then up. down: [experts, hidden, inner].
            gate_up_bias, down_bias: [experts, out_features]

        Returns:
            [tokens, hidden] in x's dtype.
        """


class Embedding(Protocol):
    def __call__(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of a table.

        Args:
            token_ids: [tokens] int64
            table: [vocab, dim]

        Returns:
            [tokens, dim]
        """


class EmbeddingPart(Protocol):
    def __call__(self, token_ids: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
        """`Embedding` of a table of which only some rows are here: zeros for tokens whose rows are not.

        Args:
            table: [rows, dim], of tokens `first` and on.
        """


@dataclass(frozen=True)
class DrawRows:
    """What the rows of a step want of the last stages of the sampler. All on the device, and all [rows] unless they say."""

    slots: torch.Tensor
    """int32: the row of `numbers`, and of the token table."""
    positions: torch.Tensor
    """int32: minus `ahead`, the position in its sequence that the token will take."""
    modes: torch.Tensor
    """int32 bits: 1 draws at random (else the likeliest token), 2 has filters."""
    keys: torch.Tensor
    """[rows, 2] int32: the two 32-bit words of `sampling.random.row_keys`."""
    count: torch.Tensor
    """[1] int32: rows from here on are padding."""
    ahead: int = 0


class Draw(Protocol):
    def __call__(
        self,
        logits: torch.Tensor,
        rows: DrawRows,
        numbers: torch.Tensor,
        out: torch.Tensor,
        token_table: torch.Tensor | None = None,
        *,
        filters: bool = True,
    ) -> None:
        """Temperature, min-p, top-k, top-p, and the draw that `sampling.random.categorical` defines; or the likeliest token.

        Args:
            logits: [rows, vocab], any float dtype; only read.
            numbers: [slots, >= 4] float32: temperature, top_k, top_p, log(min_p); 1, 0, 1 and -inf are off.
            out: [rows] int32: the token, or -1 where a logit was NaN or +inf, or all were -inf.
            token_table: [slots, length] int32: the token is also written to its place here (0 where there is none).
            filters: False: no row has filters.
        """


@dataclass(frozen=True)
class Ops:
    """One implementation of each operation."""

    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    rope: Rope
    gated_mul: GatedMul
    pack_linear: PackLinear
    pack_coded: PackCoded
    linear: Linear
    embedding: Embedding
    embedding_part: EmbeddingPart
    pack_experts: PackExperts
    pack_coded_experts: PackCodedExperts
    experts: Experts
    decoder: DecoderKernels | None = None
    """Whole forward passes, where the device has them: then nothing else here is called for a float32 decoder."""
    keeps_low_bit: bool = True
    """`linear` computes with weights in few bits as they are; else what can be read in full precision had better be."""
    draw: Draw | None = None
    """Of the sampler, not of layers. None: the sampler does it in plain torch."""


def load_ops(device_kind: str, *, batch_invariant: bool = False) -> Ops:
    """The fastest implementation of each operation that this installation has for a device.

    Args:
        batch_invariant: only those whose result for a row is the same bits whatever the other rows are. Of no effect but on
            "cuda": the compiled kernels for a CPU are so anyway.
        device_kind: "cpu" and "cuda" are torch's kernels, "native" the compiled ones for a CPU, "reference" the plain torch
            oracle, which runs anywhere.

    Raises:
        ConfigError: no such device kind, or its kernels were not built.
    """
    from octavo.ops import reference

    if device_kind == "reference":
        return reference.OPS
    if device_kind == "cpu":
        from octavo.ops import cpu

        return replace(reference.OPS, **cpu.overrides())
    if device_kind == "native":
        from octavo.ops import cpu

        return replace(load_ops("cpu"), decoder=cpu.decoder_kernels())
    if device_kind == "cuda":
        if importlib.util.find_spec("triton") is None:
            return reference.OPS
        from octavo.ops import triton

        return replace(reference.OPS, **(triton.invariant_overrides() if batch_invariant else triton.overrides()))
    raise ConfigError(f"There are no operations for the device {device_kind!r}. Use cpu or cuda.")
