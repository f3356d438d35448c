"""Products with low-bit weights as they are stored, by the CUDA C++ kernels in `kernels/`.

`stream` for up to 8 rows of x, `tiles` (Hopper's warpgroup products) for more. Both turn codes into exact numbers of x's dtype in the
lane that multiplies them; sums are float32, and a group's scale multiplies the sum over the group.
"""

from __future__ import annotations

import ctypes
import functools
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.ops.cuda.compiler import architecture, in_background
from octavo.ops.cuda.launch import Boxes, Kernel, tensor_map
from octavo.ops.triton.launch import overlap_supported, sm_count
from octavo.ops.triton.low_bit_matmul import FOUR_BITS, KindName, LowBit, LowBitLayout, low_bit_layout
from octavo.ops.triton.skinny_matmul import SkinnyWorkspace

_SOURCES = Path(__file__).parent / "kernels"
_KINDS: tuple[KindName, ...] = ("int4", "table", "int8", "float8")
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Form:
    """What of a weight the compiler must know."""

    kind: KindName
    half: bool
    """x is float16, else bfloat16."""
    wide: bool
    """A lane loads 16 bytes at once, else 8: so that no chunk reaches into a next group."""
    group: int
    """Inner elements of a group; 0: one scale for the whole row."""
    row_block: int
    """Rows that share a scale."""
    scale_type: int
    table_type: int
    """Index in float32, float16, bfloat16."""
    scales: bool
    zeros: bool
    bias: bool

    @property
    def halves(self) -> bool:
        """A chunk is two groups."""
        return self.group == 32 and self.kind in FOUR_BITS

    @property
    def width(self) -> int:
        """Bytes of a row in a chunk."""
        return 64 if self.wide else 32

    @property
    def chunk(self) -> int:
        """Inner elements a loop iteration."""
        return (16 if self.wide else 8) * (8 if self.kind in FOUR_BITS else 4)

    def definitions(self) -> dict[str, int]:
        numbers = {
            "ROW_BLOCK": self.row_block,
            "KIND": _KINDS.index(self.kind),
            "HALF": self.half,
            "WIDE": self.wide,
            "GROUP": self.group,
            "BIAS": self.bias,
        }
        types = {"SCALE_TYPE": self.scale_type, "SCALE_TYPE_TABLE": self.table_type, "SCALES": self.scales, "ZEROS": self.zeros}
        return {name: int(value) for name, value in (numbers | types).items()}


@dataclass(frozen=True)
class Stream:
    """Tuning of `stream`."""

    tiles: int
    """Eights of rows of x."""
    warps: int
    """Parts of the inner dimension in a block."""
    split: int
    """Parts of the inner dimension that blocks have."""
    stages: int
    """Of a chunk a warp, in the ring."""
    blocks: int = 1
    """At a time on an SM."""

    name = "low_bit_stream"

    @property
    def rows(self) -> int:
        return 8 * self.tiles

    @property
    def columns(self) -> int:
        return 16

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 2)

    def per_warp(self, form: Form, inner: int) -> int:
        """Chunks of a strip that a warp has, whose part of x it keeps."""
        return -(-inner // (form.chunk * self.warps * self.split))

    def shared_bytes(self, form: Form) -> int:
        return 256 + 2 * self.warps * self.rows * 20 * 4 + 128 + self.stages * self.warps * 16 * form.width

    def definitions(self, form: Form, inner: int) -> dict[str, int]:
        numbers = {"TILES": self.tiles, "WARPS": self.warps, "SPLIT": self.split, "STAGES": self.stages}
        return numbers | {"PER_WARP": self.per_warp(form, inner), "WARPGROUP": 0}


@dataclass(frozen=True)
class Tiles:
    """Tuning of `tiles`."""

    rows: int
    """Of x, a block; a multiple of 8."""
    warpgroups: int
    """64 rows of the weight each."""
    split: int
    """Parts of the inner dimension."""
    stages: int
    """Chunks of the weight in shared memory, or on their way there."""
    blocks: int = 1
    """At a time on an SM, which leaves each so many registers."""

    name = "low_bit_tiles"

    @property
    def columns(self) -> int:
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    def shared_bytes(self, form: Form) -> int:
        return 2 * self.rows * 128 * max(1, form.chunk // 64) + self.stages * (self.columns * form.width + 8)

    def definitions(self, form: Form, inner: int) -> dict[str, int]:
        del form, inner
        numbers = {"ROWS": self.rows, "WARPGROUPS": self.warpgroups, "SPLIT": self.split, "STAGES": self.stages}
        return numbers | {"BLOCKS": self.blocks, "WARPGROUP": 1}


Tuning = Stream | Tiles


MOST_ROWS = 128
"""More rows are better served by unpacking the weight for cuBLAS."""
_STREAM_ROWS = 8
_X_REGISTERS, _X_REGISTERS_OF_MANY = 64, 40
"""That `stream` may spend on x, with up to 14 warps and with more: those have 96 registers a thread instead of 128."""


def choice(form: Form, columns: int, inner: int, rows: int, sms: int) -> Tuning | None:
    """For a weight of `columns` output and `inner` input features and so many rows of x; None: not by these kernels.

    The rules are what measurements on an H200 say of the shapes of an 8B model (`benchmarks/gpu_quant.py`).
    """
    if not 0 < rows <= MOST_ROWS:
        return None
    if rows <= _STREAM_ROWS:
        chunks, words = inner // form.chunk, form.chunk // 8
        for split in (1, 2, 4, 8):
            per_warp = -(-chunks // (16 * split))
            if per_warp * words > _X_REGISTERS_OF_MANY:
                per_warp = -(-chunks // (14 * split))
            if per_warp * words <= _X_REGISTERS:
                return Stream(1, -(-chunks // (split * per_warp)), split, 4)
        return None
    tile = min(128, max(16, 1 << (rows - 1).bit_length()))
    across = -(-columns // 128)
    while tile > 16 and across * -(-rows // tile) < 60:
        tile //= 2
    tiles, split = across * -(-rows // tile), 1
    while split < 4 and tiles * split < (240 if inner > 8192 else 120) * sms // 132 and inner >= 8 * split * form.chunk:
        split *= 2
    return Tiles(tile, 2, split, 3, 2 if tile <= 64 else 1)


class Arguments(ctypes.Structure):
    """`Args` of `kernels/low_bit.h`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "scales", "zeros", "table", "bias", "out", "parts", "counters")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "inner", "x_stride", "out_stride")),
        *((name, ctypes.c_int) for name in ("scale_group_stride", "scale_row_stride", "table_stride")),
    ]


def form_of(weight: LowBit, dtype: torch.dtype, *, bias: bool) -> Form | None:
    """None where the kernels do not take the weight: odd sizes, groups that a chunk does not divide, other types of x."""
    layout = low_bit_layout(weight)
    if dtype not in _TYPES[1:] or weight.out_features % 16 or weight.data.stride(0) % 16 or weight.data.data_ptr() % 16:
        return None
    four = layout.kind in FOUR_BITS
    wide, narrow = (128, 64) if four else (64, 32)
    group = layout.group or layout.inner
    twice = four and layout.group == 32
    if (not twice and group % narrow) or layout.inner % narrow:
        return None
    scale_type = 0 if layout.scales is None else _index(layout.scales.dtype)
    table_type = 0 if layout.table is None else _index(layout.table.dtype)
    if scale_type is None or table_type is None:
        return None
    return Form(
        kind=layout.kind,
        half=dtype == torch.float16,
        wide=group % wide == 0 and layout.inner % wide == 0,
        group=layout.group,
        row_block=layout.row_block,
        scale_type=scale_type,
        table_type=table_type,
        scales=layout.scales is not None,
        zeros=layout.zeros is not None,
        bias=bias,
    )


def _index(dtype: torch.dtype) -> int | None:
    return _TYPES.index(dtype) if dtype in _TYPES else None


def source(form: Form, tuning: Tuning, inner: int, machine: str) -> str:
    """The program of one kernel; `machine` is the text of `simt.h`."""
    definitions = form.definitions() | tuning.definitions(form, inner)
    lines = [f"#define {name} {value}" for name, value in definitions.items()]
    body = (_SOURCES / ("stream.cu" if isinstance(tuning, Stream) else "tiles.cu")).read_text()
    return "\n".join([*lines, machine, (_SOURCES / "low_bit.h").read_text(), body])


def device_source(form: Form, tuning: Tuning, inner: int) -> str:
    machine = (_SOURCES / "simt.h").read_text()
    if isinstance(tuning, Tiles):
        machine += _warpgroup_mma(tuning.rows, half=form.half)
    return source(form, tuning, inner, machine)


def _warpgroup_mma(rows: int, *, half: bool) -> str:
    """d [64, rows] += a [64, 16] @ x[rows, 16].T, a from registers, x from shared memory, spread over a warpgroup's lanes."""
    count, dtype = rows // 2, "f16" if half else "bf16"
    sums, operands = ", ".join(f"%{i}" for i in range(count)), ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    return f"""
INLINE void warpgroup_mma(float (&d)[{count}], const u32 (&a)[4], u32 tile, int byte) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{dtype}.{dtype} {{{sums}}}, {{{a}}}, %{count + 4}, 1, 1, 1, 0;"
               : {operands}
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(swizzled_operand(tile, byte)));
}}
"""


def arguments(
    x: torch.Tensor, weight: LowBit, layout: LowBitLayout, bias: torch.Tensor | None, out: torch.Tensor, workspace: SkinnyWorkspace | None
) -> Arguments:
    def address(tensor: torch.Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    size = x.element_size()
    return Arguments(
        x=x.data_ptr(),
        scales=address(layout.scales),
        zeros=address(layout.zeros),
        table=address(layout.table),
        bias=address(bias),
        out=out.data_ptr(),
        parts=0 if workspace is None else workspace.parts.data_ptr(),
        counters=0 if workspace is None else workspace.counters.data_ptr(),
        rows=x.shape[0],
        columns=weight.out_features,
        inner=layout.inner,
        x_stride=x.stride(0) * size,
        out_stride=out.stride(0) * size,
        scale_group_stride=layout.scale_group_stride,
        scale_row_stride=layout.scale_row_stride,
        table_stride=0 if layout.table is None or len(layout.table) == 1 else layout.table.stride(0),
    )


def boxes_of(weight: LowBit, form: Form, tuning: Tuning, inner: int) -> Boxes:
    """What of a weight's data the kernels copy at once: its data seen as [chunks, rows, width bytes]."""
    box = (16, tuning.warps) if isinstance(tuning, Stream) else (tuning.columns, 1)
    shape = (form.width // 4, weight.out_features, inner // form.chunk)
    return Boxes(weight.data.data_ptr(), shape, (weight.data.stride(0), form.width), (form.width // 4, *box))


def grid_of(rows: int, columns: int, tuning: Tuning, sms: int) -> tuple[int, int, int]:
    across = -(-columns // tuning.columns)
    if isinstance(tuning, Stream):
        assert rows <= tuning.rows
        return (min(across, max(1, sms * tuning.blocks // tuning.split)), tuning.split, 1)
    return (across, tuning.split, -(-rows // tuning.rows))


def workspace_size(rows: int, columns: int, tuning: Tuning) -> tuple[int, int]:
    """Elements and counters of a workspace that a product of so many rows needs."""
    across, down, split = -(-columns // tuning.columns), -(-rows // tuning.rows), tuning.split
    return (across * down * split * tuning.rows * tuning.columns, across * down) if split > 1 else (0, 0)


@functools.cache
def _code(form: Form, tuning: Tuning, inner: int, device: torch.device) -> Future[bytes]:
    target = architecture(device)
    assert target is not None
    return in_background(device_source(form, tuning, inner), target)


@functools.cache
def _kernel(form: Form, tuning: Tuning, inner: int, device: torch.device) -> Kernel:
    code = _code(form, tuning, inner, device).result()
    shared = tuning.shared_bytes(form)
    with torch.cuda.device(device):
        return Kernel(code, tuning.name, tuning.threads, shared, overlap=overlap_supported(device))


def prepare(form: Form, tuning: Tuning, inner: int, device: torch.device) -> None:
    """Begin to compile what `multiply` will launch."""
    _code(form, tuning, _inner(tuning, inner), device)


def _inner(tuning: Tuning, inner: int) -> int:
    """Inner elements, where the kernel is made for their number."""
    return inner if isinstance(tuning, Stream) else 0


def multiply(
    x: torch.Tensor, weight: LowBit, bias: torch.Tensor | None, form: Form, tuning: Tuning, workspace: SkinnyWorkspace | None
) -> torch.Tensor:
    """x @ weight.T + bias, without a table's outliers.

    Args:
        x: [rows, inputs as they are stored], bf16 or fp16; rows contiguous, each at a multiple of 16 bytes.
        bias: [out_features] of x's dtype.
        form: `form_of` the weight.
        workspace: needed where the tuning splits.

    Returns:
        [rows, out_features] in x's dtype.
    """
    layout = low_bit_layout(weight)
    out = torch.empty(x.shape[0], weight.out_features, dtype=x.dtype, device=x.device)
    elements, tiles = workspace_size(len(x), weight.out_features, tuning)
    assert not elements or (workspace is not None and len(workspace.parts) >= elements and len(workspace.counters) >= tiles)
    kernel = _kernel(form, tuning, _inner(tuning, layout.inner), x.device)
    grid = grid_of(len(x), weight.out_features, tuning, sm_count(x.device))
    kernel.launch(grid, arguments(x, weight, layout, bias, out, workspace), tensor_map(boxes_of(weight, form, tuning, layout.inner)))
    return out
