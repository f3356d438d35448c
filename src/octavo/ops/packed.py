"""The weight kinds that `linear` takes. A checkpoint format is turned into one of these at load; kernels know only these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class DenseWeight:
    """Floating-point weight of a linear layer.

    `onednn` data is an opaque tensor in the layout that oneDNN chose for this CPU: nothing but its own kernels may read it.
    """

    data: torch.Tensor
    """[out_features, in_features]; in which order they lie in memory is up to `layout`."""
    out_features: int
    in_features: int
    nbytes: int
    layout: Literal["plain", "onednn"] = "plain"

    @classmethod
    def plain(cls, weight: torch.Tensor) -> DenseWeight:
        """`weight` [out_features, in_features] as it is."""
        return cls(weight, weight.shape[0], weight.shape[1], weight.nbytes)


LinearWeight = DenseWeight
"""What `Ops.linear` takes, a layer at a time."""


@dataclass(frozen=True)
class ExpertsWeight:
    """One floating-point weight an expert, of equal shapes."""

    data: torch.Tensor
    """[experts, out_features, in_features]; empty where `parts` has them."""
    num_experts: int
    out_features: int
    in_features: int
    nbytes: int
    parts: tuple[DenseWeight, ...] = ()
    """Each expert's own, where the device wants them so."""

    @classmethod
    def plain(cls, weight: torch.Tensor) -> ExpertsWeight:
        """`weight` [experts, out_features, in_features] as it is."""
        count, rows, columns = weight.shape
        return cls(weight, count, rows, columns, weight.nbytes)


PanelKind = Literal["f32", "f16", "bf16", "q4", "q8"]
"""q4: groups of 32 columns with a scale and a minimum; q8: groups of 32 with a scale."""


@dataclass(frozen=True)
class EncodedRows:
    """Rows of a matrix as a checkpoint stores them."""

    encoding: str
    """F32, F16, BF16, or a ggml block format such as Q4_1."""
    shape: tuple[int, int]
    """(rows, columns)"""
    data: npt.NDArray[np.uint8]
    """[stored rows, bytes of a row]; may be a mapped file."""
    order: npt.NDArray[Any] | None = None
    """[rows] which stored row each row is; None: as they lie."""


@dataclass(frozen=True)
class Panels:
    """Consecutive rows of a matrix, packed by `DecoderKernels.pack_rows`."""

    kind: PanelKind
    rows: int
    data: torch.Tensor
    """[bytes] uint8"""


@dataclass(frozen=True)
class PanelWeight:
    """A weight made of parts that may be stored differently (q and v of a mixed quantisation, say)."""

    segments: tuple[Panels, ...]
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        return sum(segment.data.nbytes for segment in self.segments)
