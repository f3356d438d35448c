"""The check of all levels that runs without Python (on emulated machines) keeps step with the interface of the kernels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_it_compiles_against_the_interface() -> None:
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-I", str(ROOT / "src/octavo/ops/cpu/native")]
    done = subprocess.run([str(COMPILER), *flags, str(HERE / "native/levels.cpp")], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
