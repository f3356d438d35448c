"""What there is to run on, found without importing torch (so that the server process stays light).

The only file outside ops/, attention/, parallel/ and worker/graphs.py that talks to a vendor's API.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib.util
import logging
import os
import platform
import re
import struct
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from octavo.config import address_space
from octavo.config.digest import sha256
from octavo.config.types import DeviceInfo
from octavo.errors import ConfigError

logger = logging.getLogger(__name__)

_CU_COMPUTE_CAPABILITY_MAJOR = 75
_CU_COMPUTE_CAPABILITY_MINOR = 76
_MOST_THREADS = 1024
_CUDA_STUB, _CUDA_NO_DEVICE = 34, 100
"""Errors of CUDA: a library without a driver behind it; a driver without a card."""
NATIVE_ABI = 7
"""Of the compiled CPU kernels that this code calls."""


def detect_device(kind: str = "auto", threads: int | None = None) -> DeviceInfo:
    """The device to use.

    Args:
        kind: auto takes an NVIDIA GPU if there is one that the installed torch can use, else the CPU.
        threads: CPU threads; default the cores this process may use.

    Raises:
        ConfigError: cuda was asked for and cannot be had, or threads is no number of threads.
    """
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {kind!r} is not known. Choose auto, cpu or cuda.")
    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise ConfigError(f"--threads must be from 1 to {_MOST_THREADS}, got {threads}. This process may use {_cores(usable_cores())}.")
    usable = usable_cores()
    cores = threads or usable
    if cores > usable:
        logger.warning(
            "--threads %d, but this process may use %s: threads that share a core wait for each other. Leave --threads out, or give "
            "at most %d.",
            cores,
            _cores(usable),
            usable,
        )
    if kind == "cpu":
        return _cpu(cores)
    found = _cuda(cores)
    if isinstance(found, DeviceInfo):
        return found
    if kind == "cuda":
        raise ConfigError(f"--device cuda was asked for, but {found.why}. Use --device cpu, or mend that.")
    if found.there:
        logger.warning("Running on the CPU, because %s.", found.why)
    return _cpu(cores)


def _cores(count: int) -> str:
    return f"{count} core{'s' * (count != 1)}"


def usable_cores() -> int:
    """Cores this process may use: affinity mask and cgroup CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cpu_quota()
    return max(1, min(cores, quota) if quota else cores)


def native_kernels_path() -> str | None:
    """The library of compiled CPU kernels, if it was built for this code and can be loaded."""
    return next((str(path) for path in _native_files() if _native_problem(path) is None), None)


def native_kernels_problem() -> str:
    """Why there are no compiled CPU kernels, where there are none."""
    problems = {path: problem for path in _native_files() if (problem := _native_problem(path)) is not None}
    found = "; ".join(f"{path} {problem}" for path, problem in problems.items())
    return found or "they were not built (was there no C++ compiler when Octavo was installed?)"


def native_kernels_remedy() -> str:
    """What to do where there are no compiled CPU kernels: a library that is there but cannot be used was built once, and can be again."""
    return "Reinstall Octavo" if _native_files() else "Install a C++ compiler (g++ or clang), then reinstall Octavo"


_LEVELS = ("portable", "AVX2", "AVX-512 VNNI", "NEON dot product")
"""What the compiled CPU kernels may run at, by their number for it."""
_FLAGS = {"AVX2": {"avx2", "fma", "f16c"}, "AVX-512 VNNI": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}}
"""What the system calls the instructions that a level of theirs needs."""


@dataclass(frozen=True)
class NativeLevel:
    """The instructions that the compiled CPU kernels use here."""

    name: str
    why: str
    """Why these and no better ones."""
    best: bool
    """No better ones would be used on this processor."""


def native_kernels_level() -> NativeLevel | None:
    """What the compiled CPU kernels run at; None where there are none."""
    if (path := native_kernels_path()) is None:
        return None
    name = _LEVELS[ctypes.CDLL(path).octavo_level()]
    if platform.machine() not in ("x86_64", "AMD64"):
        best = name != "portable"
        return NativeLevel(name, "the best there are for it" if best else "this processor has no dot product instructions", True)
    able = [level for level, flags in _FLAGS.items() if flags <= _cpu_flags()]
    if able and name != able[-1]:
        return NativeLevel(name, f"this processor has {able[-1]}, but the compiler that built the kernels knew none of it", False)
    if name == "AVX-512 VNNI":
        return NativeLevel(name, "the best there are for it", True)
    missing = sorted(_FLAGS["AVX-512 VNNI" if name == "AVX2" else "AVX2"] - _cpu_flags())
    return NativeLevel(name, f"this processor, or the virtual machine, lacks {', '.join(missing)}", True)


def _cpu_flags() -> set[str]:
    """The instructions that the system says there are."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.partition(":")[2].split())
    return set()


def _native_files() -> list[Path]:
    return sorted((Path(__file__).parents[1] / "ops" / "cpu").glob("_native*.so"))


def _native_problem(path: Path) -> str | None:
    """Why a library of compiled CPU kernels cannot be used."""
    if (damage := _damage(path)) is not None:
        return damage
    try:
        abi = ctypes.CDLL(str(path)).octavo_abi()
    except (OSError, AttributeError) as error:
        return f"cannot be loaded ({error})"
    return None if abi == NATIVE_ABI else f"was built for another version of Octavo (interface {abi}, wanted {NATIVE_ABI})"


def _damage(path: Path) -> str | None:
    """Why a library of compiled CPU kernels is not opened at all."""
    if not _is_whole(path):
        return "is damaged (it ends before what its header says it holds)"
    expected = _checksums(path)
    if not expected:
        return f"cannot be trusted (nothing says what was built: {path.name}.sha256 is missing beside it)"
    try:
        found = sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return None if found in expected else "is damaged (its checksum is not that of the library that was built)"


def _checksums(path: Path) -> set[str]:
    """What a library's SHA-256 may be: code that was damaged ends the process somewhere.

    The installation's own record of its files says so, which a file beside the library cannot overrule; in a source tree, where there is
    no such record, that file, which `setup.py` has left there. Against who may write here this is no help: Python's code lies beside it.
    """
    if recorded := _recorded_checksums(path):
        return recorded
    try:
        return {path.with_name(path.name + ".sha256").read_text(encoding="ascii").strip()}
    except (OSError, UnicodeDecodeError):
        return set()


def _recorded_checksums(path: Path) -> set[str]:
    """Of a library, by the lists of files (RECORD) of the package's installations around it. There may be an old one beside the new."""
    site = path.parents[3] if len(path.parents) > 3 else path.parent
    begin, found = f"{path.relative_to(site).as_posix()},sha256=", set[str]()
    for record in site.glob("octavo-*.dist-info/RECORD"):
        with contextlib.suppress(OSError, UnicodeDecodeError, ValueError):
            for line in record.read_text(encoding="utf-8").splitlines():
                if line.startswith(begin):
                    found.add(base64.urlsafe_b64decode(line[len(begin) :].partition(",")[0] + "==").hex())
    return found


_ELF_64_LITTLE = b"\x7fELF\x02\x01"
_ELF_HEADER = struct.Struct("<16s2HI3QI6H")
_ELF_SEGMENT = struct.Struct("<2I6Q")


def _is_whole(path: Path) -> bool:
    """Whether a library has all that its header says. The system maps one that was cut off all the same, and touching what is missing
    ends the process. What is no library at all is left to the system, which refuses it.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(_ELF_HEADER.size)
            if len(header) < _ELF_HEADER.size or not header.startswith(_ELF_64_LITTLE):
                return True
            fields = _ELF_HEADER.unpack(header)
            segments_at, sections_at, (segment_bytes, segments, section_bytes, sections) = fields[5], fields[6], fields[9:13]
            ends: list[int] = [segments_at + segment_bytes * segments, sections_at + section_bytes * sections]
            if max(ends) > size or segment_bytes < _ELF_SEGMENT.size:
                return False
            file.seek(segments_at)
            table = file.read(segment_bytes * segments)
    except OSError:
        return True
    for at in range(0, len(table), segment_bytes):
        segment = _ELF_SEGMENT.unpack_from(table, at)
        ends.append(segment[2] + segment[5])
    return max(ends) <= size


def host_memory(*, addresses: bool = True) -> tuple[int, int]:
    """(total, available) bytes of host memory, within the limits of the cgroup and of the process if there are any.

    Args:
        addresses: the limit of the process's address space (`ulimit -v`) counts too.
    """
    total, available = _whole_memory()
    own = (address_space.limit(), address_space.used()) if addresses else (None, 0)
    for limit, used in (_cgroup_memory(), own):
        if limit is not None and limit < total:
            total, available = limit, max(0, min(available, limit - used))
    return total, available


def _whole_memory() -> tuple[int, int]:
    """(total, available) bytes of the machine."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        return found["MemTotal"], found["MemAvailable"]
    except (OSError, ValueError, IndexError, KeyError):
        import psutil  # 50 ms, and a megabyte

        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)


def _cpu(threads: int) -> DeviceInfo:
    total, available = host_memory()
    kind: Literal["cpu"] = "cpu"
    native = native_kernels_path() is not None
    return DeviceInfo(kind=kind, name=cpu_name(), total_bytes=total, free_bytes=available, threads=threads, native_kernels=native)


def cpu_name() -> str:
    """What the processor is called, as far as the system says."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class _NoGpu:
    why: str
    there: bool = False
    """There is a GPU, but it cannot be used."""


def gpu_problem() -> str | None:
    """Why the GPU that is there cannot be used, if so."""
    found = _cuda(1)
    return found.why if isinstance(found, _NoGpu) and found.there else None


def _has_cards() -> bool:
    """Whether the system has a file for an NVIDIA card."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _cuda(threads: int) -> DeviceInfo | _NoGpu:
    """The first visible GPU, or why there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _NoGpu("no NVIDIA driver is installed (libcuda.so.1 is missing)")
    version, count, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = visible is None or visible.strip() not in ("", "-1")
    of_these = f"; CUDA_VISIBLE_DEVICES is {visible!r}" if visible is not None else ""
    if (status := cuda.cuInit(0)) != 0:
        # A driver without a card is usual in containers. Other errors are of one that is there, and broken.
        there = wanted and (status not in (_CUDA_STUB, _CUDA_NO_DEVICE) or (status == _CUDA_NO_DEVICE and _has_cards()))
        return _NoGpu(f"the NVIDIA driver finds no usable GPU ({_cuda_error(cuda, status)}{of_these})", there=there)
    cuda.cuDeviceGetCount(ctypes.byref(count))
    if count.value == 0:
        return _NoGpu(f"no GPU is visible{of_these}", there=wanted and _has_cards())
    built_for = torch_cuda_version()
    if built_for is None:
        return _NoGpu("torch is not installed", there=True)
    if built_for == (0, 0):
        return _NoGpu("the installed torch is a CPU build (install a CUDA build of torch to use the GPU)", there=True)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    driver = version.value // 1000, version.value % 1000 // 10
    # Within one major version of CUDA, older drivers run what was built for newer ones.
    if driver[0] < built_for[0]:
        return _NoGpu(
            f"the NVIDIA driver is too old: it supports CUDA {driver[0]}.{driver[1]}, and the installed torch is built for CUDA "
            f"{built_for[0]}.{built_for[1]} (update the driver, or install a torch built for CUDA {driver[0]})",
            there=True,
        )
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    name, total = ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGetName(name, 256, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    major, minor = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _CU_COMPUTE_CAPABILITY_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CU_COMPUTE_CAPABILITY_MINOR, device)
    called, capability = name.value.decode(errors="replace"), (major.value, minor.value)
    oldest = _OLDEST_CUDA_13 if built_for[0] >= 13 else _OLDEST
    if capability < oldest:
        return _NoGpu(
            f"{called} is too old: it has compute capability {major.value}.{minor.value}, and a torch built for CUDA {built_for[0]} "
            f"needs {oldest[0]}.{oldest[1]}",
            there=True,
        )
    # Free memory needs a CUDA context: the worker, which has one, measures it.
    return DeviceInfo(
        kind="cuda",
        name=called,
        total_bytes=total.value,
        free_bytes=total.value,
        threads=threads,
        capability=capability,
        count=count.value,
    )


_OLDEST, _OLDEST_CUDA_13 = (7, 0), (7, 5)


def _cuda_error(cuda: ctypes.CDLL, status: int) -> str:
    """The driver's own words for one of its errors."""
    text = ctypes.c_char_p()
    cuda.cuGetErrorString(status, ctypes.byref(text))
    return f"{text.value.decode(errors='replace')}, error {status}" if text.value else f"error {status}"


def torch_cuda_version() -> tuple[int, int] | None:
    """The CUDA version that the installed torch was built for; (0, 0) for a CPU build, None without torch. Does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return 0, 0
    found = re.search(r"^cuda\b.*=\s*['\"](\d+)\.(\d+)", text, flags=re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else (0, 0)


_PROCESS_GROUPS = "/proc/self/cgroup"
_GROUPS = "/sys/fs/cgroup"


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroups(controller: str) -> list[Path]:
    """The folders of this process's control group and of those around it, for a controller: each may limit it."""
    folders = [Path(_GROUPS), Path(_GROUPS) / controller]  # what a container sees as its own
    try:
        lines = Path(_PROCESS_GROUPS).read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = Path(_GROUPS) / controller if controllers else Path(_GROUPS)
        inside = PurePosixPath(path.lstrip("/"))
        folders += [root / folder for folder in (inside, *inside.parents)]
    return list(dict.fromkeys(folders))


def _cgroup_cpu_quota() -> int | None:
    """Whole cores of the tightest quota, rounded up (v2 and v1); None without one."""
    quotas = []
    for folder in _cgroups("cpu"):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                quotas.append(-(-int(quota) // int(period)))
        except (OSError, ValueError):
            pass
        v1_quota, v1_period = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
        if v1_quota and v1_period:
            quotas.append(-(-v1_quota // v1_period))
    return min(quotas, default=None)


def _cgroup_memory() -> tuple[int | None, int]:
    """(limit, used without reclaimable page cache) of the group with the least left; (None, 0) without a limit."""
    found = []
    for folder in _cgroups("memory"):
        for limit_file, used_file in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = _read_int(folder / limit_file), _read_int(folder / used_file)
            if limit is None or used is None:
                continue
            reclaimable = 0
            with contextlib.suppress(OSError, ValueError):
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                reclaimable = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
            found.append((limit, max(0, used - reclaimable)))
    return min(found, key=lambda pair: pair[0] - pair[1], default=(None, 0))
