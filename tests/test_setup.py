"""The set-up script's choices. What it installs is proven by `make serve` and `make test` themselves."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_torch_that_is_tried_first(bootstrap: ModuleType) -> None:
    plain = [bootstrap.TORCH]
    cpu = [bootstrap.TORCH, "--index-url", bootstrap.CPU_INDEX]
    assert bootstrap.torch_sources(gpu=True, default_is_cpu=False, environment={}) == [plain]
    assert bootstrap.torch_sources(gpu=False, default_is_cpu=True, environment={}) == [plain]
    assert bootstrap.torch_sources(gpu=False, default_is_cpu=False, environment={}) == [cpu, plain]
    mirror = {"TORCH_SPEC": "torch==2.10.0", "TORCH_INDEX": "https://mirror.example/simple"}
    assert bootstrap.torch_sources(gpu=True, default_is_cpu=False, environment=mirror) == [
        ["torch==2.10.0", "--index-url", "https://mirror.example/simple"]
    ]


def test_a_gpu_counts_only_if_its_driver_answers(bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not bootstrap.has_gpu()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    assert not bootstrap.has_gpu()
    tool.write_text("#!/bin/sh\nexit 0\n")
    assert bootstrap.has_gpu()


def test_an_unsuitable_python_is_passed_over(bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, good = tmp_path / "python3.13", tmp_path / "python3.11"
    old.write_text("#!/bin/sh\nexit 1\n")  # as a version manager's stub for a version that is not installed
    good.symlink_to(sys.executable)
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bootstrap.sys, "executable", str(old))
    assert bootstrap.find_python() == str(good)
    good.unlink()
    with pytest.raises(bootstrap.SetupError, match=r"needs Python 3\.11, 3\.12 or 3\.13"):
        bootstrap.find_python()


def test_the_set_up_script_runs_on_old_pythons() -> None:
    """It has to start on the Python that is there to say that this one is too old."""
    import ast

    ast.parse((ROOT / "scripts" / "bootstrap.py").read_text(), feature_version=(3, 8))


def test_make_targets_exist() -> None:
    for target in ("serve", "test", "lint", "bench", "gpu-test", "gpu-bench", "docs", "clean"):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ)
        assert done.returncode == 0, done.stderr


def test_make_serve_passes_port_model_and_flags_on() -> None:
    command = ["make", "-n", "serve", "PORT=8123", "MODEL=org/name", "ARGS=--max-model-len 4k"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "octavo serve org/name --port 8123 --max-model-len 4k" in done.stdout
