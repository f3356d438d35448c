"""The CUDA C++ kernels on a CPU: compiled by the machine's C++ compiler, with the threads of a block taking turns."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from octavo.ops.cuda import dense, ordered
from octavo.ops.cuda.launch import Boxes
from octavo.ops.cuda.low_bit import Form, Images, Tiles, Tuning, arguments, boxes_of, grid_of, source, workspace_size
from octavo.ops.packed import OffsetWeight
from octavo.ops.triton.low_bit_matmul import LowBit, low_bit_layout
from octavo.ops.triton.skinny_matmul import SkinnyWorkspace

MACHINE = Path(__file__).parent / "simt" / "simt.h"
_SMS = 3
COMPILER = shutil.which("g++") or shutil.which("clang++")


class Map(ctypes.Structure):
    """`Map` of `simt/simt.h`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64 * 5) for name in ("shape", "strides", "box")),
        ("exchanged", ctypes.c_int32),
    ]

    @classmethod
    def of(cls, boxes: Boxes) -> Map:
        def five(*numbers: int) -> ctypes.Array[ctypes.c_int64]:
            return (ctypes.c_int64 * 5)(*numbers, *[1] * (5 - len(numbers)))

        return cls(boxes.address, five(*boxes.shape), five(4, *boxes.strides), five(*boxes.box), boxes.exchanged + boxes.halved)


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="octavo-simt-"))


@functools.cache
def _not_by_chance() -> tuple[str, ...]:
    """Variables that nothing was stored in hold numbers that would show, where the compiler can do that."""
    assert COMPILER is not None
    flag = "-ftrivial-auto-var-init=pattern"
    tried = subprocess.run([COMPILER, flag, "-x", "c++", "-fsyntax-only", os.devnull], check=False, capture_output=True, timeout=60)
    return () if tried.returncode else (flag,)


@functools.cache
def emulated(text: str, kernel: str, maps: int, kind: str = "Args", copy: int = 0) -> Callable[..., None]:
    """A kernel of `text`, which takes a `kind` and so many tensor maps: a function of (that, maps..., x, y, z), the grid's size.

    Args:
        copy: those with different numbers may run at the same time, as on GPUs of their own.
    """
    assert COMPILER is not None
    names = [f"map{i}" for i in range(maps)]
    end = f"""
extern "C" void run(const {kind}* p, {"".join(f"const Map* {name}, " for name in names)}int x, int y, int z) {{
  run_blocks(BLOCK_THREADS, x, y, z, [=] {{ {kernel}({", ".join(f"*{name}" for name in ["p", *names])}); }});
}}
"""
    place = _folder() / f"{hashlib.sha256((text + end).encode()).hexdigest()[:16]}"
    place.with_suffix(".cpp").write_text(text + end)
    first, own = place.with_suffix(".so"), place.with_suffix(f".{copy}.so")
    if not first.exists():
        command = [COMPILER, "-std=c++17", "-O1", "-w", *_not_by_chance(), "-shared", "-fPIC", "-o", str(first), f"{place}.cpp"]
        subprocess.run(command, check=True, timeout=120)
    shutil.copyfile(first, own)
    run = ctypes.CDLL(str(own)).run

    def call(arguments: ctypes.Structure, *boxes_and_grid: Boxes | int) -> None:
        described = [ctypes.byref(Map.of(x)) if isinstance(x, Boxes) else x for x in boxes_and_grid]
        run(ctypes.byref(arguments), *described)

    return call


def emulate(x: torch.Tensor, weight: LowBit | OffsetWeight, bias: torch.Tensor | None, form: Form, tuning: Tuning) -> torch.Tensor:
    """As `octavo.ops.cuda.low_bit.multiply`."""
    form = form.read_by(tuning)
    out = torch.full((len(x), weight.out_features), torch.nan, dtype=x.dtype)
    layout = low_bit_layout(weight)
    rows, columns, inner = len(x), weight.out_features, layout.inner
    elements, counters = workspace_size(rows, columns, inner, tuning, _SMS)
    workspace = SkinnyWorkspace.allocate(elements, counters, x.device) if elements else None
    images = None
    if isinstance(tuning, Tiles):
        images = Images.allocate(rows, inner, form, tuning.inputs, x.device)
        images.images.fill_(0xFF)
        order = emulated(source(form, tuning.inputs, inner, MACHINE.read_text()), tuning.inputs.name, 0, kind="Inputs")
        order(images.arguments(x, inner), rows, 1, 1)
    run = emulated(source(form, tuning, inner, MACHINE.read_text()), tuning.name, 1)
    packed = arguments(x, images, weight, layout, bias, out, workspace)
    run(packed, boxes_of(weight, form, tuning, inner), *grid_of(rows, columns, inner, tuning, _SMS))
    assert workspace is None or not workspace.counters.any()
    return out


def emulate_ordered(
    x: torch.Tensor, weight: LowBit | OffsetWeight, bias: torch.Tensor | None, form: Form, tuning: ordered.Ordered
) -> torch.Tensor:
    """As `octavo.ops.cuda.ordered.multiply`."""
    out = torch.full((len(x), weight.out_features), torch.nan, dtype=x.dtype)
    run = emulated(source(form, tuning, 0, MACHINE.read_text()), tuning.name, 4)
    sums = None
    if form.offsets:
        sums = tuning.sums.images(len(x), x.shape[1], x.device).fill_(0xFF)
        program = tuning.sums.program(half=form.half)
        add_up = emulated(source(program.form, tuning.sums, 0, MACHINE.read_text()), tuning.sums.name, 0, kind="Inputs")
        add_up(ordered.arguments_of_sums(x, sums), *tuning.sums.grid(*x.shape))
    packed = arguments(x, sums, weight, low_bit_layout(weight), bias, out, None)
    sms = (_SMS if tuning.cluster == 1 else 64) * tuning.cluster
    run(packed, *ordered.boxes_of(x, weight, form, tuning), *ordered.grid_of(len(x), weight.out_features, tuning, sms))
    return out


def emulate_dense(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    form: dense.Form,
    tuning: dense.Tuning,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """As `octavo.ops.cuda.dense.multiply`."""
    out = torch.full((len(x), len(weight)), torch.nan, dtype=torch.float16 if form.half else torch.bfloat16)
    elements, tiles = dense.workspace_size(len(weight), tuning)
    workspace = SkinnyWorkspace.allocate(elements, tiles, x.device) if elements else None
    run = emulated(dense.source(form, tuning, MACHINE.read_text()), dense.Program.name, 2)
    boxes = dense.boxes_of(x, tuning.rows, tuning.depth), dense.boxes_of(weight, tuning.columns, tuning.depth)
    run(dense.arguments(len(x), weight, form, bias, out, workspace, scales), *boxes, *dense.grid_of(len(weight), tuning, _SMS))
    assert workspace is None or not workspace.counters.any()
    return out
