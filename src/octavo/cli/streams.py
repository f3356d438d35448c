"""The standard streams of a command, so that it does not depend on who reads them."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO, cast


class _Unfailing:
    """A text stream that drops what it cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_standard_streams() -> None:
    """Have all three, also where they were closed (`2>&-`): else the next file or socket takes their number, and gets what libraries write
    there. What is said on stderr is no reason to end a server: it goes nowhere where its disk is full."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = cast("TextIO", _Unfailing(sys.stderr or open(2, "w", closefd=False)))  # noqa: SIM115
