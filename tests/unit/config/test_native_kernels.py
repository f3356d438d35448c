"""Whether there are compiled CPU kernels, what they run at and why, and how many threads are too many. The library is a stand-in."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.doctor import check_cpu_kernels, print_report
from octavo.config import device
from octavo.ops.cpu import abi

ALL = "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni"


class Library:
    def __init__(self, interface: int, level: int) -> None:
        self.octavo_abi = lambda: interface
        self.octavo_level = lambda: level


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(library: Library | None, flags: str = "", processor: str = "x86_64") -> None:
        def load(path: str | None) -> Library:
            if library is None:
                raise OSError("wrong ELF class")
            return library

        monkeypatch.setattr(device, "_native_files", lambda: [Path("_native.so")])
        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setattr(device, "_damage", lambda path: None)
        monkeypatch.setattr(device, "_cpu_flags", lambda: set(flags.split()))
        monkeypatch.setattr(device.platform, "machine", lambda: processor)

    return make


@pytest.mark.parametrize(
    ("level", "flags", "processor", "said", "status"),
    [
        (2, ALL, "x86_64", r"AVX-512 VNNI \(the best there are for it\)", "ok"),
        (1, "avx2 fma f16c avx512f", "x86_64", r"AVX2 \(this processor, .* lacks avx512_vnni, avx512bw, avx512dq, avx512vl\)", "ok"),
        (1, ALL, "x86_64", r"AVX2 \(this processor has AVX-512 VNNI, but the compiler", "warn"),
        (0, "fma", "x86_64", r"portable \(this processor, .* lacks avx2, f16c\)", "ok"),
        (0, ALL, "x86_64", r"portable \(this processor has AVX-512 VNNI, but", "warn"),
        (3, "", "aarch64", r"NEON dot product \(the best", "ok"),
        (0, "", "aarch64", r"portable \(this processor has no dot product", "ok"),
    ],
)
def test_the_doctor_names_the_level_and_why(machine: Any, level: int, flags: str, processor: str, said: str, status: str) -> None:
    machine(Library(device.NATIVE_ABI, level), flags, processor)
    check = check_cpu_kernels()
    assert check.status == status
    assert bool(check.advice) == (status == "warn")
    assert re.search(said, check.found), check.found


def test_the_doctor_says_what_to_do_where_they_are_missing(
    machine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(None)
    check = check_cpu_kernels()
    assert check.status == "warn"
    assert "_native.so cannot be loaded (wrong ELF class)" in check.found
    assert "Reinstall Octavo" in check.advice and "C++ compiler" not in check.advice
    print_report([check])
    last = capsys.readouterr().out.splitlines()[-1]
    assert "compiled CPU kernels are not usable" in last and "Reinstall Octavo" in last and "Everything" not in last
    machine(Library(device.NATIVE_ABI - 1, 2), ALL)
    assert "was built for another version of Octavo" in check_cpu_kernels().found
    monkeypatch.setattr(device, "_native_files", list)
    check = check_cpu_kernels()
    assert "they were not built" in check.found
    assert "Install a C++ compiler" in check.advice and "reinstall" in check.advice


@pytest.mark.skipif(abi.library() is None, reason="the compiled kernels were not built")
@pytest.mark.parametrize("kept", [0.0, 0.0005, 0.3, 0.9, 0.9999])
def test_a_library_that_was_cut_off_is_not_opened(kept: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would map it, and end the process where it touches what is missing."""
    whole = Path(device.native_kernels_path() or "").read_bytes()
    path = tmp_path / "_native.so"
    path.write_bytes(whole[: int(kept * len(whole))])
    (tmp_path / "_native.so.sha256").write_text(hashlib.sha256(path.read_bytes() if kept == 0 else whole).hexdigest())
    monkeypatch.setattr(device, "_native_files", lambda: [path])
    assert device.native_kernels_path() is None
    assert device.detect_device("cpu").native_kernels is False
    check = check_cpu_kernels()
    assert check.status == "warn" and str(path) in check.found and "Reinstall Octavo" in check.advice
    assert ("is damaged" if kept else "cannot be loaded") in check.found
    path.write_bytes(whole)
    (tmp_path / "_native.so.sha256").write_text(hashlib.sha256(whole).hexdigest())
    assert device.native_kernels_path() == str(path)


@pytest.mark.skipif(abi.library() is None, reason="the compiled kernels were not built")
@pytest.mark.parametrize("place", [0.2, 0.5, 0.9])
def test_a_library_that_is_as_long_as_it_was_but_another_is_not_opened(
    place: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged code would end the engine, at each of its starts."""
    built = Path(device.native_kernels_path() or "")
    path, beside = tmp_path / built.name, tmp_path / f"{built.name}.sha256"
    whole = bytearray(built.read_bytes())
    monkeypatch.setattr(device, "_native_files", lambda: [path])
    path.write_bytes(whole)
    beside.write_text(built.with_name(beside.name).read_text())
    assert device.native_kernels_path() == str(path)
    whole[int(place * len(whole))] ^= 4
    path.unlink()  # it is mapped
    path.write_bytes(whole)
    assert device.native_kernels_path() is None
    assert device.detect_device("cpu").native_kernels is False
    check = check_cpu_kernels()
    assert check.status == "warn" and "its checksum is not that of the library that was built" in check.found
    assert "Reinstall Octavo" in check.advice


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the library as pip installs it, with its checksum beside it and in the installation's list of files."""
    built = Path(device.native_kernels_path() or "")
    path = tmp_path / "site-packages" / "octavo" / "ops" / "cpu" / built.name
    path.parent.mkdir(parents=True)
    path.write_bytes(built.read_bytes())
    path.with_name(path.name + ".sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest() + "\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")
    record = tmp_path / "site-packages" / "octavo-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text(f"octavo/__init__.py,sha256=AAAA,7\noctavo/ops/cpu/{path.name},sha256={digest},{path.stat().st_size}\n")
    monkeypatch.setattr(device, "_native_files", lambda: [path])
    return path


@pytest.mark.skipif(abi.library() is None, reason="the compiled kernels were not built")
def test_a_library_that_was_changed_together_with_its_checksum_is_not_opened(installed: Path) -> None:
    assert device.native_kernels_path() == str(installed)
    changed = installed.read_bytes() + b"more"
    installed.unlink()
    installed.write_bytes(changed)
    installed.with_name(installed.name + ".sha256").write_text(hashlib.sha256(changed).hexdigest())
    assert device.native_kernels_path() is None
    assert "its checksum is not that of the library that was built" in check_cpu_kernels().found


@pytest.mark.skipif(abi.library() is None, reason="the compiled kernels were not built")
def test_an_installation_knows_its_library_without_the_file_beside_it(installed: Path) -> None:
    beside = installed.with_name(installed.name + ".sha256")
    beside.write_text("0" * 64)
    assert device.native_kernels_path() == str(installed)
    beside.unlink()
    assert device.native_kernels_path() == str(installed)
    for record in installed.parents[3].glob("*.dist-info/RECORD"):
        record.write_text("octavo/__init__.py,sha256=AAAA,7\n")  # as of a source tree's, which does not list what was built there
    assert device.native_kernels_path() is None
    check = check_cpu_kernels()
    assert check.status == "warn" and f"{beside.name} is missing" in check.found and "Reinstall Octavo" in check.advice


def test_a_library_of_another_version_is_none(machine: Any) -> None:
    machine(Library(device.NATIVE_ABI + 1, 2), ALL)
    assert device.native_kernels_path() is None
    assert device.detect_device("cpu").native_kernels is False
    assert device.native_kernels_level() is None


@pytest.mark.skipif(abi.library() is None, reason="the compiled kernels were not built")
def test_levels_have_the_same_numbers_everywhere() -> None:
    assert len(device._LEVELS) == len(abi.LEVELS)
    found = device.native_kernels_level()
    assert found is not None
    assert found.name.lower().replace("-", "").startswith(abi.LEVELS[abi.loaded().octavo_level()])


def test_more_threads_than_cores_are_warned_of_with_both_numbers(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "usable_cores", lambda: 3)
    caplog.set_level(logging.WARNING)
    assert device.detect_device("cpu", 3).threads == 3
    assert device.detect_device("cpu").threads == 3
    assert not caplog.records
    assert device.detect_device("cpu", 64).threads == 64
    (line,) = [record.getMessage() for record in caplog.records]
    assert "--threads 64" in line and "may use 3 cores" in line and "at most 3" in line
    monkeypatch.setattr(device, "usable_cores", lambda: 1)
    device.detect_device("cpu", 2)
    assert "may use 1 core:" in caplog.records[-1].getMessage()
