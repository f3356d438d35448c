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

from octavo.ops.cuda.low_bit import Form, Images, Inputs, Tiles, Tuning, arguments, box_of, grid_of, source, workspace_size
from octavo.ops.triton.low_bit_matmul import LowBit, low_bit_layout
from octavo.ops.triton.skinny_matmul import SkinnyWorkspace

MACHINE = Path(__file__).parent / "simt" / "simt.h"
_SMS = 3
COMPILER = shutil.which("g++") or shutil.which("clang++")


class Map(ctypes.Structure):
    """`Map` of `simt/simt.h`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rows", "chunks", "width", "box_rows", "box_chunks")),
    ]


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="octavo-simt-"))


@functools.cache
def _library(form: Form, tuning: Tuning | Inputs, inner: int) -> ctypes.CDLL:
    assert COMPILER is not None
    kind, call = ("Inputs", "*p") if isinstance(tuning, Inputs) else ("Args", "*p, *map")
    end = f"""
extern "C" void run(const {kind}* p, const Map* map, int x, int y, int z) {{
  run_blocks(BLOCK_THREADS, x, y, z, [=] {{ {tuning.name}({call}); }});
}}
"""
    text = source(form, tuning, inner, MACHINE.read_text()) + end
    place = _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    place.with_suffix(".cpp").write_text(text)
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", f"{place}.so", f"{place}.cpp"]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(f"{place}.so")


def emulate(x: torch.Tensor, weight: LowBit, bias: torch.Tensor | None, form: Form, tuning: Tuning) -> torch.Tensor:
    """As `octavo.ops.cuda.low_bit.multiply`."""
    out = torch.full((len(x), weight.out_features), torch.nan, dtype=x.dtype)
    layout = low_bit_layout(weight)
    rows, columns, inner = len(x), weight.out_features, layout.inner
    elements, counters = workspace_size(rows, columns, inner, tuning, _SMS)
    workspace = SkinnyWorkspace.allocate(elements, counters, x.device) if elements else None
    images = None
    if isinstance(tuning, Tiles):
        images = Images.allocate(rows, inner, form, tuning.inputs, x.device)
        images.images.fill_(0xFF)
        _library(form, tuning.inputs, inner).run(ctypes.byref(images.arguments(x, inner)), None, rows, 1, 1)
    packed = arguments(x, images, weight, layout, bias, out, workspace)
    box = Map(*vars(box_of(weight, form, tuning, inner)).values())
    _library(form, tuning, inner).run(ctypes.byref(packed), ctypes.byref(box), *grid_of(rows, columns, inner, tuning, _SMS))
    assert workspace is None or not workspace.counters.any()
    return out
