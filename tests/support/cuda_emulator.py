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

from octavo.ops.cuda.low_bit import Arguments, Form, Tuning, arguments, box_of, grid_of, source, workspace_size
from octavo.ops.triton.low_bit_matmul import LowBit, low_bit_layout
from octavo.ops.triton.skinny_matmul import SkinnyWorkspace

MACHINE = Path(__file__).parent / "simt" / "simt.h"
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
def _library(form: Form, tuning: Tuning, inner: int) -> ctypes.CDLL:
    assert COMPILER is not None
    end = f"""
extern "C" void run(const Args* p, const Map* map, int x, int y, int z) {{
  run_blocks(BLOCK_THREADS, x, y, z, [=] {{ {tuning.name}(*p, *map); }});
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
    elements, tiles = workspace_size(len(x), weight.out_features, tuning)
    workspace = SkinnyWorkspace.allocate(elements, tiles, x.device) if elements else None
    layout = low_bit_layout(weight)
    packed: Arguments = arguments(x, weight, layout, bias, out, workspace)
    box = Map(*vars(box_of(weight, form, tuning, layout.inner)).values())
    _library(form, tuning, layout.inner).run(ctypes.byref(packed), ctypes.byref(box), *grid_of(len(x), weight.out_features, tuning, 3))
    assert workspace is None or not workspace.counters.any()
    return out
