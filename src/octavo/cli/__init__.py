"""The `octavo` command: one module a command, flags generated from the settings classes.

Nothing heavy is imported before a command runs, so that `octavo --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    from octavo.cli.app import run
    from octavo.cli.streams import keep_standard_streams

    keep_standard_streams()
    return run(list(sys.argv[1:] if argv is None else argv))
