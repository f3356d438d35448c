"""Progress on stderr: bars on a terminal, a few plain lines anywhere else. Owns nothing else of the terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self


class JobProgress:
    """Counts finished jobs. On a terminal one bar with a rate; else a line at most every ten seconds and one at the end."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._failed = 0
        self._tokens = 0
        self._start = self._last_line = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total, note="")
        return self

    def advance(self, *, tokens: int = 0, failed: bool = False) -> None:
        """One more job has ended."""
        self._done += 1
        self._tokens += tokens
        self._failed += failed
        if self._bar is not None:
            self._bar.update(self._task, advance=1, note=self._note())
        elif time.monotonic() - self._last_line >= 10 and self._done < self._total:
            self._last_line = time.monotonic()
            self._line()

    def _note(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = f"{self._tokens / seconds:.0f} tokens/s" if self._tokens else f"{self._done / seconds:.1f}/s"
        return rate + (f", {self._failed} failed" if self._failed else "")

    def _line(self) -> None:
        print(f"{self._what}: {self._done} of {self._total} ({self._note()})", file=sys.stderr, flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        else:
            self._line()


class LoadingProgress:
    """Draws the phases of start-up from an engine's progress messages: call it with (phase, done, total)."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}
        self._seen: set[str] = set()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __call__(self, phase: str, done: int, total: int) -> None:
        """`total` 0: how much there is to do is unknown."""
        if self._bar is None:
            if phase not in self._seen:
                self._seen.add(phase)
                print(f"{phase} ...", file=sys.stderr, flush=True)
            return
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=total or None)
        self._bar.update(self._tasks[phase], completed=done, total=total or None)

    def close(self) -> None:
        """Take the bars off the screen. Calling it again does nothing."""
        if self._bar is not None:
            self._bar.stop()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
