"""Products of up to 256 rows with weights whose codes lie as the tensor cores take them (`Int4Weight.ordered`, `Int8Weight.ordered`):
`kernels/ordered.cu`.

x is multiplied as it lies, so no kernel has to put it in order; one block has all of the inner dimension, or the blocks of a cluster
share it and add up their parts from each other's shared memory. Where groups have offsets, `kernels/sums.cu` adds up their inputs before.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import overload

import torch

from octavo.ops.cuda.compiled import kernel
from octavo.ops.cuda.compiled import prepare as prepare_program
from octavo.ops.cuda.launch import Boxes, tensor_map
from octavo.ops.cuda.low_bit import SHARED_BYTES, STAGE_INNER, Form, InputsArguments, Program, arguments, warpgroup_mma
from octavo.ops.packed import Int4Weight, Int8Weight, OffsetWeight
from octavo.ops.reference.low_bit import bytes_in_order, in_order
from octavo.ops.triton.launch import sm_count
from octavo.ops.triton.low_bit_matmul import LowBit, low_bit_layout

MOST_ROWS = 256
SHORT_GROUP = 32
"""Inner elements of a group whose sums are its own."""
_LINE_ELEMENTS = 64
"""Of x, in a line of 128 bytes."""


@dataclass(frozen=True)
class Sums:
    """How `sums` adds up x for groups that have offsets."""

    rows: int
    """Of x, a tile of `ordered`."""

    name, source, cluster = "low_bit_sums", "sums.cu", 1
    threads = 256

    def image_bytes(self) -> int:
        """Of `rows` rows of 128 inner elements."""
        return 32 * self.rows

    def grid(self, rows: int, inner: int) -> tuple[int, int, int]:
        return (-(-inner // (8 * self.threads)), rows, 1)

    def shared_bytes(self, form: Form, inner: int) -> int:
        del form, inner
        return 0

    def definitions(self, form: Form, inner: int) -> dict[str, int]:
        del form, inner
        return {"ROWS": self.rows, "INTEGERS": 0, "WARPGROUP": 0}

    def products(self, form: Form) -> str:
        del form
        return ""

    def images(self, rows: int, inner: int, device: torch.device) -> torch.Tensor:
        """[rows of tiles, stages, bytes] uint8, to be written."""
        shape = (-(-rows // self.rows), inner // STAGE_INNER, self.image_bytes())
        return torch.empty(shape, dtype=torch.uint8, device=device)

    def program(self, *, half: bool) -> Program:
        return Program(Form("int4", half, True, SHORT_GROUP, 1, 0, 0, False, False, False), self)


@dataclass(frozen=True)
class Ordered:
    """Tuning of `ordered`."""

    rows: int
    """Of x, a tile: 8, 16, 32, 64 or 128."""
    tiles: int
    """64 rows of the weight each, of a block."""
    warpgroups: int
    """A multiple of `tiles`: so many share the inner dimension."""
    cluster: int
    """Blocks that share the inner dimension."""

    name, source = "low_bit_ordered", "ordered.cu"

    @property
    def sums(self) -> Sums:
        return Sums(self.rows)

    @property
    def columns(self) -> int:
        return 64 * self.tiles

    @property
    def split(self) -> int:
        """Warpgroups that share the inner dimension."""
        return self.warpgroups // self.tiles

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    def items(self, rows: int, columns: int) -> int:
        """Tiles of a product."""
        return -(-columns // self.columns) * -(-rows // self.rows)

    @property
    def parts_bytes(self) -> int:
        """Of sums on their way to where they are added up and stored."""
        if self.split * self.cluster > 1:
            return self.split * min(self.rows, 64) * (self.columns + 4) * 4
        return 4 * self.warpgroups * min(self.rows, 32) * 20 * 4

    def sets(self, form: Form) -> int:
        """Of sums of short groups, which take turns: one where a thread has no registers for two."""
        return 1 if self.rows == 128 or (form.offsets and self.rows == 32) else 2

    def stage_bytes(self, form: Form) -> int:
        groups = 0 if not form.group else _groups(form) * ((4 if form.scale_type == 0 else 2) + form.zero_bytes)
        sums = self.sums.image_bytes() if form.offsets else 0
        stage = self.split * (STAGE_INNER * 2 * self.rows + self.columns * (_line_bytes(form) + groups) + sums)
        return -(-stage // 1024) * 1024

    def stages(self, form: Form) -> int:
        return min(8, (SHARED_BYTES - self.parts_bytes) // (self.stage_bytes(form) + 16))

    def shared_bytes(self, form: Form, inner: int = 0) -> int:
        del inner
        return self.stages(form) * (self.stage_bytes(form) + 16) + self.parts_bytes

    def definitions(self, form: Form, inner: int = 0) -> dict[str, int]:
        del inner
        return {
            "ROWS": self.rows,
            "PASS": self.rows,
            "TILES": self.tiles,
            "WARPGROUPS": self.warpgroups,
            "CLUSTER": self.cluster,
            "STAGES": self.stages(form),
            "PARTS_BYTES": self.parts_bytes,
            "INTEGERS": 0,
            "WARPGROUP": 1,
            "SETS": self.sets(form),
        }

    def products(self, form: Form) -> str:
        return warpgroup_mma(self.rows, half=form.half, integers=False)


def _groups(form: Form) -> int:
    """Of a chunk."""
    return STAGE_INNER // SHORT_GROUP if form.group == SHORT_GROUP else 1


def _line_bytes(form: Form) -> int:
    """Of a row's codes in a chunk."""
    return STAGE_INNER if form.kind == "int8" else STAGE_INNER // 2


def takes(form: Form) -> bool:
    """Whether the kernel multiplies with weights of a form."""
    return form.ordered


def candidates(form: Form, columns: int, inner: int, rows: int, sms: int) -> Iterator[Ordered]:
    """Tunings that can be for a weight of `columns` output and `inner` input features and so many rows."""
    sizes = [n for n in (8, 16, 32, 64) if rows <= n][:1] or ([64, 128] if form.group == SHORT_GROUP else [128])
    chunks = inner // STAGE_INNER
    for tile, tiles, cluster in itertools.product(sizes, (4, 2, 1), _JOIN_COST):
        warpgroups = 4 if tile <= 32 else 2
        if tiles > warpgroups:
            continue
        tuning = Ordered(tile, tiles, warpgroups, cluster)
        shares, items = cluster * tuning.split, tuning.items(rows, columns)
        # A cluster has one tile: its copying threads must have ended when its blocks meet.
        whole = shares == 1 or chunks % shares == 0
        if tuning.stages(form) >= 3 and chunks >= shares and whole and (cluster == 1 or items <= sms // cluster):
            yield tuning


@functools.cache
def choice(form: Form, columns: int, inner: int, rows: int, sms: int) -> Ordered | None:
    """What multiplies so many rows; None: there are more than are well served.

    The cheapest by a model of the cycles it takes; its numbers are what tilings of the layers of an 8B model take on an H200.
    """
    if not 0 < rows <= MOST_ROWS:
        return None

    def cost(tuning: Ordered) -> float:
        stages, items = -(-(inner // STAGE_INNER) // (tuning.cluster * tuning.split)), tuning.items(rows, columns)
        at_once = sms // tuning.cluster
        bytes_of_all = min(items, at_once) * tuning.cluster * tuning.stage_bytes(form)
        chunk = (_CHUNK_COST if _groups(form) == 1 else _SHORT_CHUNK_COST)[tuning.rows]
        stage = max(tuning.warpgroups * chunk, bytes_of_all / (sms * _BYTES_A_CYCLE))
        return -(-items // at_once) * stages * stage + _JOIN_COST[tuning.cluster]

    return min(candidates(form, columns, inner, rows, sms), key=cost, default=None)


_CHUNK_COST = {8: 250.0, 16: 280.0, 32: 325.0, 64: 500.0, 128: 700.0}
_SHORT_CHUNK_COST = {8: 270.0, 16: 300.0, 32: 325.0, 64: 700.0, 128: 1100.0}
"""Cycles of an SM that 64 rows of 128 codes take, by rows of x, with enough of them under way; where groups have sums of their own."""
_BYTES_A_CYCLE = 34.0
"""That an SM gets, from memory or the L2 cache, while all ask."""
_JOIN_COST = {1: 0.0, 2: 4500.0}
"""Cycles that clusters of so many blocks take longer to start, to meet and to add up their parts. Larger ones take twice as long as
all else: they wait for as many free SMs side by side."""


def boxes_of(x: torch.Tensor, weight: LowBit | OffsetWeight, form: Form, tuning: Ordered) -> tuple[Boxes, ...]:
    """What is copied at once: lines of 64 elements of x; codes of 128 inner elements; scales, and zero points or offsets, of short groups."""
    lines, words = x.shape[1] // _LINE_ELEMENTS, _LINE_ELEMENTS // 2
    strides = x.stride(0) * 2, _LINE_ELEMENTS * 2
    of_x = Boxes(x.data_ptr(), (words, len(x), lines), strides, (words, tuning.rows, 2 * tuning.split), exchanged=True)
    line = _line_bytes(form)
    shape = (line // 4, weight.out_features, x.shape[1] // STAGE_INNER)
    box = (line // 4, tuning.columns, tuning.split)
    strides = weight.data.stride(0), line
    of_w = Boxes(weight.data.data_ptr(), shape, strides, box, exchanged=True, halved=line < 2 * _LINE_ELEMENTS)
    if _groups(form) == 1:
        return of_x, of_w, of_w, of_w  # the kernel has others copied by their addresses
    layout = low_bit_layout(weight)
    zeros = layout.zeros if layout.offsets is None else layout.offsets
    scales = _boxes_of_groups(layout.scales, form, tuning)
    return of_x, of_w, scales, scales if zeros is None else _boxes_of_groups(zeros, form, tuning)


def _boxes_of_groups(numbers: torch.Tensor | None, form: Form, tuning: Ordered) -> Boxes:
    """[groups, columns], those of a stage at once."""
    assert numbers is not None
    size = numbers.element_size()
    shape, line = (numbers.shape[1] * size // 4, len(numbers), 1), numbers.stride(0) * size
    return Boxes(numbers.data_ptr(), shape, (line, line * len(numbers)), (tuning.columns * size // 4, _groups(form) * tuning.split, 1))


def grid_of(rows: int, columns: int, tuning: Ordered, sms: int) -> tuple[int, int, int]:
    items = tuning.items(rows, columns)
    assert tuning.cluster == 1 or items <= sms // tuning.cluster
    return (min(items, sms // tuning.cluster) * tuning.cluster, 1, 1)


def prepare(form: Form, tuning: Ordered, device: torch.device) -> None:
    """Begin to compile what `multiply` will launch."""
    prepare_program(Program(form, tuning), device)
    if form.offsets:
        prepare_program(tuning.sums.program(half=form.half), device)


def arguments_of_sums(x: torch.Tensor, images: torch.Tensor) -> InputsArguments:
    return InputsArguments(x.data_ptr(), images.data_ptr(), 0, *x.shape, x.stride(0) * x.element_size(), images.shape[1])


def multiply(x: torch.Tensor, weight: LowBit | OffsetWeight, bias: torch.Tensor | None, form: Form, tuning: Ordered) -> torch.Tensor:
    """x @ weight.T + bias. The weight is complete: see `ops.registry.Linear`.

    Args:
        x: [rows, inputs as they are stored], bf16 or fp16; rows contiguous, each at a multiple of 16 bytes.
        bias: [out_features] of x's dtype.
        form: `form_of` the weight.

    Returns:
        [rows, out_features] in x's dtype.
    """
    out = torch.empty(len(x), weight.out_features, dtype=x.dtype, device=x.device)
    sums = None
    if form.offsets:
        sums = tuning.sums.images(len(x), x.shape[1], x.device)
        grid = tuning.sums.grid(*x.shape)
        kernel(tuning.sums.program(half=form.half), x.device).launch(grid, arguments_of_sums(x, sums))
    packed = arguments(x, sums, weight, low_bit_layout(weight), bias, out, None)
    grid = grid_of(len(x), weight.out_features, tuning, sm_count(x.device))
    kernel(Program(form, tuning), x.device).launch(grid, packed, *map(tensor_map, boxes_of(x, weight, form, tuning)))
    return out


@overload
def ordered(weight: LowBit) -> LowBit: ...


@overload
def ordered(weight: LowBit | OffsetWeight) -> LowBit | OffsetWeight: ...


def ordered(weight: LowBit | OffsetWeight) -> LowBit | OffsetWeight:
    """A weight with its codes in order, where the kernel takes it so; others as they are."""
    if isinstance(weight, OffsetWeight):
        codes = ordered(weight.codes)
        assert isinstance(codes, (Int4Weight, Int8Weight))
        return dataclasses.replace(weight, codes=codes)
    layout = low_bit_layout(weight)
    if not isinstance(weight, (Int4Weight, Int8Weight)) or weight.ordered or layout.inner % STAGE_INNER or weight.out_features % 16:
        return weight
    if isinstance(weight, Int8Weight):
        takes_it = layout.group == SHORT_GROUP and weight.zeros is None and weight.activations.kind == "float"
        return dataclasses.replace(weight, data=bytes_in_order(weight.data), ordered=True) if takes_it else weight
    if layout.group % STAGE_INNER and layout.group != SHORT_GROUP:
        return weight
    return dataclasses.replace(weight, data=in_order(weight.data), ordered=True)
