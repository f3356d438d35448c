"""Compiled kernels on the device: loaded once, launched on torch's stream, the next kernel set up while they run."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from octavo.ops.triton.launch import PREFERRED_CARVEOUT

_MAX_DYNAMIC_SHARED = 8
_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_UINT32 = 2
_SWIZZLE_64_BYTES, _SWIZZLE_128_BYTES = 2, 3
_PROMOTE_TO_256_BYTES = 3
"""Numbers of the driver's CUfunction_attribute, CUlaunchAttributeID, CUtensorMapDataType, CUtensorMapSwizzle and
CUtensorMapL2promotion."""


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and 64 bytes of which these use the first four or twelve."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 3), ("rest", ctypes.c_char * 52)]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class TensorMap(ctypes.Structure):
    """CUtensorMap, to be passed by value."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


class LaunchError(RuntimeError):
    """The driver refused a kernel."""


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise LaunchError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")


@dataclass(frozen=True)
class Boxes:
    """How the copy engine finds boxes of a tensor of 4-byte elements."""

    address: int
    shape: tuple[int, ...]
    """Elements, the contiguous dimension first."""
    strides: tuple[int, ...]
    """Bytes, of all dimensions but the first; multiples of 16."""
    box: tuple[int, ...]
    """Elements that are copied at once."""
    exchanged: bool = False
    """Lines of 128 bytes, their 16-byte pieces exchanged by the line's number modulo 8 (by address: boxes go to multiples of 1024)."""
    halved: bool = False
    """Then lines of 64 bytes, their pieces exchanged by half the line's number modulo 4."""
    promoted: bool = True
    """Whether L2 fetches 256 bytes where fewer are asked for."""


@functools.lru_cache(8192)
def tensor_map(boxes: Boxes) -> TensorMap:
    """The driver's description of `boxes`."""
    rank = len(boxes.shape)
    room = (ctypes.c_uint64 * 24)()
    at = (ctypes.addressof(room) + 63) // 64 * 64  # the driver writes to multiples of 64
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        _UINT32,
        ctypes.c_uint(rank),
        ctypes.c_void_p(boxes.address),
        (ctypes.c_uint64 * rank)(*boxes.shape),
        (ctypes.c_uint64 * (rank - 1))(*boxes.strides),
        (ctypes.c_uint32 * rank)(*boxes.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        (_SWIZZLE_64_BYTES if boxes.halved else _SWIZZLE_128_BYTES) if boxes.exchanged else 0,
        _PROMOTE_TO_256_BYTES if boxes.promoted else 0,
        0,
    )
    _check(status, f"A tensor of shape {boxes.shape}, strides {boxes.strides} cannot be copied in boxes of {boxes.box}")
    return TensorMap.from_buffer_copy(ctypes.string_at(at, 128))


class Kernel:
    """One compiled function on the current device.

    Args:
        code: a cubin.
        threads: of a block.
        shared_bytes: of a block, asked for at the launch.
        overlap: whether it may be set up while the kernel before it runs; it then waits by itself (`wait_for_inputs`).
        cluster: blocks, one beside the other in x, that run at the same time and read each other's shared memory.
    """

    def __init__(self, code: bytes, name: str, threads: int, shared_bytes: int, *, overlap: bool, cluster: int = 1) -> None:
        torch.cuda.current_stream()  # a context is there from here on
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(self._module), code), "A kernel could not be loaded")
        _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), f"{name} is missing")
        if shared_bytes > 48 << 10:
            _check(
                _driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared_bytes), f"{shared_bytes} bytes of shared memory"
            )
        # All kernels want the same division of an SM's memory: see `ops.triton.launch.prefer_shared_memory`.
        _check(_driver().cuFuncSetAttribute(self._function, PREFERRED_CARVEOUT, 100), "Division of shared memory")
        attributes = [_LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=(1, 0, 0))] * overlap
        attributes += [_LaunchAttribute(id=_CLUSTER_DIMENSION, value=(cluster, 1, 1))] * (cluster > 1)
        self._attributes = (_LaunchAttribute * len(attributes))(*attributes)
        self._threads, self._shared = threads, shared_bytes

    def launch(self, grid: tuple[int, int, int], *arguments: ctypes.Structure) -> None:
        """`arguments`: the kernel's parameters, by value."""
        stream = torch.cuda.current_stream().cuda_stream
        config = _LaunchConfig(grid, (self._threads, 1, 1), self._shared, stream, self._attributes, len(self._attributes))
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None), "A kernel could not be launched")
