"""Linear layers on a GPU: streaming kernels for the few rows of a decode step, cuBLAS for the rest.

One row is multiplied without tensor cores, by Triton; up to `dense.MOST_ROWS` by CUDA C++ where it can be compiled and runs, else
by Triton or cuBLAS, as measured.
"""

from __future__ import annotations

import bisect

import torch
import triton
from torch.nn import functional as F

from octavo.ops.coded import CodedRows
from octavo.ops.cuda import compiled, dense
from octavo.ops.cuda.compiler import architecture
from octavo.ops.packed import DenseWeight, LinearWeight, OffsetWeight, SegmentedWeight
from octavo.ops.reference.low_bit import low_bit_linear
from octavo.ops.triton.launch import sm_count
from octavo.ops.triton.low_bit import LowBitLinear
from octavo.ops.triton.low_bit_matmul import unpack_weight
from octavo.ops.triton.skinny_matmul import SkinnyTuning, SkinnyWorkspace, skinny_matmul
from octavo.ops.triton.skinny_table import ROW_CLASSES, Choices, choices

_HALF = (torch.bfloat16, torch.float16)
_FEWEST_DENSE_ROWS = 2
"""One row is faster without tensor cores."""
_MOST_SUMMED_ROWS = 256
"""Beyond them the float32 product of the sums costs more than unpacking."""


class TritonLinear:
    """`pack_linear` and `linear` of one model: they share the workspace of split products, which all launches of a stream reuse.

    The workspace is as large as the weights packed so far need, and is never moved after the last of them: graphs hold it.
    """

    def __init__(self) -> None:
        self._workspace: SkinnyWorkspace | None = None
        self._low_bit = LowBitLinear()
        self._choices: dict[tuple[int, int], Choices] = {}
        """By (out_features, in_features)."""
        self._cuda_kernels = compiled.Kind("dense weights")
        self._packed = 0

    @property
    def fills_whole_sms(self) -> bool:
        """Whether most products of one row have thread blocks that fill an SM each."""
        return self._low_bit.streams > self._packed

    def pack(self, weight: torch.Tensor) -> LinearWeight:
        """See `ops.registry.PackLinear`."""
        shape = (weight.shape[0], weight.shape[1])
        self._packed += 1
        if shape not in self._choices and weight.dtype in _HALF:
            self._choices[shape] = choices(*shape, sm_count(weight.device))
            for rows, tuning in zip(ROW_CLASSES, self._choices[shape], strict=True):
                if tuning is not None and tuning.split > 1:
                    self._reserve(*_skinny_size(tuning, rows, shape[0]), weight.device)
            if architecture(weight.device) is not None:
                form = _form(weight.dtype, bias=False)
                for rows in range(_FEWEST_DENSE_ROWS, dense.MOST_ROWS + 1):
                    if (native := dense.choice(form, *shape, rows, sm_count(weight.device))) is not None:
                        compiled.prepare(dense.Program(form, native), weight.device)
                        self._reserve(*dense.workspace_size(shape[0], native), weight.device)
        return DenseWeight.plain(weight)

    def pack_coded(self, rows: CodedRows, dtype: torch.dtype) -> LinearWeight:
        """See `ops.registry.PackCoded`."""
        weight = self._low_bit.pack(rows, dtype)
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
        if known is None or not rows or x.dtype not in _HALF or x.dtype != weight.data.dtype:
            return F.linear(x, weight.data, bias)
        if rows >= _FEWEST_DENSE_ROWS and (native := self._native(x, weight.data, bias)) is not None:
            return native
        if rows > ROW_CLASSES[-1]:
            return F.linear(x, weight.data, bias)
        tuning = known[bisect.bisect_left(ROW_CLASSES, rows)]
        return F.linear(x, weight.data, bias) if tuning is None else skinny_matmul(x, weight.data, bias, self._workspace, tuning)

    def _native(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """By the CUDA C++ kernel, where it runs and takes the operands."""
        if len(x) > dense.MOST_ROWS or architecture(x.device) is None or not (dense.takes(x) and dense.takes(weight)):
            return None
        form = _form(x.dtype, bias=bias is not None)
        tuning = dense.choice(form, weight.shape[0], weight.shape[1], len(x), sm_count(x.device))
        if tuning is None:
            return None
        return self._cuda_kernels.attempt(lambda: dense.multiply(x, weight, bias, form, tuning, self._workspace))

    def _with_offsets(self, x: torch.Tensor, weight: OffsetWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """By one kernel; where none does it the product with the codes, and what groups add: a small product of the inputs' sums. Of many
        rows the weight is unpacked anyway."""
        if x.dtype not in _HALF or not len(x):
            return low_bit_linear(x, weight, bias)
        if (product := self._low_bit.with_offsets(x, weight, bias)) is not None:
            return product
        groups = len(weight.offsets)
        if len(x) <= _MOST_SUMMED_ROWS:
            out = self._low_bit.linear(x, weight.codes, bias)
            sums = x.reshape(len(x), groups, -1).sum(-1, dtype=torch.float32)
            return torch.addmm(out.float(), sums, weight.offsets).to(x.dtype)
        unpacked = unpack_weight(weight.codes, x.dtype)
        unpacked.view(len(unpacked), groups, -1).add_(weight.offsets.T.unsqueeze(-1))
        return F.linear(x, unpacked, bias)

    def _reserve(self, elements: int, strips: int, device: torch.device) -> None:
        self._workspace = SkinnyWorkspace.enlarged(self._workspace, elements, strips, device)


def _skinny_size(tuning: SkinnyTuning, rows: int, columns: int) -> tuple[int, int]:
    """Elements and strips of a workspace."""
    strips = triton.cdiv(columns, tuning.columns)
    return tuning.split * max(16, triton.next_power_of_2(rows)) * strips * tuning.columns, strips


def _form(dtype: torch.dtype, *, bias: bool) -> dense.Form:
    half = dtype == torch.float16
    return dense.Form("float16" if half else "bfloat16", half, bias)
