"""CUDA C++ to machine code by NVRTC, the compiler that torch brings along; kept on disk from one start to the next."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from octavo.config.home import octavo_home

logger = logging.getLogger(__name__)


class CompilerError(RuntimeError):
    """The compiler refused a kernel; the message is its log."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """NVRTC of the CUDA version that torch was built for; None where there is none."""
    if torch.version.cuda is None:
        return None
    major = torch.version.cuda.split(".")[0]
    site = Path(torch.__file__).parents[1] / "nvidia"
    places = [
        f"libnvrtc.so.{major}",
        *map(str, sorted(site.glob(f"*/lib/libnvrtc.so.{major}"))),
        f"/usr/local/cuda/lib64/libnvrtc.so.{major}",
    ]
    for place in places:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(place)
    logger.warning(
        "The CUDA compiler NVRTC (libnvrtc.so.%s), which PyTorch's packages bring along, was not found: slower kernels attend and "
        "multiply low-bit weights. `pip install nvidia-cuda-nvrtc` installs it.",
        major,
    )
    return None


@functools.cache
def architecture(device: torch.device) -> str | None:
    """What to compile for; None where the kernels of `ops.cuda` cannot run."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    return "sm_90a" if library() is not None else None


_POOL = ThreadPoolExecutor(8, thread_name_prefix="nvrtc")


def in_background(source: str, device: torch.device) -> Future[bytes]:
    """`compile_kernel` for a device that has an `architecture`, on a thread."""
    target = architecture(device)
    assert target is not None
    return _POOL.submit(compile_kernel, source, target)


def compile_kernel(source: str, architecture: str) -> bytes:
    """Machine code (a cubin) of `source` for an architecture such as "sm_90a". Threads may compile side by side.

    Raises:
        CompilerError: with the compiler's messages.
    """
    nvrtc = library()
    if nvrtc is None:
        raise CompilerError("There is no NVRTC to compile with.")
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = hashlib.sha256(f"{major.value}.{minor.value} {architecture}\n{source}".encode()).hexdigest()
    place = octavo_home() / "kernels" / f"{key[:32]}.cubin"
    with contextlib.suppress(OSError):
        return place.read_bytes()
    code = _compiled(nvrtc, source, architecture)
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, place)
    return code


def _compiled(nvrtc: ctypes.CDLL, source: str, architecture: str) -> bytes:
    program = ctypes.c_void_p()
    if status := nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None):
        raise CompilerError(f"NVRTC does not start: status {status}.")
    try:
        options = [b"--std=c++17", f"--gpu-architecture={architecture}".encode()]
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if status:
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompilerError(log.value.decode(errors="replace"))
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
