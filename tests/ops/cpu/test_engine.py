"""The threads of the compiled kernels: what happens where the system has no more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from octavo.ops.cpu import abi

ASK_FOR_TOO_MANY = """
import resource
from octavo.errors import ConfigError
from octavo.ops.cpu import abi
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 29),) * 2)  # room for some 60 stacks
try:
    abi.Engine(100_000)
except ConfigError as e:
    print(e)
abi.Engine(2)
"""


@pytest.mark.skipif(abi.library() is None, reason="the compiled kernels were not built")
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_more_threads_than_the_system_starts_is_an_error_and_leaves_none_behind() -> None:
    done = subprocess.run([sys.executable, "-c", ASK_FOR_TOO_MANY], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (
        0,
        "The system does not start 100000 threads for the CPU kernels. Ask for fewer with --threads.\n",
    ), done.stderr
