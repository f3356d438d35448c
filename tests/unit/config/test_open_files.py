"""`ulimit -n`: a sentence before a library ends the process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.octavo_process import environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits files as Linux does")


def limited(limit: str, *argv: str) -> subprocess.CompletedProcess[str]:
    script = f'ulimit {limit}; exec "$@"'
    return subprocess.run(["bash", "-c", script, "-", *argv], capture_output=True, text=True, timeout=60, env=environment(), check=False)


@pytest.mark.parametrize("files", [8, 12, 20, 63])
def test_too_few_files_are_said_in_a_line(files: int) -> None:
    done = limited(f"-n {files}", sys.executable, "-m", "octavo", "complete", "--model", "/nothing.gguf", "hi")
    assert done.returncode == 1
    assert done.stderr.startswith(f"octavo: error: Each process may have {files} files open at most (ulimit -n), and Octavo needs 64")
    assert len(done.stderr.splitlines()) == 1


def test_a_program_of_the_users_is_told_too() -> None:
    done = limited("-n 20", sys.executable, "-c", "from octavo import LLM; LLM('/nothing.gguf')")
    assert "ConfigError: Each process may have 20 files open at most (ulimit -n)" in done.stderr


def test_a_limit_that_may_be_raised_is() -> None:
    shown = (
        "import resource; from octavo.config import open_files; open_files.check(); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    assert limited("-Sn 20", sys.executable, "-c", shown).stdout.split() == ["64"]
    assert limited("-n 100", sys.executable, "-c", shown).stdout.split() == ["100"]
