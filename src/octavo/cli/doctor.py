"""`octavo doctor`: look at everything that a server needs on this machine, and say in plain words what to do about what is wrong.

Exit code 1 if something is broken. A check reports, it never raises.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from octavo._version import __version__
from octavo.cli.parser import CommandParser, Namespace
from octavo.config.device import gpu_problem
from octavo.config.open_files import LEAST_FILES
from octavo.config.sizes import format_bytes

Status = Literal["ok", "warn", "fail"]
_MIN_PYTHON, _MAX_PYTHON = (3, 11), (3, 13)
_MIN_TORCH = (2, 9)
_MARKS = {"ok": "ok  ", "warn": "note", "fail": "FAIL"}


@dataclass(frozen=True)
class Check:
    """The outcome of one look."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """What to do; empty when all is well."""
    reservation: str = ""
    """What the verdict must not leave out, though nothing is broken."""


def configure(parser: CommandParser) -> None:
    parser.add_argument("--port", type=_port, metavar="N", help="Port to check. Default: 8000.")
    parser.add_argument("--json", action="store_true", help="Print the report as JSON.")


def run(options: Namespace) -> int:
    checks = examine(getattr(options, "port", 8000))
    if getattr(options, "json", False):
        import json

        print(json.dumps([asdict(c) for c in checks], indent=1))
    else:
        print_report(checks)
    return int(any(c.status == "fail" for c in checks))


def print_report(checks: list[Check]) -> None:
    width = max(len(c.name) for c in checks)
    for c in checks:
        print(f"{_MARKS[c.status]}  {c.name:<{width}}  {c.found}")
        if c.advice:
            print(f"{'':{width + 8}}{c.advice}")
    broken = sum(c.status == "fail" for c in checks)
    reservations = " ".join(c.reservation for c in checks if c.reservation)
    verdict = f"{broken} problem{'s' * (broken != 1)} to solve." if broken else "Everything Octavo needs is here."
    if reservations:
        verdict = f"{verdict} {reservations}" if broken else f"Octavo runs here. {reservations}"
    print(f"\n{verdict}")


def examine(port: int) -> list[Check]:
    """All checks, in order of reading."""
    looks: list[tuple[str, Callable[[], Check]]] = [
        ("Python", check_python),
        ("Packages", check_packages),
        ("torch", check_torch),
        ("GPU", check_gpu),
        ("Cores", check_cores),
        ("CPU kernels", check_cpu_kernels),
        ("Memory", check_memory),
        ("Model cache", check_model_cache),
        ("Temporary files", check_temporary_files),
        ("Open files", check_open_files),
        ("Port", lambda: check_port(port)),
    ]
    checks = [Check("Octavo", "ok", f"{__version__} in {Path(__file__).parent.parent}")]
    for name, look in looks:
        try:
            checks.append(look())
        except Exception as e:
            checks.append(Check(name, "warn", f"could not be checked ({type(e).__name__}: {e})"))
    return checks


def check_python() -> Check:
    found = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    if not _MIN_PYTHON <= sys.version_info[:2] <= _MAX_PYTHON:
        return Check("Python", "fail", found, "Octavo runs on Python 3.11 to 3.13. Make a virtual environment with one of them.")
    if platform.system() != "Linux":
        return Check("Python", "warn", found, "Octavo is made for Linux and tested only there.")
    return Check("Python", "ok", found)


def required_packages() -> dict[str, str]:
    """Octavo's own requirements: package -> least version, from its installed metadata."""
    try:
        lines = importlib.metadata.requires("octavo") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    plain = [line.partition(";")[0].strip() for line in lines if "extra ==" not in line]
    parsed = (re.match(r"([A-Za-z0-9_.-]+)\s*(?:>=\s*([\d.]+))?", line) for line in plain)
    return {m.group(1): m.group(2) or "0" for m in parsed if m}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text.partition("+")[0])[:3])


def check_packages() -> Check:
    required = required_packages()
    if not required:
        return Check("Packages", "warn", "Octavo is not installed, it runs from its source", "Install it: pip install -e .")
    missing, old = [], []
    for name, least in required.items():
        try:
            if _version(importlib.metadata.version(name)) < _version(least):
                old.append(f"{name} {importlib.metadata.version(name)} (needs {least})")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing or old:
        found = "; ".join(["missing: " + ", ".join(missing)] * bool(missing) + ["too old: " + ", ".join(old)] * bool(old))
        return Check("Packages", "fail", found, "Repair the installation: pip install --upgrade octavo.")
    return Check("Packages", "ok", f"all {len(required)} are here")


def check_torch() -> Check:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check("torch", "fail", "not installed", "Install it: make serve does, or see docs/install.md.")
    if _version(version)[:2] < _MIN_TORCH:
        return Check("torch", "fail", version, "Octavo needs torch 2.9 or newer: pip install --upgrade torch.")
    probe = "import torch; torch.ones(2) @ torch.ones(2); print(torch.version.cuda or '-', torch.cuda.is_available())"
    try:
        result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return Check("torch", "fail", f"{version} does not answer", "Importing torch takes over two minutes: is the disk overloaded?")
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return Check("torch", "fail", f"{version} does not work: {reason[:200]}", "Reinstall it: pip install --force-reinstall torch.")
    cuda, usable = result.stdout.split()
    built = "a CPU build" if cuda == "-" else f"built for CUDA {cuda}, {'usable' if usable == 'True' else 'no GPU usable'}"
    if cuda != "-" and usable != "True" and _nvidia_smi():
        advice = "torch cannot use the GPU: the driver is probably too old for this build. Update the driver, or install a matching torch."
        return Check("torch", "fail", f"{version}, {built}", advice)
    return Check("torch", "ok", f"{version}, {built}")


def _nvidia_smi() -> list[list[str]]:
    """name, driver, total MiB, free MiB of each GPU; empty without a working NVIDIA driver."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return []
    query = [tool, "--query-gpu=name,driver_version,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if result.returncode != 0:
        return []
    return [[cell.strip() for cell in line.split(",")] for line in result.stdout.splitlines() if line.count(",") == 3]


def check_gpu() -> Check:
    gpus, problem = _nvidia_smi(), gpu_problem()
    if not gpus:
        if shutil.which("nvidia-smi"):
            return Check("GPU", "fail", "nvidia-smi fails", "The NVIDIA driver does not work: run nvidia-smi to see why.")
        if problem is not None:
            return Check("GPU", "fail", f"not usable: {problem}", "Octavo runs on the CPU until that is mended.")
        return Check("GPU", "ok", "none: Octavo runs on the CPU")
    names = []
    busy = []
    for i, (name, driver, total, free) in enumerate(gpus):
        names.append(f"{name}, driver {driver}, {format_bytes(int(free) * 2**20)} of {format_bytes(int(total) * 2**20)} free")
        if int(free) < 0.5 * int(total):
            busy.append(str(i))
    if importlib.metadata.version("torch").endswith("+cpu"):
        return Check("GPU", "warn", "; ".join(names), "The installed torch is a CPU build, so the GPU stays idle. Install a CUDA build.")
    if problem is not None:
        return Check("GPU", "fail", "; ".join(names), f"Octavo runs on the CPU: {problem}.")
    if busy:
        advice = f"Other programs use over half of GPU {', '.join(busy)}: end them, or lower --gpu-memory-utilization."
        return Check("GPU", "warn", "; ".join(names), advice)
    return Check("GPU", "ok", "; ".join(names))


def check_cores() -> Check:
    from octavo.config.device import usable_cores

    usable, total = usable_cores(), os.cpu_count() or 1
    found = f"{usable} of {total} usable" if usable < total else f"{usable}"
    limits = [
        name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if os.environ.get(name, "").isdigit() and int(os.environ[name]) < usable
    ]
    if limits:
        return Check("Cores", "warn", found, f"{' and '.join(limits)} limit other libraries; Octavo itself uses --threads.")
    return Check("Cores", "ok", found)


def check_cpu_kernels() -> Check:
    from octavo.config.device import native_kernels_level, native_kernels_problem, native_kernels_remedy

    level = native_kernels_level()
    if level is None:
        advice = (
            f"Models on a CPU run on torch's kernels, which are several times slower. {native_kernels_remedy()} "
            "(pip install --force-reinstall --no-deps --no-cache-dir, and what it was installed with)."
        )
        reservation = f"Its compiled CPU kernels are not usable, so models on a CPU are several times slower. {native_kernels_remedy()}."
        return Check("CPU kernels", "warn", f"missing: {native_kernels_problem()}", advice, reservation)
    found = f"compiled, running at {level.name} ({level.why})"
    if not level.best:
        return Check("CPU kernels", "warn", found, "Reinstall Octavo with a newer C++ compiler.")
    return Check("CPU kernels", "ok", found)


def check_memory() -> Check:
    from octavo.config.device import host_memory

    total, available = host_memory()
    found = f"{format_bytes(available)} of {format_bytes(total)} available"
    if available < 2**30:
        return Check("Memory", "fail", found, "Even the bundled model needs about 1 GiB: end other programs.")
    if available < 2 * 2**30:
        return Check("Memory", "warn", found, "Enough for the bundled model only.")
    return Check("Memory", "ok", found)


def check_model_cache() -> Check:
    from octavo.checkpoint import bundled

    folder = bundled.models_dir()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    usage = shutil.disk_usage(existing)
    free = usage.free
    found = f"{folder}, {format_bytes(free)} free"
    try:
        damage = bundled.damage()
    except OSError as e:
        damage = f"{folder / bundled.FILE} cannot be read: {e.strerror or e}"
    if damage is not None:
        return Check(
            "Model cache",
            "fail",
            f"the bundled model {damage}",
            f"Have it fetched again: delete {folder / bundled.FILE}, then octavo models pull.",
        )
    if bundled.is_present():
        return Check("Model cache", "ok", f"{found}, the bundled model is there")
    if not os.access(existing, os.W_OK) or not usage.total:  # a file system without room, such as /proc, keeps no files
        return Check("Model cache", "fail", found, f"{existing} cannot be written to: set OCTAVO_HOME to a folder of yours.")
    if free < 4 * bundled.SIZE:
        return Check("Model cache", "fail", found, "The disk is nearly full: free some space, or set OCTAVO_HOME to another disk.")
    return Check("Model cache", "ok", f"{found}, the bundled model is not here yet (octavo models pull)")


def check_temporary_files() -> Check:
    try:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as s:
            s.bind(os.path.join(folder, "probe.sock"))
    except OSError as e:
        advice = "The engine talks over a socket in the temporary folder: set TMPDIR to a short path that can be written to."
        return Check("Temporary files", "fail", f"{tempfile.gettempdir()}: {e.strerror or e}", advice)
    return Check("Temporary files", "ok", tempfile.gettempdir())


def check_open_files() -> Check:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        return Check("Open files", "fail", f"{hard}", f"Octavo needs {LEAST_FILES} at least: raise that limit (ulimit -n).")
    if soft != resource.RLIM_INFINITY and soft < 4096:
        return Check("Open files", "warn", f"{soft} (could be {hard})", f"Many clients need one file each: ulimit -n {min(hard, 65536)}.")
    return Check("Open files", "ok", f"up to {soft}")


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: give a whole number from 1 to 65535.")
    return int(text)


def check_port(port: int) -> Check:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError as e:
            advice = f"Another program has it: stop that, or choose another with --port (make serve PORT={port + 1})."
            return Check("Port", "warn", f"{port}: {e.strerror}", advice)
    return Check("Port", "ok", f"{port} is free")
