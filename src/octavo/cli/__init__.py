"""The `octavo` command: one module a command, flags generated from the settings classes.

Nothing heavy is imported before a command runs, so that `octavo --help` answers at once.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    codes: list[int] = []
    if argv is None:
        atexit.register(_end_as_said, codes)  # the first that is registered, and so the last that is called
    code = _main(argv)
    codes.append(code)
    return code


def _main(argv: Sequence[str] | None) -> int:
    try:  # around the imports too: Ctrl-C is no error, however early it comes
        from octavo.cli.app import run
        from octavo.cli.streams import keep_standard_streams

        keep_standard_streams()
        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return INTERRUPTED


def _end_as_said(codes: list[int]) -> None:
    """Python remembers a Ctrl-C that came into an `exec`, which making a dataclass is, and sends itself that signal again when it ends."""
    if codes == [INTERRUPTED]:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)
