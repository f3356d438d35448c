"""Limits of control groups: the process's own and those around it, of both versions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octavo.config import device
from octavo.protocol.boot import child_environment


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(device, "_GROUPS", str(tmp_path / "fs"))
    monkeypatch.setattr(device, "_PROCESS_GROUPS", str(tmp_path / "self"))
    return tmp_path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_without_any(groups: Path) -> None:
    assert device._cgroup_cpu_quota() is None
    assert device._cgroup_memory() == (None, 0)


def test_version_2_nested(groups: Path) -> None:
    put(groups / "self", "0::/system.slice/octavo.service")
    put(groups / "fs/system.slice/cpu.max", "350000 100000")
    put(groups / "fs/system.slice/octavo.service/cpu.max", "max 100000")
    assert device._cgroup_cpu_quota() == 4
    put(groups / "fs/system.slice/octavo.service/cpu.max", "100000 100000")
    assert device._cgroup_cpu_quota() == 1
    put(groups / "fs/system.slice/memory.max", "1000000")
    put(groups / "fs/system.slice/memory.current", "400000")
    put(groups / "fs/system.slice/memory.stat", "inactive_file 100000\nactive_file 50000")
    put(groups / "fs/system.slice/octavo.service/memory.max", "max")
    put(groups / "fs/system.slice/octavo.service/memory.current", "1")
    assert device._cgroup_memory() == (1000000, 250000)


def test_version_1_nested(groups: Path) -> None:
    put(groups / "self", "4:cpu,cpuacct:/t4\n3:memory:/\n0::/")
    put(groups / "fs/cpu/cpu.cfs_quota_us", "-1")
    put(groups / "fs/cpu/cpu.cfs_period_us", "100000")
    put(groups / "fs/cpu/t4/cpu.cfs_quota_us", "150000")
    put(groups / "fs/cpu/t4/cpu.cfs_period_us", "100000")
    assert device._cgroup_cpu_quota() == 2
    put(groups / "fs/memory/memory.limit_in_bytes", "500")
    put(groups / "fs/memory/memory.usage_in_bytes", "200")
    assert device._cgroup_memory() == (500, 200)


def test_a_container_that_sees_its_own_group_as_the_root(groups: Path) -> None:
    put(groups / "self", "0::/../outside")
    put(groups / "fs/cpu.max", "200000 100000")
    assert device._cgroup_cpu_quota() == 2


def test_a_limit_of_the_address_space_is_one_of_memory() -> None:
    """In a process of its own: such a limit cannot be taken back."""
    code = """
import resource
from octavo.config.device import host_memory
total, free = host_memory()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + 2**26
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
less, left = host_memory()
print(less == limit < total, 0 < left <= 2**26)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=child_environment(), check=True, timeout=60)
    assert run.stdout.split() == ["True", "True"]
