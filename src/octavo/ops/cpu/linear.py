"""Linear layers through oneDNN with prepacked weights.

`F.linear` in float32 either calls a GEMM that is poor for a few rows, or lets oneDNN reorder the weight on every call.
Reordering once at load makes a decode step of a small model about a quarter faster, and one of 8 to 32 rows about 1.5 times.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import functional as F

from octavo.ops.coded import CodedRows, dequantize
from octavo.ops.packed import DenseWeight, LinearWeight, SegmentedWeight
from octavo.ops.reference.low_bit import low_bit_linear

_ROWS_HINT: Final = 32
"""oneDNN picks the layout for this many rows of x. Layouts picked for one row are several times slower from 8 rows on;
those picked for 8 to 128 rows cost one row nothing."""

_mkldnn: Any = torch.ops.mkldnn


def available() -> bool:
    """Whether this torch has oneDNN and its prepacked linear, and this CPU runs it."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        linear(torch.zeros(1, 8), pack_linear(torch.zeros(8, 8)), None)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


def pack_linear(weight: torch.Tensor) -> DenseWeight:
    """See `ops.registry.PackLinear`. Half precision stays plain: what oneDNN does with it depends too much on the CPU."""
    if weight.dtype != torch.float32:
        return DenseWeight.plain(weight)
    packed = _mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return DenseWeight(packed, weight.shape[0], weight.shape[1], weight.nbytes, layout="onednn")


def pack_coded(rows: CodedRows, dtype: torch.dtype) -> LinearWeight:
    """See `ops.registry.PackCoded`. torch has no kernel for a CPU that takes such weights as they are: they are dequantised."""
    return pack_linear(dequantize(rows, dtype))


def linear(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """See `ops.registry.Linear`."""
    if isinstance(weight, SegmentedWeight):
        parts = torch.cat([linear(x, part, None) for part in weight.parts], -1)
        return parts if bias is None else parts + bias
    if not isinstance(weight, DenseWeight):
        return low_bit_linear(x, weight, bias)
    if weight.layout == "plain":
        return F.linear(x, weight.data, bias)
    out: torch.Tensor = _mkldnn._linear_pointwise(x, weight.data, bias, "none", [], "")
    return out
