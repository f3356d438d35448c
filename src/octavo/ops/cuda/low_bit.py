"""Products with low-bit weights as they are stored, by the CUDA C++ kernels in `kernels/`.

`stream` for up to 8 rows of x, `tiles` (Hopper's warpgroup products) for more, for which `inputs` puts x in order. All turn codes into
exact numbers in the lane that multiplies them: of x's dtype, with float32 sums, or integers for x in 16-bit fixed point, with exact ones.
A group's scale multiplies the sum over the group.
"""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from octavo.ops.cuda.compiled import kernel
from octavo.ops.cuda.compiled import prepare as prepare_program
from octavo.ops.cuda.launch import Boxes, tensor_map
from octavo.ops.packed import OffsetWeight
from octavo.ops.triton.launch import sm_count
from octavo.ops.triton.low_bit_matmul import FOUR_BITS, KindName, LowBit, LowBitLayout, low_bit_layout
from octavo.ops.triton.skinny_matmul import SkinnyWorkspace

SOURCES = Path(__file__).parent / "kernels"
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
    ordered: bool = False
    """See `Int4Weight.ordered`, `Int8Weight.ordered`."""
    offsets: bool = False
    """Groups have offsets (see `OffsetWeight`), in the place of zero points; `zeros` too then."""

    @property
    def width(self) -> int:
        """Bytes of a row in a chunk."""
        return 64 if self.wide else 32

    @property
    def chunk(self) -> int:
        """Inner elements a loop iteration."""
        return (16 if self.wide else 8) * (8 if self.kind in FOUR_BITS else 4)

    def read_by(self, tuning: Tuning) -> Form:
        """As the kernel reads it. In `tiles` a chunk of 4-bit codes in groups of 32 is half as long: it has fewer groups, which have sums of
        their own."""
        shorter = isinstance(tuning, Tiles) and self.wide and self.group == 32 and self.kind in FOUR_BITS
        return dataclasses.replace(self, wide=False) if shorter else self

    def bytes_of_groups(self, columns: int) -> int:
        """Of the scales and zeros that so many columns have for a chunk."""
        short = self.group == 32 and (self.kind in FOUR_BITS or (self.kind == "int8" and self.wide))
        return (self.chunk // 32 if short else 1) * columns * ((4 if self.scale_type == 0 else 2) + self.zero_bytes)

    @property
    def zero_bytes(self) -> int:
        """Of a group's zero point, or its offset."""
        return 0 if not self.zeros else 4 if self.offsets else 1 if self.kind == "int4" else 2

    @property
    def sums_once(self) -> bool:
        """Sums of integers are converted and scaled once a row of the weight, not once a group: then nothing is cheaper."""
        return not self.group

    @property
    def integers(self) -> bool:
        """Codes can be multiplied as integers."""
        return self.kind in ("int4", "int8")

    def groups_of(self, inner: int) -> int:
        """Groups of so many inner elements, one if they are of a larger one."""
        return max(1, inner // self.group) if self.group else 1

    def definitions(self) -> dict[str, int]:
        numbers = {
            "ROW_BLOCK": self.row_block,
            "KIND": _KINDS.index(self.kind),
            "HALF": self.half,
            "WIDE": self.wide,
            "GROUP": self.group,
            "BIAS": self.bias,
            "ORDERED": self.ordered,
            "OFFSETS": self.offsets,
        }
        types = {"SCALE_TYPE": self.scale_type, "SCALE_TYPE_TABLE": self.table_type, "SCALES": self.scales, "ZEROS": self.zeros}
        return {name: int(value) for name, value in (numbers | types).items()}


_STRIPS_AHEAD = 4
"""Of which `stream` has scales copied."""


class AnyTuning(Protocol):
    """What a kernel is made for, besides the form of its weight."""

    @property
    def name(self) -> str:
        """Of the function."""

    @property
    def source(self) -> str:
        """The file."""

    @property
    def threads(self) -> int:
        """Of a block."""

    @property
    def cluster(self) -> int:
        """Blocks of a cluster; 1: there are none."""

    def shared_bytes(self, form: Form, inner: int) -> int:
        """Of a block."""

    def definitions(self, form: Form, inner: int) -> dict[str, int]:
        """What the file wants to know."""

    def products(self, form: Form) -> str:
        """Functions of tensor cores that the file calls, and `simt.h` does not have."""


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

    name, source, cluster = "low_bit_stream", "stream.cu", 1

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

    def shared_bytes(self, form: Form, inner: int) -> int:
        along = form.group and form.kind != "float8"
        scales = _STRIPS_AHEAD * self.warps * self.per_warp(form, inner) * form.bytes_of_groups(16) if along else 0
        return 256 + 2 * self.warps * self.rows * 20 * 4 + scales + 128 + self.stages * self.warps * 16 * form.width

    def definitions(self, form: Form, inner: int) -> dict[str, int]:
        numbers = {"TILES": self.tiles, "WARPS": self.warps, "SPLIT": self.split, "STAGES": self.stages, "STRIPS_AHEAD": _STRIPS_AHEAD}
        return numbers | {"PER_WARP": self.per_warp(form, inner), "INTEGERS": int(form.integers), "WARPGROUP": 0}

    def products(self, form: Form) -> str:
        del form
        return ""


SHARED_BYTES = 227 << 10
"""That a block can have."""
STAGE_INNER = 128
"""Inner elements that `tiles` copies at once."""


@dataclass(frozen=True)
class Inputs:
    """How `inputs` lays out x for `tiles`."""

    rows: int
    """Of a block of `tiles`."""
    integers: bool
    """x becomes integers of 16 bits."""

    name, source, cluster = "low_bit_inputs", "inputs.cu", 1
    threads = 512

    @property
    def rows_a_pass(self) -> int:
        """That one product has; twice as many sums of integers as of bfloat16 are in registers at a time."""
        return min(self.rows, 64 if self.integers else 128)

    def image_bytes(self, form: Form) -> int:
        """Of `rows` rows of 128 inner elements."""
        return self.rows * (256 + (4 * form.groups_of(STAGE_INNER) if self.integers and form.zeros else 0))

    def shared_bytes(self, form: Form, inner: int) -> int:
        del form, inner
        return 64

    def definitions(self, form: Form, inner: int) -> dict[str, int]:
        del form
        numbers = {"ROWS": self.rows, "PASS": self.rows_a_pass, "INTEGERS": int(self.integers), "WARPGROUP": 1}
        return numbers | {"HELD": -(-inner // (8 * self.threads))}

    def products(self, form: Form) -> str:
        del form
        return ""


@dataclass(frozen=True)
class Tiles:
    """Tuning of `tiles`."""

    rows: int
    """Of x, a block; a multiple of 8, from 64 on of 64."""
    warpgroups: int
    """64 rows of the weight each."""
    stages: int
    """Of 128 inner elements, in shared memory or on their way there."""
    blocks: int = 1
    """At a time on an SM, which leaves each so many registers."""
    integers: bool = True
    """Codes that are integers are multiplied as such."""

    name, source, cluster = "low_bit_tiles", "tiles.cu", 1

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.rows, self.integers)

    @property
    def columns(self) -> int:
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    def tiles(self, rows: int, columns: int) -> int:
        return -(-columns // self.columns) * -(-rows // self.rows)

    def shared_bytes(self, form: Form, inner: int) -> int:
        del inner
        groups = form.groups_of(STAGE_INNER)
        scales = 0 if not form.group or form.kind == "float8" else groups * (4 if form.scale_type == 0 else 2)
        weight = form.width * (STAGE_INNER // form.chunk) + scales + groups * form.zero_bytes
        stage = _up(_up(self.inputs.image_bytes(form), 128) + self.columns * weight, 1024)
        return self.stages * (stage + 16)

    def filled(self, form: Form) -> Tiles:
        """With as many stages as an SM's memory has room for."""
        room = SHARED_BYTES // self.blocks - (1024 if self.blocks > 1 else 0)
        stages = next(n for n in range(8, 0, -1) if dataclasses.replace(self, stages=n).shared_bytes(form, 0) <= room)
        return dataclasses.replace(self, stages=stages)

    def definitions(self, form: Form, inner: int) -> dict[str, int]:
        numbers = {"WARPGROUPS": self.warpgroups, "STAGES": self.stages, "BLOCKS": self.blocks}
        return numbers | self.inputs.definitions(form, inner)

    def products(self, form: Form) -> str:
        return warpgroup_mma(self.inputs.rows_a_pass, half=form.half, integers=self.integers)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


Tuning = Stream | Tiles


MOST_ROWS = 256
"""More rows are better served by unpacking the weight for cuBLAS."""
STREAM_ROWS = 8
"""That `stream` multiplies."""
_X_REGISTERS, _X_REGISTERS_OF_MANY = 64, 40
"""That `stream` may spend on x, with up to 14 warps and with more: those have 96 registers a thread instead of 128."""


def choice(form: Form, columns: int, inner: int, rows: int, sms: int) -> Tuning | None:
    """For a weight of `columns` output and `inner` input features and so many rows of x; None: not by these kernels.

    The rules are what measurements on an H200 say of the shapes of an 8B model (`benchmarks/gpu_quant.py`).
    """
    if not 0 < rows <= MOST_ROWS or (form.ordered and form.group == 32):
        return None
    if rows <= STREAM_ROWS:
        chunks, words = inner // form.chunk, form.chunk // 8
        for split in (1, 2, 4, 8):
            per_warp = -(-chunks // (16 * split))
            if per_warp * words > _X_REGISTERS_OF_MANY:
                per_warp = -(-chunks // (14 * split))
            if per_warp * words <= (_X_REGISTERS_OF_MANY if form.offsets else _X_REGISTERS):
                return Stream(1, -(-chunks // (split * per_warp)), split, 4)
        return None
    if form.ordered or (form.group and form.group % STAGE_INNER and STAGE_INNER % form.group):
        return None
    large = columns * inner >= 8 * 132 * 128 * STAGE_INNER
    if rows <= 16:
        tuning = Tiles(16, 2, 1, 2, form.integers)
    elif rows <= 32:
        integers = form.integers and (large or form.sums_once or form.offsets)
        tuning = Tiles(32, 2, 1, 2, True) if integers else Tiles(32, 3, 1, 1, False)
    else:
        tuning = Tiles(64 if rows <= 64 else 128, 2, 1, 1, form.integers and (form.sums_once or form.offsets))
    return tuning.filled(form.read_by(tuning))


class InputsArguments(ctypes.Structure):
    """`Inputs` of `kernels/low_bit.h`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "image", "scales")),
        *((name, ctypes.c_int) for name in ("rows", "inner", "x_stride", "stages")),
    ]


class Arguments(ctypes.Structure):
    """`Args` of `kernels/low_bit.h`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "scales", "zeros", "table", "bias", "out", "parts", "counters", "x_scales")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "inner", "x_stride", "out_stride")),
        *((name, ctypes.c_int) for name in ("scale_group_stride", "scale_row_stride", "table_stride")),
    ]


def form_of(weight: LowBit | OffsetWeight, dtype: torch.dtype, *, bias: bool) -> Form | None:
    """None where the kernels do not take the weight: odd sizes, groups that a chunk does not divide, other types of x."""
    layout = low_bit_layout(weight)
    if dtype not in _TYPES[1:] or weight.out_features % 16 or weight.data.stride(0) % 16 or weight.data.data_ptr() % 16:
        return None
    four = layout.kind in FOUR_BITS
    wide, narrow = (128, 64) if four else (64, 32)
    group = layout.group or layout.inner
    short = layout.group == 32 and (four or (layout.kind == "int8" and layout.inner % wide == 0))
    if (not short and group % narrow) or layout.inner % narrow:
        return None
    scale_type = 0 if layout.scales is None else _index(layout.scales.dtype)
    table_type = 0 if layout.table is None else _index(layout.table.dtype)
    offsets = layout.offsets is not None
    if scale_type is None or table_type is None or (offsets and (layout.zeros is not None or not layout.group)):
        return None
    return Form(
        kind=layout.kind,
        half=dtype == torch.float16,
        wide=layout.inner % wide == 0 and (group % wide == 0 or short),
        group=layout.group,
        row_block=layout.row_block,
        scale_type=scale_type,
        table_type=table_type,
        scales=layout.scales is not None,
        zeros=layout.zeros is not None or offsets,
        bias=bias,
        ordered=layout.ordered,
        offsets=offsets,
    )


def _index(dtype: torch.dtype) -> int | None:
    return _TYPES.index(dtype) if dtype in _TYPES else None


def source(form: Form, tuning: AnyTuning, inner: int, machine: str) -> str:
    """The program of one kernel; `machine` is the text of `simt.h`."""
    definitions = form.definitions() | tuning.definitions(form, inner)
    lines = [f"#define {name} {value}" for name, value in definitions.items()]
    return "\n".join([*lines, machine, (SOURCES / "low_bit.h").read_text(), (SOURCES / tuning.source).read_text()])


@dataclass(frozen=True)
class Program:
    """A kernel for a weight of a form, tuned so."""

    form: Form
    tuning: AnyTuning
    inner: int = 0
    """Inner elements, where the kernel is made for their number; else 0."""

    @classmethod
    def of(cls, form: Form, tuning: Tuning, inner: int) -> Program:
        return cls(form, tuning, inner if isinstance(tuning, Stream) else 0)

    @classmethod
    def of_inputs(cls, form: Form, tuning: Tiles, inner: int) -> Program:
        """That puts x in order. What does not matter to it is left out of the form, so that as many weights as may be share it."""
        form = dataclasses.replace(form, row_block=1, scale_type=0, table_type=0, scales=False, bias=False, offsets=False)
        return cls(form, tuning.inputs, inner)

    @property
    def name(self) -> str:
        return self.tuning.name

    @property
    def threads(self) -> int:
        return self.tuning.threads

    @property
    def shared_bytes(self) -> int:
        return self.tuning.shared_bytes(self.form, self.inner)

    @property
    def cluster(self) -> int:
        return self.tuning.cluster

    def device_source(self) -> str:
        machine = (SOURCES / "simt.h").read_text() + self.tuning.products(self.form)
        return source(self.form, self.tuning, self.inner, machine)


def warpgroup_mma(rows: int, *, half: bool, integers: bool) -> str:
    """d [64, columns] += a [64, 32 bytes] @ x[columns, 32 bytes].T, a from registers, x from shared memory, spread over a warpgroup's
    lanes; `fresh`: d is written only. Columns are `rows`, and for integers as many again.
    """
    columns, count = (2 * rows, rows) if integers else (rows, rows // 2)
    dtype = "f16" if half else "bf16"
    shape = f"m64n{columns}k32.s32.s8.s8" if integers else f"m64n{columns}k16.f32.{dtype}.{dtype}"
    register, number, more = ("r", "int", "") if integers else ("f", "float", ", 1, 1, 0")
    sums, a = ", ".join(f"%{i}" for i in range(count)), ", ".join(f"%{count + i}" for i in range(4))
    functions = []
    for name, access, add in (("warpgroup_mma", "+", 1), ("warpgroup_mma_fresh", "=", 0)):
        operands = ", ".join(f'"{access}{register}"(d[{i}])' for i in range(count))
        functions.append(f"""
INLINE void {name}({number} (&d)[{count}], const u32 (&a)[4], u32 tile, int byte) {{
  asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + 5}, 0;\\n"
               "wgmma.mma_async.sync.aligned.{shape} {{{sums}}}, {{{a}}}, %{count + 4}, add{more};\\n}}"
               : {operands}
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(swizzled_operand_of(tile, byte)), "r"({add}));
}}
""")
    if not integers:  # x as it is in `plain_operand`
        functions.append(
            functions[0]
            .replace("warpgroup_mma(", "warpgroup_mma_plain(")
            .replace("u32 tile, int byte", "u32 tile")
            .replace("swizzled_operand_of(tile, byte)", "plain_operand(tile)")
        )
    return "".join(functions)


@dataclass(frozen=True)
class Images:
    """x as `tiles` reads it."""

    images: torch.Tensor
    """[rows of tiles, stages, bytes] uint8"""
    scales: torch.Tensor
    """[rows of x] float32"""

    @classmethod
    def allocate(cls, rows: int, inner: int, form: Form, inputs: Inputs, device: torch.device) -> Images:
        shape = (-(-rows // inputs.rows), -(-inner // STAGE_INNER), inputs.image_bytes(form))
        return cls(torch.empty(shape, dtype=torch.uint8, device=device), torch.empty(rows, device=device))

    def arguments(self, x: torch.Tensor, inner: int) -> InputsArguments:
        """Of the kernel that writes them."""
        stride, stages = x.stride(0) * x.element_size(), self.images.shape[1]
        return InputsArguments(x.data_ptr(), self.images.data_ptr(), self.scales.data_ptr(), len(x), inner, stride, stages)


def arguments(
    x: torch.Tensor,
    images: Images | torch.Tensor | None,
    weight: LowBit | OffsetWeight,
    layout: LowBitLayout,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    workspace: SkinnyWorkspace | None,
) -> Arguments:
    def address(tensor: torch.Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    size, written = x.element_size(), images.images if isinstance(images, Images) else images
    return Arguments(
        x=x.data_ptr() if written is None else written.data_ptr(),
        x_scales=images.scales.data_ptr() if isinstance(images, Images) else 0,
        scales=address(layout.scales),
        zeros=address(layout.zeros if layout.offsets is None else layout.offsets),
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


def boxes_of(weight: LowBit | OffsetWeight, form: Form, tuning: Tuning, inner: int) -> Boxes:
    """What of a weight's data the kernels copy at once: its data seen as [chunks, rows, width bytes]."""
    box = (16, tuning.warps) if isinstance(tuning, Stream) else (tuning.columns, STAGE_INNER // form.chunk)
    shape = (form.width // 4, weight.out_features, inner // form.chunk)
    return Boxes(weight.data.data_ptr(), shape, (weight.data.stride(0), form.width), (form.width // 4, *box))


def grid_of(rows: int, columns: int, inner: int, tuning: Tuning, sms: int) -> tuple[int, int, int]:
    if isinstance(tuning, Stream):
        assert rows <= tuning.rows
        return (min(-(-columns // tuning.columns), max(1, sms * tuning.blocks // tuning.split)), tuning.split, 1)
    return (min(tuning.tiles(rows, columns) * -(-inner // STAGE_INNER), sms * tuning.blocks), 1, 1)


def workspace_size(rows: int, columns: int, inner: int, tuning: Tuning, sms: int) -> tuple[int, int]:
    """Elements and counters of a workspace that a product of so many rows needs."""
    if isinstance(tuning, Stream):
        across = -(-columns // tuning.columns)
        return (across * tuning.split * tuning.rows * tuning.columns, across) if tuning.split > 1 else (0, 0)
    blocks, tiles = grid_of(rows, columns, inner, tuning, sms)[0], tuning.tiles(rows, columns)
    if tiles % blocks == 0:
        return (0, 0)  # all of a tile is one block's
    return (blocks * 2 * tuning.rows * tuning.columns, tiles * 4 * tuning.warpgroups)


def prepare(form: Form, tuning: Tuning, inner: int, device: torch.device) -> None:
    """Begin to compile what `multiply` will launch."""
    form = form.read_by(tuning)
    prepare_program(Program.of(form, tuning, inner), device)
    if isinstance(tuning, Tiles):
        prepare_program(Program.of_inputs(form, tuning, inner), device)


def multiply(
    x: torch.Tensor,
    weight: LowBit | OffsetWeight,
    bias: torch.Tensor | None,
    form: Form,
    tuning: Tuning,
    workspace: SkinnyWorkspace | None,
) -> torch.Tensor:
    """x @ weight.T + bias, without a table's outliers. The weight is complete: see `ops.registry.Linear`.

    Args:
        x: [rows, inputs as they are stored], bf16 or fp16; rows contiguous, each at a multiple of 16 bytes.
        bias: [out_features] of x's dtype.
        form: `form_of` the weight.
        workspace: needed where the tuning splits.

    Returns:
        [rows, out_features] in x's dtype.
    """
    assert not (isinstance(tuning, Tiles) and (form.ordered or (form.offsets and not tuning.integers)))
    assert not (form.ordered and form.group == 32)
    form = form.read_by(tuning)
    layout = low_bit_layout(weight)
    out = torch.empty(x.shape[0], weight.out_features, dtype=x.dtype, device=x.device)
    sms, inner = sm_count(x.device), layout.inner
    elements, counters = workspace_size(len(x), weight.out_features, inner, tuning, sms)
    assert not elements or (workspace is not None and len(workspace.parts) >= elements and len(workspace.counters) >= counters)
    images = None
    if isinstance(tuning, Tiles):
        images = Images.allocate(len(x), inner, form, tuning.inputs, x.device)
        kernel(Program.of_inputs(form, tuning, inner), x.device).launch((len(x), 1, 1), images.arguments(x, inner))
    grid = grid_of(len(x), weight.out_features, inner, tuning, sms)
    packed = arguments(x, images, weight, layout, bias, out, workspace)
    kernel(Program.of(form, tuning, inner), x.device).launch(grid, packed, tensor_map(boxes_of(weight, form, tuning, inner)))
    return out
