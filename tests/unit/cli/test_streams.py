"""A command whose standard streams are closed, or cannot be written to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from octavo.cli.streams import keep_standard_streams
keep_standard_streams()
print("said", file=sys.stderr, flush=True)
sys.stderr.isatty()
read, write = os.pipe()
assert min(read, write) > 2, (read, write)
assert all(os.get_inheritable(n) for n in range(3))
open(sys.argv[1], "w").write("done")
os._exit(0)
"""


@pytest.mark.parametrize("how", ["2>&-", "2>/dev/full", "<&- >&- 2>&-", ""])
def test_streams_that_are_closed_or_full_do_not_end_it(tmp_path: object, how: str) -> None:
    out = f"{tmp_path}/out"
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" "$2" {how}', sys.executable, PROGRAM, out], check=False, capture_output=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    with open(out) as file:
        assert file.read() == "done"
    assert (b"said" in done.stderr) == (how == "")
