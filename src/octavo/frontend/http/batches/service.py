"""The batch side of one application: its store, opened on first use, and its runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from octavo.frontend.http.batches.runner import BatchRunner, PostAs
from octavo.frontend.http.batches.store import DATABASE, BatchStore
from octavo.frontend.http.settings import ServerSettings


class BatchService:
    """Without a state folder files and batches last as long as this object, in a temporary one.

    Args:
        post: sends a line's request.
        busy: whether live requests wait for the engine.
        others: several API servers share the folder, of which one runs batches; this tells it that there is something to do.
    """

    def __init__(self, settings: ServerSettings, post: PostAs, busy: Callable[[], bool], others: Callable[[], None] | None = None) -> None:
        self._folder = Path(settings.state_dir) if settings.state_dir is not None else None
        self._max_bytes = settings.file_store_bytes
        self._concurrency = settings.batch_concurrency
        self._post = post
        self._busy = busy
        self._others = others
        self.runs = True
        """Batches are run here."""
        self._store: BatchStore | None = None
        self._runner: BatchRunner | None = None

    @property
    def store(self) -> BatchStore:
        if self._store is None:
            self._store = BatchStore(self._folder, max_bytes=self._max_bytes, sweep=self._others is None)
        return self._store

    def start(self) -> None:
        """Go on with what an earlier server left unfinished."""
        if self.runs and self._folder is not None and (self._folder / DATABASE).exists():
            self.wake()

    def wake(self) -> None:
        """There is a new batch, or one has been changed."""
        if not self.runs:
            if self._others is not None:
                self._others()
            return
        if self._runner is None:
            self._runner = BatchRunner(self.store, self._post, self._busy, self._concurrency)
        self._runner.wake()

    def woken(self) -> bytes:
        """Another API server says that there is something to do."""
        if self.runs:
            self.wake()
        return b""

    async def stop(self) -> None:
        """Interrupt what runs, so that none of it fails for want of an engine; the next start goes on with it."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.close()

    async def close(self) -> None:
        await self.stop()
        if self._store is not None:
            self._store.close()
            self._store = None
