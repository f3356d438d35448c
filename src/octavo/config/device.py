"""What there is to run on, found without importing torch (so that the server process stays light).

The only file outside ops/, attention/, parallel/ and worker/graphs.py that talks to a vendor's API.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Literal

from octavo.config.types import DeviceInfo
from octavo.errors import ConfigError

_CU_COMPUTE_CAPABILITY_MAJOR = 75
_CU_COMPUTE_CAPABILITY_MINOR = 76


def detect_device(kind: str = "auto", threads: int | None = None) -> DeviceInfo:
    """The device to use.

    Args:
        kind: auto takes an NVIDIA GPU if there is one that the installed torch can use, else the CPU.
        threads: CPU threads; default the cores this process may use.

    Raises:
        ConfigError: cuda was asked for and cannot be had, or threads is not positive.
    """
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {kind!r} is not known. Choose auto, cpu or cuda.")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads must be at least 1, got {threads}.")
    cores = threads or usable_cores()
    if kind == "cpu":
        return _cpu(cores)
    found = _cuda(cores)
    if isinstance(found, DeviceInfo):
        return found
    if kind == "cuda":
        raise ConfigError(f"device cuda was asked for, but {found}. Use --device cpu, or mend that.")
    return _cpu(cores)


def usable_cores() -> int:
    """Cores this process may use: affinity mask and cgroup CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cpu_quota()
    return max(1, min(cores, quota) if quota else cores)


def native_kernels_path() -> str | None:
    """The library of compiled CPU kernels, if it was built and can be loaded."""
    folder = Path(__file__).parents[1] / "ops" / "cpu"
    for path in sorted(folder.glob("_native*.so")):
        try:
            ctypes.CDLL(str(path))
        except OSError:
            continue
        return str(path)
    return None


def host_memory() -> tuple[int, int]:
    """(total, available) bytes of host memory, within the cgroup's limit if there is one."""
    import psutil

    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    limit, used = _cgroup_memory()
    if limit is not None and limit < total:
        return limit, max(0, min(available, limit - used))
    return total, available


def _cpu(threads: int) -> DeviceInfo:
    total, available = host_memory()
    kind: Literal["cpu"] = "cpu"
    native = native_kernels_path() is not None
    return DeviceInfo(kind=kind, name=_cpu_name(), total_bytes=total, free_bytes=available, threads=threads, native_kernels=native)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cuda(threads: int) -> DeviceInfo | str:
    """The first visible GPU, or why there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is installed (libcuda.so.1 is missing)"
    if (status := cuda.cuInit(0)) != 0:
        return f"the NVIDIA driver finds no usable GPU (cuInit: error {status})"
    count, device = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    if count.value == 0:
        return "no GPU is visible (is CUDA_VISIBLE_DEVICES empty?)"
    try:
        if importlib.metadata.version("torch").endswith("+cpu"):
            return "the installed torch is a CPU build (install a CUDA build of torch to use the GPU)"
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    name, total = ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGetName(name, 256, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    major, minor = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _CU_COMPUTE_CAPABILITY_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CU_COMPUTE_CAPABILITY_MINOR, device)
    # Free memory needs a CUDA context: the worker, which has one, measures it.
    return DeviceInfo(
        kind="cuda",
        name=name.value.decode(errors="replace"),
        total_bytes=total.value,
        free_bytes=total.value,
        threads=threads,
        capability=(major.value, minor.value),
    )


def _read_int(*paths: str) -> int | None:
    for path in paths:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def _cgroup_cpu_quota() -> int | None:
    """Whole cores of the cgroup quota (v2, then v1), rounded up; None without a quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):
        pass
    v1_quota = _read_int("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    v1_period = _read_int("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return -(-v1_quota // v1_period) if v1_quota and v1_period else None


def _cgroup_memory() -> tuple[int | None, int]:
    """(limit, used without reclaimable page cache) of the cgroup; (None, 0) without a limit."""
    limit = _read_int("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    used = _read_int("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
    if limit is None or used is None:
        return None, 0
    reclaimable = 0
    for path in ("/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat"):
        try:
            stat = dict(line.split() for line in Path(path).read_text().splitlines())
        except (OSError, ValueError):
            continue
        reclaimable = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        break
    return limit, max(0, used - reclaimable)
