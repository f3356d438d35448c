"""Linear layers on a GPU: the streaming kernel for the few rows of a decode step where it wins, cuBLAS for the rest."""

from __future__ import annotations

import bisect
import functools
from dataclasses import replace

import torch
import triton
from torch.nn import functional as F

from octavo.ops.coded import CodedRows
from octavo.ops.packed import DenseWeight, LinearWeight, OffsetWeight, SegmentedWeight
from octavo.ops.reference.low_bit import low_bit_linear, with_offsets
from octavo.ops.triton.low_bit import LowBitLinear
from octavo.ops.triton.low_bit_matmul import unpack_weight
from octavo.ops.triton.skinny_matmul import SkinnyTuning, SkinnyWorkspace, skinny_matmul
from octavo.ops.triton.skinny_table import ROW_CLASSES, Choices, choices

_HALF = (torch.bfloat16, torch.float16)
_MOST_SUMMED_ROWS = 256
"""Beyond them the float32 product of the sums costs more than unpacking."""


@functools.cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


class TritonLinear:
    """`pack_linear` and `linear` of one model: they share the workspace of split products, which all launches of a stream reuse.

    The workspace is as large as the weights packed so far need, and is never moved after the last of them: graphs hold it.
    """

    def __init__(self) -> None:
        self._workspace: SkinnyWorkspace | None = None
        self._low_bit = LowBitLinear()
        self._choices: dict[tuple[int, int], Choices] = {}
        """By (out_features, in_features)."""

    def pack(self, weight: torch.Tensor) -> LinearWeight:
        """See `ops.registry.PackLinear`."""
        shape = (weight.shape[0], weight.shape[1])
        if shape not in self._choices and weight.dtype in _HALF:
            self._choices[shape] = choices(*shape, _sm_count(weight.device))
            for rows, tuning in zip(ROW_CLASSES, self._choices[shape], strict=True):
                if tuning is not None and tuning.split > 1:
                    self._reserve(tuning, rows, shape[0], weight.device)
        return DenseWeight.plain(weight)

    def pack_coded(self, rows: CodedRows, dtype: torch.dtype) -> LinearWeight:
        """See `ops.registry.PackCoded`."""
        weight = self._low_bit.pack(rows if rows.minimums is None else replace(rows, minimums=None), dtype)
        weight = weight if rows.minimums is None else with_offsets(weight, rows, dtype)
        return self.pack(weight.data) if isinstance(weight, DenseWeight) else weight

    def linear(self, x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """See `ops.registry.Linear`."""
        if isinstance(weight, SegmentedWeight):
            out = torch.cat([self.linear(x, part, None) for part in weight.parts], -1)
            return out if bias is None else out + bias
        if isinstance(weight, OffsetWeight):
            return self._with_offsets(x, weight, bias)
        if not isinstance(weight, DenseWeight):
            return self._low_bit.linear(x, weight, bias)
        known, rows = self._choices.get((weight.out_features, weight.in_features)), x.shape[0]
        if known is None or not 0 < rows <= ROW_CLASSES[-1] or x.dtype not in _HALF or x.dtype != weight.data.dtype:
            return F.linear(x, weight.data, bias)
        tuning = known[bisect.bisect_left(ROW_CLASSES, rows)]
        return F.linear(x, weight.data, bias) if tuning is None else skinny_matmul(x, weight.data, bias, self._workspace, tuning)

    def _with_offsets(self, x: torch.Tensor, weight: OffsetWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """The product with the codes, and what groups add: a small product of the inputs' sums. Of many rows the weight is unpacked anyway."""
        if x.dtype not in _HALF or not len(x):
            return low_bit_linear(x, weight, bias)
        groups = len(weight.offsets)
        if len(x) <= _MOST_SUMMED_ROWS:
            out = self._low_bit.linear(x, weight.codes, bias)
            sums = x.reshape(len(x), groups, -1).sum(-1, dtype=torch.float32)
            return torch.addmm(out.float(), sums, weight.offsets).to(x.dtype)
        unpacked = unpack_weight(weight.codes, x.dtype)
        unpacked.view(len(unpacked), groups, -1).add_(weight.offsets.T.unsqueeze(-1))
        return F.linear(x, unpacked, bias)

    def _reserve(self, tuning: SkinnyTuning, rows: int, columns: int, device: torch.device) -> None:
        strips = triton.cdiv(columns, tuning.columns)
        elements = tuning.split * max(16, triton.next_power_of_2(rows)) * strips * tuning.columns
        old = self._workspace
        if old is None or elements > len(old.parts) or strips > len(old.counters):
            sizes = (elements, strips) if old is None else (max(elements, len(old.parts)), max(strips, len(old.counters)))
            self._workspace = SkinnyWorkspace.allocate(*sizes, device)
