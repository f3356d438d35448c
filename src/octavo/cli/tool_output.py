"""Another program's progress, read out of what it prints: one bar instead of hundreds of lines, and its last words if it fails."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final

KEPT_LINES: Final = 40
"""Of what it says besides, for when it fails."""
_BAR: Final = re.compile(r"^(?P<what>.*?):?\s*\d+%\|[^|]*\|\s*(?P<done>\d+)/(?P<total>\d+)\b")
_STAGE: Final = re.compile(r"^\((?P<stage>\d+)/(?P<stages>\d+)\):\s*")


class ToolProgress:
    """Draws what a tool's own bars (tqdm's) say: on a terminal as a bar, else as a line every ten seconds."""

    def __init__(self) -> None:
        self.said: deque[str] = deque(maxlen=KEPT_LINES)
        self._last_line = -10.0
        self._bar: Any = None
        self._task: Any = None

    def take(self, line: str) -> None:
        """A line of the tool's output; that of a bar is whatever it drew before it went back to its beginning."""
        if (bar := _BAR.match(line)) is None:
            if line.strip():
                self.said.append(line)
            return
        what, done, total = bar["what"].strip(), int(bar["done"]), max(1, int(bar["total"]))
        if (stage := _STAGE.match(what)) is not None:
            # Several bars a stage: the stages are what is counted.
            what = what[stage.end() :]
            self._draw(what, int(stage["stage"]) - 1, int(stage["stages"]), f"{done} of {total}")
        else:
            self._draw(what, done, total, "")

    def _draw(self, what: str, done: int, total: int, note: str) -> None:
        if not sys.stderr.isatty():
            if time.monotonic() - self._last_line >= 10:
                self._last_line = time.monotonic()
                print(f"{what}: {done} of {total}" + (f" ({note})" if note else ""), file=sys.stderr, flush=True)
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(what, total=total, note=note)
        self._bar.update(self._task, description=what, completed=done, total=total, note=note)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def lines_of(stream: IO[bytes]) -> Iterator[str]:
    """Lines as they come, also those that end in a carriage return."""
    rest = b""
    while chunk := stream.read1(4096):  # type: ignore[attr-defined]  # of a buffered reader, which a pipe's end is
        *whole, rest = re.split(rb"[\r\n]", rest + chunk)
        yield from (line.decode("utf-8", "replace") for line in whole)
    if rest:
        yield rest.decode("utf-8", "replace")


def run_tool(command: Sequence[str]) -> int:
    """Run a program with a bar for its progress. If it fails, what it said last is printed.

    Returns:
        its exit code.
    """
    progress = ToolProgress()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL) as tool:
        assert tool.stdout is not None
        try:
            for line in lines_of(tool.stdout):
                progress.take(line)
        except BaseException:
            tool.kill()
            raise
        finally:
            progress.close()
    if tool.returncode:
        print("\n".join(progress.said), file=sys.stderr, flush=True)
    return tool.returncode
