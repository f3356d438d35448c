"""The CUDA C++ kernels on a CPU: compiled by the machine's C++ compiler, with the threads of a block taking turns."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from octavo.ops.cuda import dense
from octavo.ops.cuda.low_bit import Arguments, Box, Form, Tuning, arguments, box_of, grid_of, source, workspace_size
from octavo.ops.triton.low_bit_matmul import LowBit, low_bit_layout
from octavo.ops.triton.skinny_matmul import SkinnyWorkspace

MACHINE = Path(__file__).parent / "simt" / "simt.h"
COMPILER = shutil.which("g++") or shutil.which("clang++")


class Map(ctypes.Structure):
    """`Map` of `simt/simt.h`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rows", "chunks", "width", "box_rows", "box_chunks", "swizzled")),
    ]


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="octavo-simt-"))


@functools.cache
def _library(text: str) -> ctypes.CDLL:
    assert COMPILER is not None
    place = _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    place.with_suffix(".cpp").write_text(text)
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", f"{place}.so", f"{place}.cpp"]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(f"{place}.so")


def emulate(x: torch.Tensor, weight: LowBit, bias: torch.Tensor | None, form: Form, tuning: Tuning) -> torch.Tensor:
    """As `octavo.ops.cuda.low_bit.multiply`."""
    out = torch.full((len(x), weight.out_features), torch.nan, dtype=x.dtype)
    elements, tiles = workspace_size(len(x), weight.out_features, tuning)
    workspace = SkinnyWorkspace.allocate(elements, tiles, x.device) if elements else None
    layout = low_bit_layout(weight)
    packed: Arguments = arguments(x, weight, layout, bias, out, workspace)
    text = source(form, tuning, layout.inner, MACHINE.read_text()) + _entry(tuning.name, "*a")
    box = _map(box_of(weight, form, tuning, layout.inner))
    _library(text).run(ctypes.byref(packed), ctypes.byref(box), None, *grid_of(len(x), weight.out_features, tuning, 3))
    assert workspace is None or not workspace.counters.any()
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
    packed = dense.arguments(len(x), weight, form, bias, out, workspace, scales)
    text = dense.source(form, tuning, MACHINE.read_text()) + _entry(tuning.name, "*a, *b")
    boxes = [_map(dense.box_of(m, rows, tuning.depth), swizzled=True) for m, rows in ((x, tuning.rows), (weight, tuning.columns))]
    _library(text).run(ctypes.byref(packed), *map(ctypes.byref, boxes), *dense.grid_of(len(weight), tuning, 3))
    assert workspace is None or not workspace.counters.any()
    return out


def _entry(name: str, maps: str) -> str:
    return f"""
extern "C" void run(const Args* p, const Map* a, const Map* b, int x, int y, int z) {{
  run_blocks(BLOCK_THREADS, x, y, z, [=] {{ {name}(*p, {maps}); }});
}}
"""


def _map(box: Box, *, swizzled: bool = False) -> Map:
    return Map(*vars(box).values(), swizzled)
