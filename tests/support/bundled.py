"""Where tests find the bundled model, if this machine has it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_CACHED = Path("~/.cache/octavo/models/SmolLM2-135M-Instruct.Q4_1.gguf")


def bundled_model_path() -> str:
    """The bundled GGUF file; skips the test when there is none."""
    path = Path(os.environ.get("OCTAVO_TEST_MODEL") or _CACHED).expanduser()
    if not path.is_file():
        pytest.skip(f"no bundled model at {path} (set OCTAVO_TEST_MODEL)")
    return str(path)
