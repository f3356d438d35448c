"""x @ W.T for the few rows of a decode step, by `kernels/dense.cu`: bfloat16, float16, or float8 with a scale a row of either.

The kernel streams W from memory while the one before it still runs; the sums are float32, in an order that depends on the shapes
and the tuning alone, so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from octavo.ops.cuda.compiled import kernel
from octavo.ops.cuda.launch import Boxes, tensor_map
from octavo.ops.triton.launch import sm_count
from octavo.ops.triton.skinny_matmul import SkinnyWorkspace

_SOURCES = Path(__file__).parent / "kernels"
Numbers = Literal["bfloat16", "float16", "float8"]
"""That are multiplied; float8 (e4m3) products come out as bfloat16 or float16."""

ROW_BYTES = 128
"""Of a chunk: what the tensor cores' order of shared memory repeats after."""
MOST_ROWS = 128
_SHARED_BYTES = 200 << 10
"""Of a block: leaves room on the SM for the small kernels between two products."""


@dataclass(frozen=True)
class Form:
    """What the compiler must know of the operands."""

    numbers: Numbers
    half: bool
    """The result is float16, else bfloat16."""
    bias: bool
    row_block: int = 1
    """Rows of the weight that share a scale, of float8."""

    @property
    def chunk(self) -> int:
        """Inner elements in ROW_BYTES."""
        return ROW_BYTES if self.numbers == "float8" else ROW_BYTES // 2


@dataclass(frozen=True)
class Tuning:
    rows: int
    """Of x, at most: a multiple of 8."""
    columns: int
    """Rows of the weight in a tile: a multiple of 8, 256 at most."""
    split: int
    """Parts of the inner dimension, none of which may be without a chunk."""
    depth: int = 1
    """Chunks that are copied and multiplied at once."""

    @property
    def warpgroups(self) -> int:
        return -(-self.rows // 64)

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + 32

    @property
    def stage_bytes(self) -> int:
        return self.depth * (self.rows + self.columns) * ROW_BYTES

    @property
    def padding(self) -> int:
        """Bytes that the products of rows that x does not have read behind the ring."""
        return max(0, 64 * self.warpgroups - self.rows - self.columns) * ROW_BYTES

    @property
    def stages(self) -> int:
        return (_SHARED_BYTES - self.padding) // (self.stage_bytes + 16)

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16) + self.padding + 16

    def definitions(self) -> dict[str, int]:
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "SPLIT": self.split,
            "DEPTH": self.depth,
            "STAGES": self.stages,
            "PADDING": self.padding,
            "WARPGROUPS": self.warpgroups,
        }


class Arguments(ctypes.Structure):
    """`Args` of `kernels/dense.cu`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x_scale", "w_scale", "bias", "out", "parts", "counters")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "chunks", "out_stride", "x_scale_stride")),
    ]


def source(form: Form, tuning: Tuning, machine: str) -> str:
    """The program of one kernel; `machine` is the text of `simt.h`."""
    definitions = {
        "HALF": form.half,
        "FLOAT8": form.numbers == "float8",
        "SCALED": form.numbers == "float8",
        "BIAS": form.bias,
        "W_SCALE_ROWS": form.row_block,
        "WARPGROUP": 1,
    }
    lines = [f"#define {name} {int(value)}" for name, value in (definitions | tuning.definitions()).items()]
    return "\n".join([*lines, machine, (_SOURCES / "dense.cu").read_text()])


@dataclass(frozen=True)
class Program:
    """A kernel for operands of a form, tuned so."""

    form: Form
    tuning: Tuning

    name = "dense_rows"

    cluster = 1

    @property
    def threads(self) -> int:
        return self.tuning.threads

    @property
    def shared_bytes(self) -> int:
        return self.tuning.shared_bytes

    def device_source(self) -> str:
        return source(self.form, self.tuning, (_SOURCES / "simt.h").read_text() + _product(self.form, self.tuning.columns))


def _product(form: Form, columns: int) -> str:
    """d [64, columns] += x[64, chunk / 4] @ w[columns, chunk / 4].T, both from shared memory, spread over a warpgroup's lanes."""
    count = columns // 2
    dtype, inner, ends = {"bfloat16": ("bf16", 16, ", 0, 0"), "float16": ("f16", 16, ", 0, 0"), "float8": ("e4m3", 32, "")}[form.numbers]
    sums, operands = ", ".join(f"%{i}" for i in range(count)), ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
INLINE void dense_mma(float (&d)[{count}], u32 x, u32 w, int byte) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k{inner}.f32.{dtype}.{dtype} {{{sums}}}, %{count}, %{count + 1}, 1, 1, 1{ends};"
               : {operands}
               : "l"(swizzled_operand(x, byte)), "l"(swizzled_operand(w, byte)));
}}
"""


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def row_class(rows: int) -> int:
    """Rows that a kernel is compiled for."""
    return next(n for n in (8, 16, 32, 64, 96, 128) if rows <= n)


@functools.cache
def choice(form: Form, columns: int, inner: int, rows: int, sms: int) -> Tuning | None:
    """For a weight of `columns` output and `inner` input features; None where the kernel does not take it.

    The cheapest by a model of the time that the SM with most to do takes, in bytes that it could read meanwhile; its numbers are
    what the tilings of the layers of 8B and 0.6B models take on an H200, behind the small kernels that precede them in a step.
    """
    if not 0 < rows <= MOST_ROWS or inner % form.chunk or columns % 8:
        return None
    tile, chunks = row_class(rows), inner // form.chunk
    best: tuple[float, Tuning] | None = None
    for split, width, depth in itertools.product((1, 2, 4), range(16, 257, 8), (1, 2)):
        tuning = Tuning(tile, width, split, depth)
        stages = _ceil(chunks, depth)
        share = _ceil(stages, split)
        if share * (split - 1) >= stages or tuning.stages < 3:
            continue
        turns = _ceil(_ceil(columns, width) * split, sms)
        stage = max(depth * ROW_BYTES * (width + _X_COST * tile), _STAGE_COST + depth * _CHUNK_COST)
        joined = 0.0 if split == 1 else _JOIN_COST + _PART_COST * tile * width * 4 * (split + 1)
        cost = turns * (share * stage + _TURN_COST + joined) + _START_COST * tuning.stage_bytes
        if best is None or cost < best[0]:
            best = cost, tuning
    return None if best is None else best[1]


_X_COST = 0.07
"""A byte of x, which comes from the L2 cache, beside a byte of W."""
_STAGE_COST, _CHUNK_COST = 4500.0, 1700.0
"""Of products, which take longer than the bytes of a narrow tile."""
_JOIN_COST, _PART_COST = 20000.0, 2.0
"""To add up the parts of a tile, and a byte of a part that is stored or read."""
_TURN_COST = 5000.0
_START_COST = 3.5
"""A byte of the first stage, which all wait for."""


def arguments(
    rows: int,
    weight: torch.Tensor,
    form: Form,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    workspace: SkinnyWorkspace | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> Arguments:
    x_scale, w_scale = (None, None) if scales is None else scales
    return Arguments(
        x_scale=0 if x_scale is None else x_scale.data_ptr(),
        w_scale=0 if w_scale is None else w_scale.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        parts=0 if workspace is None else workspace.parts.data_ptr(),
        counters=0 if workspace is None else workspace.counters.data_ptr(),
        rows=rows,
        columns=len(weight),
        chunks=weight.shape[1] // form.chunk,
        out_stride=out.stride(0) * out.element_size(),
        x_scale_stride=0 if x_scale is None or len(x_scale) == 1 else x_scale.stride(0),
    )


def boxes_of(matrix: torch.Tensor, rows: int, depth: int) -> Boxes:
    """Boxes of `depth` chunks of `rows` rows of a matrix."""
    size = matrix.element_size()
    row, chunks = matrix.stride(0) * size, matrix.shape[1] * size // ROW_BYTES
    words = ROW_BYTES // 4
    return Boxes(matrix.data_ptr(), (words, len(matrix), chunks), (row, ROW_BYTES), (words, rows, depth), exchanged=True)


def grid_of(columns: int, tuning: Tuning, sms: int) -> tuple[int, int, int]:
    return (min(-(-columns // tuning.columns) * tuning.split, sms), 1, 1)


def workspace_size(columns: int, tuning: Tuning) -> tuple[int, int]:
    """Elements and counters of a workspace that a product needs."""
    tiles = -(-columns // tuning.columns)
    return (tiles * tuning.split * -(-tuning.rows // 16) * 16 * tuning.columns, tiles) if tuning.split > 1 else (0, 0)


def takes(matrix: torch.Tensor) -> bool:
    """Whether the copy engine can read a matrix as it lies."""
    return matrix.stride(1) == 1 and matrix.stride(0) * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    form: Form,
    tuning: Tuning,
    workspace: SkinnyWorkspace | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias. Weight, bias and the weight's scales are complete: see `ops.registry.Linear`.

    Args:
        x: [rows, in_features], rows <= tuning.rows, as `takes` has it.
        weight: [out_features, in_features] of x's dtype.
        bias: [out_features] of the result's dtype.
        workspace: needed where the tuning splits.
        scales: of float8: x's [rows or 1, 1] and the weight's [blocks], float32.

    Returns:
        [rows, out_features], float16 or bfloat16 as `form` has it.
    """
    out = torch.empty(len(x), len(weight), dtype=torch.float16 if form.half else torch.bfloat16, device=x.device)
    elements, tiles = workspace_size(len(weight), tuning)
    assert len(x) <= tuning.rows and (
        not elements or (workspace is not None and len(workspace.parts) >= elements and len(workspace.counters) >= tiles)
    )
    packed = arguments(len(x), weight, form, bias, out, workspace, scales)
    grid = grid_of(len(weight), tuning, sm_count(x.device))
    boxes = boxes_of(x, tuning.rows, tuning.depth), boxes_of(weight, tuning.columns, tuning.depth)
    kernel(Program(form, tuning), x.device).launch(grid, packed, *map(tensor_map, boxes))
    return out
