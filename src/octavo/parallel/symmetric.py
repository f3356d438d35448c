"""Memory that the GPUs of one host read of each other (torch's symmetric memory, over NVLink), and `SymmetricSums`: small sums through it.

One buffer a rank, which all have mapped, taken once and never moved: so its sums can be captured. A kernel waits for its like on the other
GPUs before it reads and before it ends; so the buffer is free again when it has ended. NVLink multicast is never used (`protocol.boot.NO_MULTICAST`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from octavo.errors import ConfigError
from octavo.parallel.sum_table import Limits, limits

DTYPES = (torch.bfloat16, torch.float32)
"""What the kernels add."""
ALIGNMENT = 16
"""Bytes that are read at a time."""
RANKS = (2, 4, 8)
OLDEST = (8, 0)
"""Compute capability."""
REPLAYS = 20
POLL_SECONDS = 0.001
FREE_SECONDS = 2.0
LET_GO_SECONDS = 0.0002


class _Shared:
    """How often this process has shared memory. torch numbers what the processes tell each other for it, from the start of each: one that
    has had another engine before and one that is new would wait for each other's numbers."""

    times = 0


def share(nbytes: int, group: ProcessGroup, device: torch.device) -> tuple[torch.Tensor, Any]:
    """So many bytes of this GPU that the others of a group see, and the handle of all. They all call it."""
    from torch.distributed import _symmetric_memory as symmetric

    buffer = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    _Shared.times += 1
    return buffer, symmetric.rendezvous(buffer, group)


def catch_up(smallest: Callable[[int], int], alone: Callable[[], ProcessGroup], device: torch.device) -> None:
    """Before the ranks of an engine share memory for the first time: all count from the same number. See `_Shared`.

    Args:
        smallest: of the numbers that all ranks of the engine give.
        alone: makes a group of this rank alone; called by all or by none.
    """
    least, most = smallest(_Shared.times), -smallest(-_Shared.times)
    if least == most:
        return
    group = alone()
    with contextlib.suppress(Exception):  # then they wait in vain, and do without
        while _Shared.times < most:
            share(ALIGNMENT, group, device)


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """For what is said to kernels that run: it must not be in a queue behind them, so it has another priority. Only for copies from
    pinned memory: a kernel that is used for the first time may be loaded only when nothing runs."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class Signals:
    """What kernels wait for that use a piece of shared memory; of those that would wait for ever, the way out.

    A kernel puts a 1 in each rank's pad, once there is a 0, and takes a 1 of each rank out of its own. Here it gets what it waits for.
    """

    def __init__(self, handle: Any, device: torch.device) -> None:
        self._handle = handle  # its pads do not own what they show
        ranks = range(handle.world_size)
        self._own, *self._others = (handle.get_signal_pad((handle.rank + further) % len(ranks)).view(torch.int32) for further in ranks)
        given = torch.ones_like(self._own, device="cpu")
        # What some kernels put into their own pad they take out of it. They need both numbers there, in turns.
        without = given.clone()
        without[handle.rank :: handle.world_size] = 0
        pinned = device.type == "cuda"
        self._given = itertools.cycle([numbers.pin_memory() if pinned else numbers for numbers in (given, without)])
        self._taken = torch.zeros_like(given, pin_memory=pinned)
        self._stream = side_stream(device) if pinned else None
        self._closed = threading.Event()

    def let_go(self) -> None:
        """Of one signal each or of none: to be called until all have gone. From any thread, but from one."""
        with torch.cuda.stream(self._stream):
            self._own.copy_(next(self._given), non_blocking=True)
            for pad in self._others:
                pad.copy_(self._taken, non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()

    def let_go_for_good(self) -> None:
        """Nobody waits any more, until `close`. Does not wait for that either."""
        threading.Thread(target=self._keep_letting_go, name="octavo-signals", daemon=True).start()

    def _keep_letting_go(self) -> None:
        while not self._closed.wait(LET_GO_SECONDS):
            self.let_go()

    def close(self) -> None:
        self._closed.set()


class SymmetricSums:
    """Implements `Candidate`.

    Args:
        group: torch's, of these GPUs.
        reference: adds up in the way that is known to work; for the test.
        smallest: of the numbers that all ranks of the group give, through the CPU.
        limits: None takes those of the table.
        otherwise: what takes the rest, for people.
    """

    def __init__(
        self,
        group: ProcessGroup,
        rank: int,
        size: int,
        device: torch.device,
        *,
        reference: Callable[[torch.Tensor], torch.Tensor],
        smallest: Callable[[int], int],
        limits: Limits | None = None,
        otherwise: str = "NCCL",
    ) -> None:
        self._group = group
        self._name = group.group_name
        self._rank = rank
        self._size = size
        self._device = device
        self._reference = reference
        self._smallest = smallest
        self._limits = limits
        self._otherwise = otherwise
        self._views: dict[torch.dtype, torch.Tensor] = {}
        """The buffer, as numbers of each type."""
        self._signals: Signals | None = None

    @property
    def described(self) -> str:
        assert self._limits is not None
        one, two = self._limits.one_shot, self._limits.two_shot
        further = f", in two shots up to {two >> 10} KiB" if two > one else ""
        return f"symmetric memory in one shot up to {one >> 10} KiB{further}, {self._otherwise} above"

    # Trying out

    def unusable(self) -> str | None:
        """See `Candidate.unusable`."""
        here = zlib.crc32(_host_id())
        # Both are asked by all, whatever the first says: somebody else would wait for ever.
        least, most = self._smallest(here), -self._smallest(-here)
        if self._size not in RANKS:
            return f"symmetric memory is for {', '.join(map(str, RANKS))} GPUs, not {self._size}"
        if least != most:
            return "the ranks that share layers are on several hosts"
        if not all(hasattr(torch.ops.symm_mem, name) for name in ("one_shot_all_reduce_copy_out", "two_shot_all_reduce_out")):
            return f"torch {torch.__version__} has no symmetric memory"
        properties = torch.cuda.get_device_properties(self._device)
        if (properties.major, properties.minor) < OLDEST:
            return f"{properties.name} is older than compute capability {OLDEST[0]}.{OLDEST[1]}"
        self._limits = self._limits or limits(properties.name, self._size)
        return None if self._limits is not None else f"measured as quicker at every size between {self._size} x {properties.name}"

    def open(self) -> str | None:
        """See `Candidate.open`."""
        assert self._limits is not None
        buffer, handle = share(max(self._limits.one_shot, self._limits.two_shot), self._group, self._device)
        self._signals = Signals(handle, self._device)
        self._views = {dtype: buffer.view(dtype) for dtype in DTYPES}
        return None

    def test(self, seconds: float) -> str | None:
        """See `Candidate.test`."""
        assert self._limits is not None
        sizes = sorted({min(4 << 10, self._limits.one_shot), self._limits.one_shot // 2, self._limits.one_shot, self._limits.two_shot})
        cases = []
        for index, (nbytes, dtype) in enumerate(itertools.product(sizes, DTYPES)):
            generator = torch.Generator(self._device).manual_seed(1000 * index + self._rank)
            x = torch.randn(nbytes // dtype.itemsize, generator=generator, device=self._device).to(dtype)
            cases.append((x, self._reference(x.clone())))
        torch.cuda.synchronize(self._device)
        deadline = time.monotonic() + seconds
        for x, expected in cases:
            got = self.sum(x)
            if got is None:
                return f"{x.nbytes} bytes are within the limits, but not summed"
            if not self._done(deadline):
                return self._hung(seconds)
            if wrong := _difference(got, expected, self._size):
                return f"sums of {x.nbytes} bytes of {x.dtype} are wrong: {wrong}"
        return self._test_captured(*cases[0], deadline, seconds)

    def _test_captured(self, x: torch.Tensor, expected: torch.Tensor, deadline: float, seconds: float) -> str | None:
        """Replays are one right after the other, as in a step: the buffer has to be free each time."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                first = self.sum(x)
                assert first is not None
                # Twice as much, so that a sum of what another replay has left would show.
                second = self.sum(x + x)
            finally:
                graph.capture_end()
            for _ in range(REPLAYS):
                graph.replay()
            if not self._done(deadline):
                return self._hung(seconds)
        assert second is not None
        wrong = _difference(first, expected, self._size) or _difference(second, expected + expected, self._size)
        return f"sums in a CUDA graph are wrong: {wrong}" if wrong else None

    def _done(self, deadline: float) -> bool:
        """Whether what was launched ends in time. Does not wait for longer, as a synchronisation would."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _hung(self, seconds: float) -> str:
        """The words for a sum that does not end, after it has been made to end: kernels that wait for ever would keep the GPU from everybody.

        Raises:
            ConfigError: it does not end. The GPU cannot be used by this process any more.
        """
        words = f"a sum did not end within {seconds:g} s"
        assert self._signals is not None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        deadline = time.monotonic() + FREE_SECONDS
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise ConfigError(f"Symmetric memory: {words}, and cannot be ended. Start again with --disable-custom-all-reduce.")
            self._signals.let_go()
        return words

    def abandon(self) -> None:
        """See `SmallSums.abandon`."""
        if self._signals is not None:
            self._signals.let_go_for_good()

    def close(self) -> None:
        """See `Candidate.close`."""
        self._views = {}
        if self._signals is not None:
            self._signals.close()
        self._signals = None

    # Sums

    def sum(self, x: torch.Tensor) -> torch.Tensor | None:
        """See `SmallSums.sum`."""
        method = choose(self._limits, x.nbytes, x.dtype, self._size)
        if method is None:
            return None
        if x.data_ptr() % ALIGNMENT:
            x = x.clone()  # where a tensor lies may differ between ranks: no reason to choose otherwise
        shared = self._views[x.dtype][: x.numel()].view(x.shape)
        out = torch.empty_like(x)
        if method == "one_shot":
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(shared, x, "sum", self._name, out)
        else:
            shared.copy_(x)
            torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self._name, out)
        return out


def choose(limits: Limits | None, nbytes: int, dtype: torch.dtype, ranks: int) -> str | None:
    """`one_shot`, `two_shot`, or None for NCCL."""
    if limits is None or dtype not in DTYPES or not nbytes or nbytes % ALIGNMENT:
        return None
    if nbytes <= limits.one_shot:
        return "one_shot"
    return "two_shot" if nbytes <= limits.two_shot and nbytes % (ALIGNMENT * ranks) == 0 else None


def _difference(got: torch.Tensor, expected: torch.Tensor, ranks: int) -> str | None:
    """Two numbers are added in one way; more may be rounded after each."""
    if ranks == 2:
        return None if torch.equal(got, expected) else f"{int((got != expected).sum())} of {got.numel()} numbers"
    step = torch.finfo(got.dtype).eps * ranks
    far = (got.float() - expected.float()).abs() > step * (expected.float().abs() + ranks)
    return f"{int(far.sum())} of {got.numel()} numbers" if bool(far.any()) else None


def _host_id() -> bytes:
    """The same for all processes of a host, and after each start of it another."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        import socket

        return socket.gethostname().encode()
