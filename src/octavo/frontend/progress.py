"""The progress bar of offline generation: prompts done, tokens a second. On stderr, and only where somebody looks."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

from octavo.frontend.outputs import FinishedRequest

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class GenerationProgress:
    """A context manager around one call.

    Args:
        total: prompts.
        wanted: True always shows it, False never, None when stderr is a terminal.
    """

    def __init__(self, total: int, title: str, wanted: bool | None) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._tokens = 0
        self._began = time.monotonic()
        if total and (wanted or (wanted is None and sys.stderr.isatty())):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(title, total=total, rate="")

    def finished(self, request: FinishedRequest) -> None:
        self.advance(request.num_output_tokens)

    def advance(self, tokens: int) -> None:
        """One more prompt is done, with `tokens` tokens of output."""
        self._tokens += tokens
        if self._bar is not None and self._task is not None:
            seconds = max(1e-9, time.monotonic() - self._began)
            self._bar.update(self._task, advance=1, rate=f"{self._tokens / seconds:.0f} tok/s")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
