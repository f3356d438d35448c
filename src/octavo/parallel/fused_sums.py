"""`FusedSums`: sums over the GPUs of one host, added to the residual stream and normed in the same kernel (`ops.cuda.sum_norm`).

Behind almost every sum of a step stand an addition and a norm. Apart, they are three kernels, which wait for each other; and the
sum's own kernel waits for the other GPUs three times. This one waits once, for what the others write into this GPU's memory.

That memory is taken once, of a size for the model's rows, and never moved: so it can be captured. It is torch's symmetric memory, like
that of `symmetric.SymmetricSums`, which is needed for this: what this does not take goes there. Multicast is not used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from octavo.errors import EngineDead
from octavo.ops.cuda import compiled, sum_norm
from octavo.ops.cuda.compiler import architecture
from octavo.ops.cuda.sum_norm import Form, Place, Region
from octavo.ops.reference.norm import rms_norm
from octavo.ops.triton.launch import compiles_only
from octavo.ops.triton.turns import EARLY, overlap
from octavo.parallel.group import Rows
from octavo.parallel.sum_table import FusedLimits, fused_limits
from octavo.parallel.symmetric import share, side_stream

REPLAYS = 20
POLL_SECONDS = 0.001
EPS = 1e-5
"""Of the test."""


@dataclass(frozen=True)
class _Case:
    """Of the test: what this rank has, and what comes out."""

    begin: torch.Tensor
    """The residual stream."""
    x: torch.Tensor
    weight: torch.Tensor
    once: torch.Tensor
    """The stream with x added."""
    twice: torch.Tensor
    """... and then x + x."""


@dataclass(frozen=True)
class _Way:
    form: Form
    region: Region


class FusedSums:
    """Implements `small_sums.Trial`.

    Args:
        group: torch's, of these GPUs.
        first: the number, among all ranks of the engine, of the group's first; for people.
        reference: adds up in the way that is known to work; for the test.
        limits: None takes those of the table.
    """

    def __init__(
        self,
        group: ProcessGroup,
        rank: int,
        size: int,
        device: torch.device,
        rows: Rows,
        *,
        reference: Callable[[torch.Tensor], torch.Tensor],
        first: int = 0,
        limits: FusedLimits | None = None,
    ) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self._device = device
        self._rows = rows
        self._reference = reference
        self._first = first
        self._limits = limits
        self._patience = rows.patience
        self._regions: dict[bool, Region] = {}
        self._buffer: torch.Tensor | None = None
        self._handle: Any = None
        self._place: Place | None = None
        self._side: torch.cuda.Stream | None = None
        """To tell kernels that run that another rank is given up."""
        self._given_up: torch.Tensor | None = None

    @property
    def described(self) -> str:
        """For people: up to which size."""
        assert self._limits is not None
        return f"with the norm behind it in one kernel up to {self._limits.most >> 10} KiB"

    # Trying out

    def unusable(self) -> str | None:
        """See `Trial.unusable`."""
        if architecture(self._device) is None:
            return "its kernel is for Hopper GPUs, and needs NVRTC"
        if not sum_norm.takes(self._rows.dtype, self._rows.dim):
            return f"rows of {self._rows.dim} numbers of {self._rows.dtype} are not taken"
        name = torch.cuda.get_device_properties(self._device).name
        self._limits = self._limits or fused_limits(name, self._size)
        if self._limits is None or self._limits.most < self._row_bytes:
            return f"measured as slower between {self._size} x {name}"
        return None

    @property
    def _row_bytes(self) -> int:
        return self._rows.dim * self._rows.dtype.itemsize

    def open(self) -> str | None:
        """See `Trial.open`. All ranks have zeros when it has gone well on all."""
        assert self._limits is not None
        words = Region(0, 2 * self._row_bytes, self._size, max(1, self._limits.words // self._row_bytes))
        plain = Region(words.end, self._row_bytes, self._size, max(1, self._limits.most // self._row_bytes))
        self._regions = {True: words, False: plain}
        for way in self._ways():
            compiled.prepare(way.form, self._device)
        for way in self._ways():
            compiled.kernel(way.form, self._device)
        self._buffer, self._handle = share(plain.end, self._group, self._device)
        self._buffer.zero_()
        epochs = torch.zeros(1 + max(words.rows, plain.rows), dtype=torch.int32, device=self._device)
        missing = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        memory = tuple(self._handle.get_buffer(rank, (plain.end,), torch.uint8).data_ptr() for rank in range(self._size))
        self._place = Place(self._rank, memory, epochs, missing)
        self._side, self._given_up = side_stream(self._device), torch.ones(1, dtype=torch.int32, pin_memory=True)
        torch.cuda.synchronize(self._device)
        return None

    def _ways(self) -> list[_Way]:
        """That some number of rows takes."""
        counts = range(1, self._regions[False].rows + 1)
        return list(dict.fromkeys(way for rows in counts if (way := self._way(rows)) is not None))

    def _way(self, rows: int) -> _Way | None:
        """How so many rows go; None where they do not go here. Depends on nothing that could differ between ranks."""
        assert self._limits is not None
        nbytes = rows * self._row_bytes
        if not 0 < nbytes <= self._limits.most:
            return None
        words, two_shots = nbytes <= self._limits.words, nbytes > self._limits.one_shot and rows >= self._size
        return _Way(Form(self._rows.dtype, self._rows.dim, self._size, words, two_shots), self._regions[words])

    def test(self, seconds: float) -> str | None:
        """See `Trial.test`."""
        assert self._place is not None
        cases = [self._case(rows, index) for index, rows in enumerate(self._sizes())]
        torch.cuda.synchronize(self._device)
        # The kernels end by themselves. Then others do not wait again, whatever is left.
        self._patience, deadline = seconds, time.monotonic() + 2 * seconds
        try:
            return next((wrong for case in cases if (wrong := self._test_case(case, deadline))), None)
        finally:
            self._patience = self._rows.patience

    def _sizes(self) -> list[int]:
        """The smallest and the largest number of rows of each way."""
        by_way: dict[_Way, list[int]] = {}
        for rows in range(1, self._regions[False].rows + 1):
            if (way := self._way(rows)) is not None:
                by_way.setdefault(way, []).append(rows)
        return [rows for all_rows in by_way.values() for rows in dict.fromkeys((all_rows[0], all_rows[-1]))]

    def _case(self, rows: int, seed: int) -> _Case:
        dim, dtype = self._rows.dim, self._rows.dtype

        def numbers(count: int, which: int) -> torch.Tensor:
            generator = torch.Generator(self._device).manual_seed(100 * seed + which)
            return torch.randn(count, dim, generator=generator, device=self._device).to(dtype)

        begin, x = numbers(rows, 0), numbers(rows, 2 + self._rank)
        total = self._reference(x.to(torch.float32, copy=True))
        once = (total + begin.float()).to(dtype)
        return _Case(begin, x, numbers(1, 1)[0], once, (2 * total + once.float()).to(dtype))

    def _test_case(self, case: _Case, deadline: float) -> str | None:
        """At once and in a graph, whose replays are one right after the other, as in a step."""
        begin, x, weight = case.begin, case.x, case.weight
        stream, y = begin.clone(), x.clone()
        self.add_norm(y, stream, weight, EPS)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                again, first, second = begin.clone(), x.clone(), x + x
                self.add_norm(first, again, weight, EPS)
                # Other numbers, so that what another replay has left would show.
                self.add_norm(second, again, weight, EPS)
            finally:
                graph.capture_end()
            for _ in range(REPLAYS):
                graph.replay()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                return "sums do not end"
            time.sleep(POLL_SECONDS)
        if (silent := self.silent()) is not None:
            return f"rank {silent} did not take part in a sum"
        pairs = [
            (stream, case.once),
            (y, rms_norm(case.once, weight, EPS)),
            (again, case.twice),
            (second, rms_norm(case.twice, weight, EPS)),
        ]
        wrong = next((words for got, expected in pairs if (words := _far(got, expected))), None)
        return f"{len(x)} rows are wrong: {wrong}" if wrong else None

    def close(self) -> None:
        """See `Trial.close`."""
        self._place = None
        self._handle = None
        self._buffer = None
        self._side = None

    def abandon(self) -> None:
        """From any thread: sums wait for no other rank any more, and are void."""
        if self._place is not None and self._side is not None and self._given_up is not None:
            with torch.cuda.stream(self._side):
                self._place.epochs[:1].copy_(self._given_up, non_blocking=True)
                self._side.synchronize()

    # Sums

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `TensorGroup.add_norm`."""
        rows = self._rows
        if x.shape[1] != rows.dim or not x.dtype == residual.dtype == weight.dtype == rows.dtype or self._place is None:
            return None
        way = self._way(len(x))
        if way is None:
            return None
        if not compiles_only():
            early = overlap(len(x), self._device) == EARLY
            given = sum_norm.packed(way.form, way.region, self._place, x, residual, weight, x, eps, self._patience, early=early)
            sum_norm.launch(way.form, self._device, given, len(x))
        return x, residual

    def silent(self) -> int | None:
        """The rank for which a sum was given up, if one was; of sums that have ended."""
        found = 0 if self._place is None else int(self._place.missing.item())
        return self._first + found - 1 if found else None

    def check(self) -> None:
        """After a step has ended.

        Raises:
            EngineDead: it was given up, and what it computed is worth nothing.
        """
        if (silent := self.silent()) is not None:
            raise EngineDead(f"Rank {silent} did not take part in a sum over GPUs for {self._rows.patience:g} s.")


def _far(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Sums of float32 in another order, rounded once, and norms of what may differ by that."""
    step = 4 * torch.finfo(got.dtype).eps
    far = (got.float() - expected.float()).abs() > step * (1 + expected.float().abs())
    return f"{int(far.sum())} of {got.numel()} numbers" if bool(far.any()) else None
