"""Linear layers with low-bit weights on a GPU.

* Few rows: one launch reads the weight as it is stored: the CUDA C++ kernels of `ops.cuda` where they can run, else Triton's. Inputs
  are taken as they are: rounding them to 8 bits would save nothing, and cost accuracy.
* Many rows: where the checkpoint was made for rounded inputs, 8-bit products (cuBLAS); else the weight is unpacked, once a step, for a
  product in x's dtype.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from octavo.ops.coded import CodedRows, dequantize
from octavo.ops.cuda import compiled, dense, ordered
from octavo.ops.cuda import low_bit as cuda
from octavo.ops.cuda.compiler import architecture
from octavo.ops.packed import DenseWeight, Float8Weight, Int4Weight, Int8Weight, LinearWeight, OffsetWeight, SegmentedWeight, TableWeight
from octavo.ops.reference.low_bit import low_bit_linear, pack_low_bit
from octavo.ops.triton.launch import sm_count
from octavo.ops.triton.low_bit_matmul import LowBit, add_sparse, low_bit_layout, low_bit_matmul, unpack_weight, workspace_size
from octavo.ops.triton.low_bit_table import ROW_CLASSES, choice
from octavo.ops.triton.round_rows import round_rows, scaled_sums
from octavo.ops.triton.skinny_matmul import SkinnyWorkspace

_HALF = (torch.bfloat16, torch.float16)


class LowBitLinear:
    """`pack_coded`, and `linear` for what it makes. All layers of a model share a workspace, which never moves once it is in use."""

    def __init__(self) -> None:
        self._workspace: SkinnyWorkspace | None = None
        self._reserved: set[tuple[object, ...]] = set()
        """Weights that the workspace is large enough for, by all that its size depends on."""
        self._cuda_kernels = compiled.Kind("low-bit weights")
        self.streams = 0
        """Weights whose products of one row are by CUDA C++ kernels."""

    def pack(self, rows: CodedRows, dtype: torch.dtype) -> LinearWeight:
        """See `ops.registry.PackCoded`."""
        if rows.codes.is_floating_point() and rows.codes.is_cuda and not _has_float8(rows.codes.device):
            return DenseWeight.plain(dequantize(rows, dtype))
        weight = pack_low_bit(rows, dtype)
        if dtype in _HALF and not isinstance(weight, (DenseWeight, SegmentedWeight)):
            if self._form(weight, dtype, bias=False) is not None:
                weight = ordered.ordered(weight)
            self._reserve(weight, dtype)
            form = self._form(weight, dtype, bias=False)
            columns, inner, device = weight.out_features, low_bit_layout(weight).inner, weight.data.device
            self.streams += form is not None and _native(form, columns, inner, 1, sm_count(device)) is not None
        return weight

    def linear(self, x: torch.Tensor, weight: LowBit, bias: torch.Tensor | None) -> torch.Tensor:
        """See `ops.registry.Linear`."""
        if x.dtype not in _HALF or not len(x):
            return low_bit_linear(x, weight, bias)
        if (rounded := self._float8_product(x, weight, bias)) is not None:
            return rounded
        layout, rows = low_bit_layout(weight), x.shape[0]
        form = self._form(weight, x.dtype, bias=bias is not None) if rows <= _most_rows(weight) else None
        native = None if form is None else _native(form, weight.out_features, layout.inner, rows, sm_count(x.device))
        if form is not None and native is not None:
            placed = _aligned(_in_order(x, weight))
            product = self._cuda_kernels.attempt(lambda: self._multiply(placed, weight, bias, form, native))
            if product is not None:
                return _with_outliers(weight, placed, product)
        tuning = choice(layout.kind, weight.out_features, layout.inner, layout.group, rows, sm_count(x.device))
        if tuning is None:
            if (rounded := _eight_bit_product(x, weight, bias)) is not None:
                return rounded
            x = _in_order(x, weight)
            out = F.linear(x, unpack_weight(weight, x.dtype), bias)
        else:
            x = _in_order(x, weight)
            x = x if x.stride(-1) == 1 else x.contiguous()
            out = low_bit_matmul(x, weight, bias, self._workspace, tuning)
        return _with_outliers(weight, x, out)

    def _multiply(
        self,
        x: torch.Tensor,
        weight: LowBit | OffsetWeight,
        bias: torch.Tensor | None,
        form: cuda.Form,
        native: cuda.Tuning | ordered.Ordered,
    ) -> torch.Tensor:
        if isinstance(native, ordered.Ordered):
            return ordered.multiply(x, weight, bias, form, native)
        return cuda.multiply(x, weight, bias, form, native, self._workspace)

    def with_offsets(self, x: torch.Tensor, weight: OffsetWeight, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The product of few rows, where one kernel adds up codes and offsets; else None."""
        few = x.dtype in _HALF and 0 < len(x) <= _most_rows(weight)
        form = self._form(weight, x.dtype, bias=bias is not None) if few else None
        inner = weight.in_features
        native = None if form is None else _native(form, weight.out_features, inner, len(x), sm_count(x.device))
        if form is None or native is None:
            return None
        placed = _aligned(x)
        return self._cuda_kernels.attempt(lambda: self._multiply(placed, weight, bias, form, native))

    def _form(self, weight: LowBit | OffsetWeight, dtype: torch.dtype, *, bias: bool) -> cuda.Form | None:
        """What the CUDA C++ kernels make of a weight, where they run and take it."""
        runs = self._cuda_kernels.usable and architecture(weight.data.device) is not None
        return cuda.form_of(weight, dtype, bias=bias) if runs else None

    def _float8_product(self, x: torch.Tensor, weight: LowBit, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Few inputs rounded to float8, where the weight was made for that and the CUDA C++ kernel has it; else None."""
        found = self._dense(weight, x.dtype, len(x), bias=bias is not None)
        if found is None or not isinstance(weight, Float8Weight) or not dense.takes(weight.data):
            return None
        codes, scale = round_rows(x, weight.activations)
        return self._cuda_kernels.attempt(lambda: dense.multiply(codes, weight.data, bias, *found, self._workspace, (scale, weight.scales)))

    def _dense(self, weight: LowBit | OffsetWeight, dtype: torch.dtype, rows: int, *, bias: bool) -> tuple[dense.Form, dense.Tuning] | None:
        """How `ops.cuda.dense` multiplies so many rows with a weight, where it does."""
        if not _MOST_ROWS_BEFORE_8_BITS < rows <= dense.MOST_ROWS or not isinstance(weight, Float8Weight):
            return None
        if not _rounds_whole_rows(weight) or not self._cuda_kernels.usable or architecture(weight.data.device) is None:
            return None
        form = dense.Form("float8", dtype == torch.float16, bias, weight.row_block)
        tuning = dense.choice(form, weight.out_features, weight.in_features, rows, sm_count(weight.data.device))
        return None if tuning is None else (form, tuning)

    def _reserve(self, weight: LowBit | OffsetWeight, dtype: torch.dtype, fewest: int = 1) -> None:
        """Make the workspace large enough for any number of rows from `fewest` on, and have the kernels compiled meanwhile."""
        layout, device, columns, most = low_bit_layout(weight), weight.data.device, weight.out_features, _most_rows(weight)
        form = self._form(weight, dtype, bias=False)
        if isinstance(weight, OffsetWeight):  # others are multiplied with the codes alone
            self._reserve(weight.codes, dtype, 1 if form is None else most + 1)
        shape = (form, layout.kind, layout.group, columns, layout.inner, fewest, most)
        if shape in self._reserved:
            return
        self._reserved.add(shape)
        for rows in range(fewest, most + 1):
            native = None if form is None else _native(form, columns, layout.inner, rows, sm_count(device))
            if form is None or native is None:
                continue
            if isinstance(native, ordered.Ordered):
                ordered.prepare(form, native, device)
            else:
                cuda.prepare(form, native, layout.inner, device)
                self._enlarge(*cuda.workspace_size(rows, columns, layout.inner, native, sm_count(device)), device)
        for rows in range(1, dense.MOST_ROWS + 1):
            if (found := self._dense(weight, dtype, rows, bias=False)) is not None:
                compiled.prepare(dense.Program(*found), device)
                self._enlarge(*dense.workspace_size(columns, found[1]), device)
        for rows in ROW_CLASSES:
            tuning = choice(layout.kind, columns, layout.inner, layout.group, rows, sm_count(device))
            if tuning is not None and tuning.split > 1:
                self._enlarge(*workspace_size(rows, columns, tuning), device)

    def _enlarge(self, elements: int, tiles: int, device: torch.device) -> None:
        self._workspace = SkinnyWorkspace.enlarged(self._workspace, elements, tiles, device)


_FEWEST_ORDERED_ROWS = 5
"""That `ordered` multiplies where `stream` does too: it takes as long for one row as for eight, `stream` longer for eight and no longer
for one."""


def _native(form: cuda.Form, columns: int, inner: int, rows: int, sms: int) -> cuda.Tuning | ordered.Ordered | None:
    """The CUDA C++ kernel that multiplies so many rows, if one does."""
    if form.ordered and (rows >= _FEWEST_ORDERED_ROWS or form.group == ordered.SHORT_GROUP):
        return ordered.choice(form, columns, inner, rows, sms)
    return cuda.choice(form, columns, inner, rows, sms)


_MOST_ROWS_BEFORE_8_BITS = 8
"""From here on, products of inputs rounded to 8 bits are faster, where a weight was made for them."""


_MOST_ROWS_WITH_OFFSETS = 32
"""Of which `ordered` does not have the codes. Beyond them sums of integers, converted group by group, cost more than a product for the offsets."""


def _most_rows(weight: LowBit | OffsetWeight) -> int:
    """That the CUDA C++ kernels are asked for."""
    if isinstance(weight, OffsetWeight):
        return cuda.MOST_ROWS if weight.codes.ordered else _MOST_ROWS_WITH_OFFSETS
    rounds = isinstance(weight, (Int8Weight, Float8Weight)) and weight.activations.kind != "float"
    return _MOST_ROWS_BEFORE_8_BITS if rounds else cuda.MOST_ROWS


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()


def _with_outliers(weight: LowBit, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if isinstance(weight, TableWeight):
        add_sparse(x, weight, out)
    return out


def _in_order(x: torch.Tensor, weight: LowBit) -> torch.Tensor:
    """The inputs as the weight's columns want them."""
    if not isinstance(weight, (Int4Weight, Int8Weight)) or weight.columns is None:
        return x
    if len(weight.columns) > weight.in_features:
        x = F.pad(x, (0, 1))
    return x.index_select(1, weight.columns)


@functools.cache
def _has_float8(device: torch.device) -> bool:
    """Compute capability 8.9 and up; older cards cannot even convert it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _rounds_whole_rows(weight: Float8Weight) -> bool:
    """Whether a weight was made for inputs rounded to float8, with one scale a row."""
    return weight.activations.kind == "float8" and weight.scales.shape[1] == 1


def _eight_bit_product(x: torch.Tensor, weight: LowBit, bias: torch.Tensor | None) -> torch.Tensor | None:
    """With inputs rounded to 8 bits, where the weight was made for that and cuBLAS has it; else None."""
    out, inner = weight.out_features, weight.in_features
    if x.device.type != "cuda" or out % 16 or inner % 16:
        return None
    if isinstance(weight, Float8Weight):
        if not _rounds_whole_rows(weight) or not _has_float8(x.device):
            return None
        codes, scale = round_rows(x, weight.activations)
        if weight.activations.scale is not None and weight.scales.numel() == 1:
            w_scale = weight.scales
        else:
            scale = scale.expand(len(x), 1).contiguous()
            w_scale = weight.scales.repeat_interleave(weight.row_block, 0)[:out].view(1, out)
        if bias is not None and scale.numel() > 1 and x.dtype != torch.bfloat16:
            return None
        return torch._scaled_mm(codes, weight.data.t(), scale, w_scale, bias, out_dtype=x.dtype, use_fast_accum=True)
    if isinstance(weight, Int8Weight) and weight.activations.kind == "int8" and weight.zeros is None and weight.scales.shape[0] == 1:
        codes, scale = round_rows(x, weight.activations)
        return scaled_sums(torch._int_mm(codes, weight.data.t()), scale, weight.scales, bias, x.dtype)
    return None
