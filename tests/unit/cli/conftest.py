from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.octavo_process import write_script
from tests.support.tiny_checkpoint import write_tiny_checkpoint

ANSWER = "hello world"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder without weights."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="session")
def engine_flags(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that make any command answer ANSWER in an instant."""
    script = write_script(tmp_path_factory.mktemp("script") / "script.json", tiny, ANSWER)
    return ["--model", str(tiny), "--load-format", "dummy", "--device", "cpu", "--debug-scripted-model", str(script)]
