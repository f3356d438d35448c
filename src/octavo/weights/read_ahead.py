"""Tensors of a file on their way to a device before their turn: while one is packed there, the next are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import torch

from octavo.weights.parallel_read import Arrival, ParallelReader
from octavo.weights.stored import StoredTensor

T = TypeVar("T")

AHEAD_BYTES: Final = 256 << 20
"""On their way at most, beside what is read together with the tensor whose turn it is."""
AHEAD_TENSORS: Final = 64
"""The same, counted."""
LARGEST_BYTES: Final = 256 << 20
"""Of a tensor that is read ahead. Larger ones are better read to where they stay: little of their time is spent on waiting for the last
piece, and they would take their memory twice."""
RUN_BYTES: Final = 64 << 20
"""Read together at most, if they are several."""


def in_advance(items: Iterable[tuple[T, int]]) -> Iterator[T]:
    """Items, each made before those in front of it are asked for: as many as `AHEAD_BYTES` and `AHEAD_TENSORS` allow.

    Args:
        items: and the bytes that are on their way from when each is made.
    """
    waiting: deque[tuple[T, int]] = deque()
    ahead = 0
    for item, nbytes in items:
        waiting.append((item, nbytes))
        ahead += nbytes
        while ahead > AHEAD_BYTES or len(waiting) > AHEAD_TENSORS:
            ahead -= waiting[0][1]
            yield waiting.popleft()[0]
    while waiting:
        yield waiting.popleft()[0]


@dataclass(frozen=True)
class Entry:
    """Where a tensor of a file lies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass
class _Run:
    """Tensors that lie one behind the other."""

    begin: int
    end: int
    entries: list[Entry] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.end += entry.nbytes


class ReadAhead:
    """What of one file is read before its turn: small tensors with their neighbours.

    Args:
        entries: of the tensors that the reader's device will want, in the order of their turns.
    """

    def __init__(self, path: str, entries: Sequence[Entry], reader: ParallelReader) -> None:
        self._path = path
        self._reader = reader
        self._run_of: dict[str, _Run] = {}
        self._arrivals: dict[str, Arrival] = {}
        open_at: dict[int, _Run] = {}
        for entry in entries:
            if not 0 < entry.nbytes <= LARGEST_BYTES:
                continue
            run = open_at.pop(entry.begin, None)
            if run is None or run.end + entry.nbytes - run.begin > RUN_BYTES:
                run = _Run(entry.begin, entry.begin)
            run.add(entry)
            self._run_of[entry.name] = open_at[run.end] = run

    def arriving(self, stored: StoredTensor) -> tuple[StoredTensor, int]:
        """`stored` as it comes to the device, where it does, and the bytes that are on their way from now on."""
        if (run := self._run_of.pop(stored.name, None)) is None:
            return stored, 0
        nbytes = 0
        if stored.name not in self._arrivals:
            nbytes = run.end - run.begin
            places = [torch.empty(entry.shape, dtype=entry.dtype, device=self._reader.device) for entry in run.entries]
            arrivals = self._reader.begin(self._path, run.begin, places)
            self._arrivals.update(zip((entry.name for entry in run.entries), arrivals, strict=True))
        return _arriving(stored, self._arrivals.pop(stored.name)), nbytes


def _arriving(stored: StoredTensor, arrival: Arrival) -> StoredTensor:
    def raw(device: torch.device) -> torch.Tensor:
        return arrival.wait().to(device)

    if stored.copy_region is None:  # of a dtype that is refused as a weight
        return replace(stored, raw=raw)

    def copy_into(destination: torch.Tensor) -> None:
        destination.copy_(arrival.wait())

    def copy_region(region: tuple[slice, ...], destination: torch.Tensor) -> None:
        destination.copy_(arrival.wait()[region])

    return replace(stored, copy_into=copy_into, copy_region=copy_region, raw=raw)
