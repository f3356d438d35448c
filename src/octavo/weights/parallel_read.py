"""Bytes of a file straight to a device: several threads read pieces into pinned memory, and copy each while the next is read.

One thread that faults in the pages of a mapped file reaches a fraction of what the disk cache and the bus can do.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final

import torch

from octavo.errors import CheckpointError

READERS: Final = 8
PIECE_BYTES: Final = 4 << 20
BUFFERS: Final = 2
"""Pinned pieces a reader: one is filled while the other is on its way."""


class _Reader:
    """What one thread works with."""

    def __init__(self, device: torch.device, piece: int) -> None:
        cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(piece, dtype=torch.uint8, pin_memory=cuda) for _ in range(BUFFERS)]
        self._sent: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._turn = 0

    def fetch(self, path: str, offset: int, destination: torch.Tensor, ready: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """File bytes from `offset` to `destination` ([bytes] uint8, at most a piece); what to wait for before reading them.

        Args:
            ready: when the destination may be written.
        """
        turn = self._turn
        self._turn = (turn + 1) % BUFFERS
        if (sent := self._sent[turn]) is not None:
            sent.synchronize()
        buffer = self._buffers[turn][: len(destination)]
        _read_exactly(path, offset, buffer)
        if self.stream is None or ready is None:
            destination.copy_(buffer)
            return None
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            destination.copy_(buffer, non_blocking=True)
            self._sent[turn] = self.stream.record_event()
        return self._sent[turn]


class Arrival:
    """A tensor whose bytes are being read."""

    def __init__(self, tensor: torch.Tensor, pieces: list[Future[torch.cuda.Event | None]]) -> None:
        self._tensor = tensor
        self._pieces = pieces

    def wait(self) -> torch.Tensor:
        """The tensor, filled by when the device's current stream gets there.

        Raises:
            CheckpointError: the file cannot be read, or ends too early.
        """
        for piece in self._pieces:
            if (arrived := piece.result()) is not None:
                torch.cuda.current_stream(self._tensor.device).wait_event(arrived)
        self._pieces = []
        return self._tensor


class ParallelReader:
    """Reads parts of files into tensors of one device. A context manager; the tensors are filled when it is left, or when the
    device's current stream gets there.

    Args:
        piece: bytes that a thread reads at once.
    """

    def __init__(self, device: torch.device, *, threads: int = READERS, piece: int = PIECE_BYTES) -> None:
        self.device = device
        self._piece = piece
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="octavo-read")

    def __enter__(self) -> ParallelReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the pinned buffers go with us

    def read(self, path: str, offset: int, destination: torch.Tensor) -> None:
        """Fill `destination`, contiguous and of the file's own dtype, with the bytes from `offset` on.

        Raises:
            CheckpointError: the file cannot be read, or ends too early.
        """
        self.begin(path, offset, destination).wait()

    def begin(self, path: str, offset: int, destination: torch.Tensor) -> Arrival:
        """`read`, to be waited for later. Until then nothing else may touch the destination."""
        raw = destination.view(-1).view(torch.uint8)
        ready = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        begins = range(0, len(raw), self._piece)
        pieces = [self._pool.submit(self._fetch, path, offset + b, raw[b : b + self._piece], ready) for b in begins]
        return Arrival(destination, pieces)

    def _fetch(self, path: str, offset: int, destination: torch.Tensor, ready: torch.cuda.Event | None) -> torch.cuda.Event | None:
        reader: _Reader | None = getattr(self._local, "reader", None)
        if reader is None:
            reader = self._local.reader = _Reader(self.device, self._piece)
        return reader.fetch(path, offset, destination, ready)


def _read_exactly(path: str, offset: int, buffer: torch.Tensor) -> None:
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            while view:
                count = os.preadv(file, [view], offset)
                if not count:
                    raise CheckpointError(f"{path}: ends before byte {offset + len(view)}. Download it again.")
                view, offset = view[count:], offset + count
        finally:
            os.close(file)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read at byte {offset}: {e}") from None
