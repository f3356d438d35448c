"""What has to be set before anything is imported."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    # Read when Triton itself is imported, which other tests' libraries may do first: without a GPU its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Servers that tests start keep their files here instead of in the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("state-home")
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder
