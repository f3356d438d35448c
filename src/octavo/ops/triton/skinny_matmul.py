"""x @ W.T for few rows: W streams through once at memory bandwidth, which a decode step is bound by.

Every thread block takes a strip of output columns, and where there are too few strips to fill the GPU, a range of the inner
dimension (split-K). The parts of a strip are added up by the last to arrive, in a fixed order: deterministic, in one launch.
With one tuning the bits of a row depend neither on the other rows, nor on how many there are up to 16 (one tensor-core shape).
"""

# Kernels are traced, not run: their arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.ops.triton.launch import overlap_supported
from octavo.ops.triton.split_softmax import arrived_last

MAX_ROWS = 64
_MIN_DOT_ROWS = 16

Form = Literal["rows_first", "weights_first", "vector"]


@dataclass(frozen=True)
class SkinnyTuning:
    columns: int
    """Output columns of a strip."""
    inner: int
    """Inner elements a loop iteration."""
    split: int
    """Parts of the inner dimension."""
    warps: int
    stages: int
    form: Form = "rows_first"
    """Which operand of the tensor cores has the rows of its tile; or, for one row, no tensor cores."""


@dataclass(frozen=True)
class SkinnyWorkspace:
    """Parts of split products, one in use a stream at a time."""

    parts: torch.Tensor
    """[elements] float32."""
    counters: torch.Tensor
    """[strips] int32, zero between launches."""

    @classmethod
    def allocate(cls, max_elements: int, max_strips: int, device: torch.device) -> SkinnyWorkspace:
        """max_elements: the largest split * padded rows * padded columns; max_strips: the largest columns / strip."""
        return cls(
            parts=torch.empty(max_elements, dtype=torch.float32, device=device),
            counters=torch.zeros(max_strips, dtype=torch.int32, device=device),
        )

    @staticmethod
    def enlarged(old: SkinnyWorkspace | None, elements: int, counters: int, device: torch.device) -> SkinnyWorkspace | None:
        """`old` if it has so much, else one that has, and what `old` had; None if nothing is needed."""
        if not elements or (old is not None and elements <= len(old.parts) and counters <= len(old.counters)):
            return old
        sizes = (elements, counters) if old is None else (max(elements, len(old.parts)), max(counters, len(old.counters)))
        return SkinnyWorkspace.allocate(*sizes, device)


@triton.jit(do_not_specialize=["rows", "columns"])
def _skinny_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    rows,
    columns,
    inner,
    share,
    x_stride,
    w_stride,
    out_stride,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    strip = tl.program_id(0)
    part = tl.program_id(1)
    m = tl.arange(0, ROWS)
    n = strip * COLUMNS + tl.arange(0, COLUMNS)
    lo = part * share
    hi = tl.minimum(lo + share, inner)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * x_stride
    w_rows = w_ptr + n.to(tl.int64)[:, None] * w_stride
    in_rows = (m < rows)[:, None]
    in_columns = (n < columns)[:, None]
    if WEIGHTS_FIRST:
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k0 in tl.range(lo, hi, INNER, num_stages=STAGES):
        k = k0 + tl.arange(0, INNER)[None, :]
        if EVEN:
            w = tl.load(w_rows + k)
            x = tl.load(x_rows + k, mask=in_rows, other=0.0)
        else:
            w = tl.load(w_rows + k, mask=in_columns & (k < hi), other=0.0)
            x = tl.load(x_rows + k, mask=in_rows & (k < hi), other=0.0)
        if WEIGHTS_FIRST:
            acc = tl.dot(w, tl.trans(x), acc)
        else:
            acc = tl.dot(x, tl.trans(w), acc)
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    out = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    stored = in_rows & (n < columns)[None, :]
    if SPLIT > 1:
        place = parts_ptr + (strip * SPLIT * ROWS + m)[:, None].to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tl.store(place + part * (ROWS * COLUMNS), acc)
        if arrived_last(counters_ptr + strip, SPLIT):
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            for p in tl.static_range(SPLIT):
                total += tl.load(place + p * (ROWS * COLUMNS), cache_modifier=".cg")
            if BIAS:
                total += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["columns"])
def _vector_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    columns,
    inner,
    w_stride,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row: products and sums in float32, without the detour of a tile of 16 rows."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    w_rows = w_ptr + n.to(tl.int64)[:, None] * w_stride
    in_columns = n < columns
    acc = tl.zeros([COLUMNS, INNER], tl.float32)
    for k0 in tl.range(0, inner, INNER, num_stages=STAGES):
        k = k0 + tl.arange(0, INNER)
        if EVEN:
            w = tl.load(w_rows + k[None, :])
            x = tl.load(x_ptr + k)
        else:
            w = tl.load(w_rows + k[None, :], mask=in_columns[:, None] & (k < inner)[None, :], other=0.0)
            x = tl.load(x_ptr + k, mask=k < inner, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if BIAS:
        total += tl.load(bias_ptr + n, mask=in_columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=in_columns)


def skinny_matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, workspace: SkinnyWorkspace | None, tuning: SkinnyTuning
) -> torch.Tensor:
    """x @ weight.T + bias, float32 sums.

    Args:
        x: [rows, in_features], rows <= MAX_ROWS; one row for the form "vector".
        weight: [out_features, in_features], bf16 or fp16, as x.
        bias: [out_features]
        workspace: needed where the tuning splits.

    Returns:
        [rows, out_features] in x's dtype.
    """
    rows, inner = x.shape
    columns = weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    overlap = overlap_supported(x.device)
    if tuning.form == "vector":
        _vector_kernel[(triton.cdiv(columns, tuning.columns),)](
            x,
            weight,
            x if bias is None else bias,
            out,
            columns,
            inner,
            weight.stride(0),
            EVEN=columns % tuning.columns == 0 and inner % tuning.inner == 0,
            COLUMNS=tuning.columns,
            INNER=tuning.inner,
            STAGES=tuning.stages,
            BIAS=bias is not None,
            OVERLAP=overlap,
            **({"launch_pdl": True} if overlap else {}),
            num_warps=tuning.warps,
        )
        return out
    share = triton.cdiv(inner, tuning.split * tuning.inner) * tuning.inner
    padded = max(_MIN_DOT_ROWS, triton.next_power_of_2(rows))
    _skinny_kernel[(triton.cdiv(columns, tuning.columns), tuning.split)](
        x,
        weight,
        x if bias is None else bias,
        out,
        out if workspace is None else workspace.parts,
        out if workspace is None else workspace.counters,
        rows,
        columns,
        inner,
        share,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        EVEN=columns % tuning.columns == 0 and share * tuning.split == inner,
        ROWS=padded,
        COLUMNS=tuning.columns,
        INNER=tuning.inner,
        SPLIT=tuning.split,
        STAGES=tuning.stages,
        BIAS=bias is not None,
        WEIGHTS_FIRST=tuning.form == "weights_first",
        OVERLAP=overlap,
        **({"launch_pdl": True} if overlap else {}),
        num_warps=tuning.warps,
    )
    return out
