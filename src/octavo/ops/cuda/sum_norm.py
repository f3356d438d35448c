"""Sum over GPUs, addition to the residual stream and RMSNorm in one kernel, `kernels/sum_norm.cu`, which also says how GPUs pass rows on.

Here: what is compiled, how the memory is laid out in which a GPU is sent rows, and the launch. Who the GPUs are, and whether they do this
at all, is `octavo.parallel.fused_sums`.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.ops.cuda.compiled import kernel
from octavo.ops.triton.launch import sm_count

_SOURCES = Path(__file__).parent / "kernels"
PIECE = 16
"""Bytes that a thread has at a time."""
_THREADS_AN_SM = 1024
"""That wait on an SM: half of what it has room for, so that registers are no matter."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_THREADS = 1024
MOST_PIECES = 4096
"""Of a row."""


@dataclass(frozen=True)
class Form:
    """What the compiler must know: one kernel each."""

    dtype: torch.dtype
    dim: int
    """Numbers in a row."""
    ranks: int
    words: bool
    """Each four bytes travel with their row's epoch, instead of a flag behind the row."""
    two_shots: bool

    name, shared_bytes, cluster = "sum_norm", 256, 1

    @property
    def pieces(self) -> int:
        return self.dim * self.dtype.itemsize // PIECE

    @property
    def vectors(self) -> int:
        """Pieces of a thread."""
        return -(-self.pieces // MOST_THREADS)

    @property
    def threads(self) -> int:
        return -(-self.pieces // (32 * self.vectors)) * 32

    @property
    def blocks_an_sm(self) -> int:
        return max(1, _THREADS_AN_SM // self.threads)

    @property
    def slot_bytes(self) -> int:
        """Of a row."""
        return self.pieces * PIECE * (2 if self.words else 1)

    def definitions(self) -> dict[str, int]:
        return {
            "HALF": self.dtype == torch.float16,
            "FLOAT32": self.dtype == torch.float32,
            "WARPGROUP": 0,
            "DIM": self.dim,
            "RANKS": self.ranks,
            "WORDS": self.words,
            "TWO_SHOTS": self.two_shots,
            "VECTORS": self.vectors,
            "THREADS": self.threads,
            "BLOCKS_A_SM": self.blocks_an_sm,
        }

    def device_source(self) -> str:
        return source(self, (_SOURCES / "simt.h").read_text())


def takes(dtype: torch.dtype, dim: int) -> bool:
    """Whether rows are whole pieces, and not too many of them."""
    return dtype in DTYPES and dim * dtype.itemsize % PIECE == 0 and dim * dtype.itemsize <= MOST_PIECES * PIECE


@dataclass(frozen=True)
class Region:
    """Where a way of passing rows on has its slots: for two epochs, each sender, and so many rows; behind them flags."""

    begin: int
    """Bytes from the beginning of the memory."""
    slot_bytes: int
    ranks: int
    rows: int

    @property
    def flags_at(self) -> int:
        return 2 * self.ranks * self.rows * self.slot_bytes

    @property
    def end(self) -> int:
        flags = 2 * self.ranks * self.rows * 4
        return self.begin + self.flags_at + -(-flags // 128) * 128


def arguments(form: Form) -> type[ctypes.Structure]:
    """`Args` of the kernel."""
    return _arguments(form.ranks)


@functools.cache
def _arguments(ranks: int) -> type[ctypes.Structure]:
    pointer, whole = ctypes.c_void_p, ctypes.c_int
    fields = [
        *((name, pointer) for name in ("x", "residual", "weight", "out")),
        ("slots", pointer * ranks),
        *((name, pointer) for name in ("own", "epochs", "missing")),
        *((name, ctypes.c_uint64) for name in ("flags_at", "patience")),
        ("eps", ctypes.c_float),
        *((name, whole) for name in ("rank", "rows", "capacity", "early", "x_stride", "residual_stride", "out_stride")),
    ]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


@dataclass(frozen=True)
class Place:
    """A rank's view of what the GPUs share."""

    rank: int
    memory: tuple[int, ...]
    """Addresses, as this process sees them, of the memory in which each rank is sent rows."""
    epochs: torch.Tensor
    """[1 + rows] int32 on this GPU: whether a rank has been given up, then the rows' epochs."""
    missing: torch.Tensor
    """[1] int32 that host and GPU see: 1 + the rank that has been given up."""


def packed(
    form: Form,
    region: Region,
    place: Place,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    patience: float,
    *,
    early: bool,
) -> ctypes.Structure:
    size = x.element_size()
    return arguments(form)(
        x=x.data_ptr(),
        residual=residual.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        slots=(ctypes.c_void_p * form.ranks)(*(address + region.begin for address in place.memory)),
        own=place.memory[place.rank] + region.begin,
        epochs=place.epochs.data_ptr() + 4,
        missing=place.missing.data_ptr(),
        flags_at=region.flags_at,
        patience=int(patience * 1e9),
        eps=eps,
        rank=place.rank,
        rows=len(x),
        capacity=region.rows,
        early=int(early),
        x_stride=x.stride(0) * size,
        residual_stride=residual.stride(0) * size,
        out_stride=out.stride(0) * size,
    )


def source(form: Form, machine: str) -> str:
    """The program of one kernel; `machine` is the text of `simt.h`."""
    lines = [f"#define {name} {int(value)}" for name, value in form.definitions().items()]
    return "\n".join([*lines, machine, (_SOURCES / "sum_norm.cu").read_text()])


def grid_of(form: Form, rows: int, sms: int) -> tuple[int, int, int]:
    """All blocks are there at once: they wait for each other."""
    return (min(rows, sms * form.blocks_an_sm), 1, 1)


def launch(form: Form, device: torch.device, arguments: ctypes.Structure, rows: int) -> None:
    """For `packed` arguments."""
    kernel(form, device).launch(grid_of(form, rows, sm_count(device)), arguments)
