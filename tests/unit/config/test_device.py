"""What is said of a GPU that cannot be used, and that a usable one is described. The driver is a stand-in."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.config import device
from octavo.config.device import detect_device, torch_cuda_version
from octavo.errors import ConfigError


@dataclass
class Driver:
    """The functions of libcuda.so.1 that are asked."""

    init_status: int = 0
    count: int = 1
    version: int = 13000
    name: bytes = b"NVIDIA Test"
    total: int = 80 << 30
    capability: tuple[int, int] = (9, 0)

    def cuInit(self, flags: int) -> int:
        return self.init_status

    def cuGetErrorString(self, status: int, out: Any) -> int:
        out._obj.value = b"no CUDA-capable device is detected"
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = self.count
        return 0

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = self.version
        return 0

    def cuDeviceGet(self, out: Any, index: int) -> int:
        return 0

    def cuDeviceGetName(self, out: Any, size: int, index: Any) -> int:
        out.value = self.name
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, index: Any) -> int:
        out._obj.value = self.total
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: int, index: Any) -> int:
        out._obj.value = self.capability[attribute - 75]
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the machine one with this driver (None: without), and with a torch built for this CUDA (None: without torch)."""

    def make(driver: Driver | None, torch: tuple[int, int] | None = (13, 0)) -> None:
        def load(name: str) -> Driver:
            if driver is None or name != "libcuda.so.1":
                raise OSError(name)
            return driver

        monkeypatch.setattr(device.ctypes, "CDLL", load)
        monkeypatch.setattr(device, "torch_cuda_version", lambda: torch)

    return make


def test_a_usable_gpu_is_described(machine: Any) -> None:
    machine(Driver())
    for kind in ("auto", "cuda"):
        found = detect_device(kind)
        assert (found.kind, found.name, found.total_bytes, found.capability) == ("cuda", "NVIDIA Test", 80 << 30, (9, 0))
    assert detect_device("cpu").kind == "cpu"


@pytest.mark.parametrize(
    ("driver", "torch", "says"),
    [
        (None, (13, 0), "no NVIDIA driver is installed"),
        (Driver(init_status=100), (13, 0), r"finds no usable GPU \(no CUDA-capable device is detected, error 100\)"),
        (Driver(count=0), (13, 0), "no GPU is visible"),
        (Driver(), None, "torch is not installed"),
        (Driver(), (0, 0), "the installed torch is a CPU build"),
        (Driver(version=12040), (13, 0), r"driver is too old: it supports CUDA 12\.4, and the installed torch is built for CUDA 13\.0"),
        (Driver(capability=(7, 0)), (13, 0), r"NVIDIA Test is too old: it has compute capability 7\.0, .* needs 7\.5"),
        (Driver(capability=(6, 1)), (12, 8), r"NVIDIA Test is too old: .* needs 7\.0"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(machine: Any, driver: Driver | None, torch: tuple[int, int] | None, says: str) -> None:
    machine(driver, torch)
    with pytest.raises(ConfigError, match=rf"^--device cuda was asked for, but .*{says}.*Use --device cpu"):
        detect_device("cuda")


def test_a_gpu_that_is_not_used_is_mentioned(machine: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        machine(None)
        assert detect_device().kind == "cpu"
        assert not caplog.records, "there is none"
        machine(Driver(version=12040))
        assert detect_device().kind == "cpu"
    assert "Running on the CPU, because the NVIDIA driver is too old" in caplog.text


@pytest.mark.parametrize(
    ("driver", "cards", "visible", "said"),
    [
        (Driver(init_status=803), False, None, True),
        (Driver(init_status=802), True, "0", True),
        (Driver(init_status=803), True, "-1", False),
        (Driver(init_status=34), False, None, False),
        (Driver(init_status=100), False, None, False),
        (Driver(init_status=100), True, "GPU-xyz", True),
        (Driver(init_status=100), True, "", False),
        (Driver(count=0), True, "7", True),
        (Driver(count=0), False, None, False),
    ],
)
def test_a_broken_driver_is_mentioned_and_a_gpu_that_is_not_wanted_is_not(
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    driver: Driver,
    cards: bool,
    visible: str | None,
    said: bool,
) -> None:
    machine(driver)
    monkeypatch.setattr(device, "_has_cards", lambda: cards)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with caplog.at_level(logging.WARNING):
        assert detect_device().kind == "cpu"
    assert ("Running on the CPU, because" in caplog.text) is said
    assert (device.gpu_problem() is not None) is said
    if said and visible is not None:
        assert f"CUDA_VISIBLE_DEVICES is {visible!r}" in caplog.text


def test_an_older_driver_of_the_same_major_version_is_fine(machine: Any) -> None:
    machine(Driver(version=13000), (13, 2))
    assert detect_device("cuda").kind == "cuda"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", (13, 0)),
        ("cuda = '12.8'\n", (12, 8)),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", (0, 0)),
    ],
)
def test_the_cuda_version_of_torch_is_read_without_importing_it(
    text: str, version: tuple[int, int], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(text)
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert torch_cuda_version() == version


def test_without_torch_there_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    assert torch_cuda_version() is None
