"""How kernels follow each other on the device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

PREFERRED_CARVEOUT = 9
"""The driver's CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent."""
EMULATED_SMS = 8
"""Where there is no GPU, for the interpreter."""


@functools.cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else EMULATED_SMS


@functools.cache
def overlap_supported(device: torch.device) -> bool:
    """Whether a kernel can be set up while the one before it still runs (programmatic dependent launch, Hopper on).

    Every kernel that is launched so waits before it touches what earlier kernels wrote. Most let the next one start only then
    (`gdc_launch_dependents` behind `gdc_wait`); those between two products at once (`turns.EARLY`). So whatever a kernel reads before its
    wait must be at least three kernels old, or known to be in memory: weights are, once they are loaded (`ops.registry.Linear`).
    """
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


_compiling = threading.Event()


def compiles_only() -> bool:
    """Whether kernels are compiled instead of launched: see `compiling_only`."""
    return _compiling.is_set()


@contextlib.contextmanager
def compiling_only(threads: int) -> Iterator[None]:
    """In this context, kernels are compiled instead of launched, on several threads at once; leaving it waits for the last of them.

    Whatever else is computed meanwhile works on memory that no kernel has written. One thread at a time may be inside.
    """

    def compile_only(kernel: Any, grid: Any) -> Any:
        return functools.partial(kernel.run, grid=grid, warmup=True)

    with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool):
        JITFunction.__getitem__ = compile_only  # shadows what the class inherits
        _compiling.set()
        try:
            yield
        finally:
            _compiling.clear()
            del JITFunction.__getitem__


@functools.cache
def prefer_shared_memory() -> None:
    """Have all Triton kernels loaded from now on ask for the largest part of an SM's memory as shared memory, the rest is L1 cache.

    An SM is divided anew only when it is empty. A kernel that wants another division than its neighbour starts after that one has
    drained, however early it was launched; with one division for all they overlap. Ours stream, and miss no L1 cache.
    """
    if torch.version.cuda is None or not torch.cuda.is_available():
        return
    driver = ctypes.CDLL("libcuda.so.1")

    def loaded(_module: object, function: int, *_: object) -> None:
        driver.cuFuncSetAttribute(ctypes.c_void_p(function), PREFERRED_CARVEOUT, 100)

    triton.knobs.runtime.kernel_load_end_hook.add(loaded)
