"""Counts in shared memory: what one process writes, all others read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import octavo
from octavo.frontend.http.api_servers.load_board import LoadBoard

OTHER = """
import sys
from octavo.frontend.http.api_servers.load_board import LoadBoard
board = LoadBoard(int(sys.argv[1]), 3)
board.set(2, 1, board.total(1) + 40)
board.close()
"""


def test_sums_over_processes() -> None:
    board = LoadBoard.create(3)
    board.set(0, 0, 5)
    board.set(0, 1, 1)
    board.set(1, 1, 2)
    environment = {**os.environ, "PYTHONPATH": str(Path(octavo.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", OTHER, str(board.fd)], pass_fds=[board.fd], env=environment, check=True)
    assert board.total(0) == 5
    assert board.total(1) == 46
    board.clear(2)
    assert board.total(1) == 3
    board.close()
