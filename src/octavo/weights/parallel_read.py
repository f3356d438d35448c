"""Bytes of a file straight to a device: several threads read pieces into pinned memory, and copy each while the next is read.

One thread that faults in the pages of a mapped file reaches a fraction of what the disk cache and the bus can do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final

import torch

from octavo.errors import CheckpointError

READERS: Final = 8
PIECE_BYTES: Final = 16 << 20
"""Large, since what threads do for each piece takes turns with whoever packs weights meanwhile."""
BUFFERS: Final = 2
"""Pinned pieces a reader: one is filled while the other is on its way."""


class _Reader:
    """What one thread works with."""

    def __init__(self, device: torch.device, piece: int) -> None:
        self._pinned = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._pinned else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)  # this thread's
        self._piece = piece
        self._buffers: list[tuple[torch.Tensor, memoryview]] = []
        self._sent: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._turn = 0

    def fetch(
        self, file: int, path: str, offset: int, destinations: Sequence[torch.Tensor], ready: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """File bytes from `offset` on to destinations ([bytes] uint8, a piece together at most); what to wait for before reading them.

        Args:
            ready: when the destinations may be written.
        """
        turn = self._turn
        self._turn = (turn + 1) % BUFFERS
        if (sent := self._sent[turn]) is not None:
            sent.synchronize()
        if turn == len(self._buffers):
            buffer = torch.empty(self._piece, dtype=torch.uint8, pin_memory=self._pinned)
            self._buffers.append((buffer, memoryview(buffer.numpy())))  # type: ignore[arg-type]
        buffer, view = self._buffers[turn]
        _read_exactly(file, path, offset, view[: sum(map(len, destinations))])
        if self._stream is not None and ready is not None:
            self._stream.wait_event(ready)
        begin = 0
        for destination in destinations:
            destination.copy_(buffer[begin : begin + len(destination)], non_blocking=True)
            begin += len(destination)
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._sent[turn] = event
        return event


class Arrival:
    """A tensor whose bytes are being read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._pieces: list[Future[torch.cuda.Event | None]] = []

    def comes_with(self, piece: Future[torch.cuda.Event | None]) -> None:
        self._pieces.append(piece)

    def wait(self) -> torch.Tensor:
        """The tensor, filled by when the device's current stream gets there.

        Raises:
            CheckpointError: the file cannot be read, or ends too early.
        """
        if arrived := [event for piece in self._pieces if (event := piece.result()) is not None]:
            stream = torch.cuda.current_stream(self._tensor.device)
            for event in arrived:
                stream.wait_event(event)
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
        self._files: dict[str, int] = {}

    def __enter__(self) -> ParallelReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the pinned buffers go with us

    def read(self, path: str, offset: int, destination: torch.Tensor) -> None:
        """Fill `destination`, contiguous and of the file's own dtype, with the bytes from `offset` on.

        Raises:
            CheckpointError: the file cannot be read, or ends too early.
        """
        self.begin(path, offset, [destination])[0].wait()

    def begin(self, path: str, offset: int, destinations: Sequence[torch.Tensor]) -> list[Arrival]:
        """`read` for what lies one behind the other in the file, to be waited for later. Until then nothing else may touch it.

        Raises:
            CheckpointError: the file cannot be opened.
        """
        file = self._opened(path, offset)
        ready = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        arrivals = [Arrival(destination) for destination in destinations]
        parts: list[tuple[Arrival, torch.Tensor]] = []
        room = self._piece

        def send(begin: int) -> None:
            piece = self._pool.submit(self._fetch, file, path, begin, [part for _, part in parts], ready)
            for arrival, _ in parts:
                arrival.comes_with(piece)
            parts.clear()

        for arrival, destination in zip(arrivals, destinations, strict=True):
            raw = destination.view(-1).view(torch.uint8)
            while len(raw):
                part, raw = raw[:room], raw[room:]
                parts.append((arrival, part))
                room -= len(part)
                if not room:
                    send(offset)
                    offset, room = offset + self._piece, self._piece
        if parts:
            send(offset)
        return arrivals

    def _opened(self, path: str, offset: int) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY)
            except OSError as e:
                raise _unreadable(path, offset, e) from None
        return self._files[path]

    def _fetch(
        self, file: int, path: str, offset: int, destinations: Sequence[torch.Tensor], ready: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        reader: _Reader | None = getattr(self._local, "reader", None)
        if reader is None:
            reader = self._local.reader = _Reader(self.device, self._piece)
        return reader.fetch(file, path, offset, destinations, ready)


def _read_exactly(file: int, path: str, offset: int, view: memoryview) -> None:
    try:
        while view:
            count = os.preadv(file, [view], offset)
            if not count:
                raise CheckpointError(f"{path}: ends before byte {offset + len(view)}. Download it again.")
            view, offset = view[count:], offset + count
    except OSError as e:
        raise _unreadable(path, offset, e) from None


def _unreadable(path: str, offset: int, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read at byte {offset}: {error}")
