"""The weight kinds that `linear` takes. A checkpoint format is turned into one of these at load; kernels know only these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
"""Every kind there is; quantised kinds join this union."""
