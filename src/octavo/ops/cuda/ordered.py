"""Products of 5 to 256 rows with 4-bit weights whose codes lie as the tensor cores take them (`Int4Weight.ordered`): `kernels/ordered.cu`.

x is multiplied as it lies, so no kernel has to put it in order; one block has all of the inner dimension, or the blocks of a cluster
share it and add up their parts from each other's shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from octavo.ops.cuda.compiled import kernel
from octavo.ops.cuda.launch import Boxes, tensor_map
from octavo.ops.cuda.low_bit import SHARED_BYTES, STAGE_INNER, Form, Program, arguments, warpgroup_mma
from octavo.ops.packed import Int4Weight
from octavo.ops.reference.low_bit import in_order
from octavo.ops.triton.launch import sm_count
from octavo.ops.triton.low_bit_matmul import LowBit, low_bit_layout

MOST_ROWS = 256
_LINE_ELEMENTS = 64
"""Of x, in a line of 128 bytes."""


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

    def stage_bytes(self, form: Form) -> int:
        groups = 0 if not form.group else (4 if form.scale_type == 0 else 2) + form.zeros
        stage = self.split * (STAGE_INNER * 2 * self.rows + self.columns * (form.width + groups))
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
        }

    def products(self, form: Form) -> str:
        return warpgroup_mma(self.rows, half=form.half, integers=False)


def takes(form: Form) -> bool:
    """Whether the kernel multiplies with weights of a form."""
    return form.kind == "int4" and form.ordered


def candidates(form: Form, columns: int, inner: int, rows: int, sms: int) -> Iterator[Ordered]:
    """Tunings that can be for a weight of `columns` output and `inner` input features and so many rows."""
    tile = next((n for n in (8, 16, 32, 64) if rows <= n), 128)
    chunks, warpgroups = inner // STAGE_INNER, 4 if tile <= 32 else 2
    for tiles, cluster in itertools.product((4, 2, 1), _JOIN_COST):
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
        stage = max(tuning.warpgroups * _CHUNK_COST[tuning.rows], bytes_of_all / (sms * _BYTES_A_CYCLE))
        return -(-items // at_once) * stages * stage + _JOIN_COST[tuning.cluster]

    return min(candidates(form, columns, inner, rows, sms), key=cost, default=None)


_CHUNK_COST = {8: 250.0, 16: 280.0, 32: 325.0, 64: 500.0, 128: 700.0}
"""Cycles of an SM that 64 rows of 128 codes take, by rows of x, with enough of them under way."""
_BYTES_A_CYCLE = 34.0
"""That an SM gets, from memory or the L2 cache, while all ask."""
_JOIN_COST = {1: 0.0, 2: 4500.0}
"""Cycles that clusters of so many blocks take longer to start, to meet and to add up their parts. Larger ones take twice as long as
all else: they wait for as many free SMs side by side."""


def boxes_of(x: torch.Tensor, weight: LowBit, form: Form, tuning: Ordered) -> tuple[Boxes, Boxes]:
    """What of x and of the weight is copied at once: lines of 64 elements of x, codes of 128 inner elements."""
    lines, words = x.shape[1] // _LINE_ELEMENTS, _LINE_ELEMENTS // 2
    strides = x.stride(0) * 2, _LINE_ELEMENTS * 2
    of_x = Boxes(x.data_ptr(), (words, len(x), lines), strides, (words, tuning.rows, 2 * tuning.split), exchanged=True)
    shape = (form.width // 4, weight.out_features, x.shape[1] // STAGE_INNER)
    box = (form.width // 4, tuning.columns, tuning.split)
    strides = weight.data.stride(0), form.width
    return of_x, Boxes(weight.data.data_ptr(), shape, strides, box, exchanged=True, halved=True)


def grid_of(rows: int, columns: int, tuning: Ordered, sms: int) -> tuple[int, int, int]:
    items = tuning.items(rows, columns)
    assert tuning.cluster == 1 or items <= sms // tuning.cluster
    return (min(items, sms // tuning.cluster) * tuning.cluster, 1, 1)


def multiply(x: torch.Tensor, weight: LowBit, bias: torch.Tensor | None, form: Form, tuning: Ordered) -> torch.Tensor:
    """x @ weight.T + bias. The weight is complete: see `ops.registry.Linear`.

    Args:
        x: [rows, inputs as they are stored], bf16 or fp16; rows contiguous, each at a multiple of 16 bytes.
        bias: [out_features] of x's dtype.
        form: `form_of` the weight.

    Returns:
        [rows, out_features] in x's dtype.
    """
    out = torch.empty(len(x), weight.out_features, dtype=x.dtype, device=x.device)
    packed = arguments(x, None, weight, low_bit_layout(weight), bias, out, None)
    grid = grid_of(len(x), weight.out_features, tuning, sm_count(x.device))
    kernel(Program(form, tuning), x.device).launch(grid, packed, *map(tensor_map, boxes_of(x, weight, form, tuning)))
    return out


def ordered(weight: LowBit) -> LowBit:
    """A weight of 4-bit codes with these in order, where the kernel takes it so; others as they are."""
    layout = low_bit_layout(weight)
    whole = layout.inner % STAGE_INNER == 0 and layout.group % STAGE_INNER == 0
    if not isinstance(weight, Int4Weight) or weight.ordered or not whole or weight.out_features % 16:
        return weight
    return dataclasses.replace(weight, data=in_order(weight.data), ordered=True)
