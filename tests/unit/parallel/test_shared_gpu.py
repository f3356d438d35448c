"""What goes over the memory of a GPU that ranks share, with threads for ranks. On a GPU: tests/gpu/test_ranks_cuda.py."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

from octavo.config.types import ParallelConfig
from octavo.parallel import shared_gpu
from octavo.parallel.group import Ranks
from octavo.parallel.shared_gpu import SharedGpu

T = TypeVar("T")
PATIENCE = 10.0


class Memory:
    """What all ranks see, and their signals."""

    def __init__(self, size: int, nbytes: int) -> None:
        self.buffers = [torch.full((nbytes,), 255, dtype=torch.uint8) for _ in range(size)]
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.signals: dict[tuple[int, int, int], threading.Semaphore] = defaultdict(lambda: threading.Semaphore(0))


class Handle:
    """One rank's. A signal is put once there is none, and taken."""

    def __init__(self, memory: Memory, rank: int) -> None:
        self._memory = memory
        self._rank = rank
        self.barrier = memory.barrier.wait

    def get_buffer(self, rank: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return self._memory.buffers[rank][: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def put_signal(self, to: int, channel: int) -> None:
        self._memory.signals[self._rank, to, channel].release()

    def wait_signal(self, sender: int, channel: int) -> None:
        assert self._memory.signals[sender, self._rank, channel].acquire(timeout=PATIENCE)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[SharedGpu, int], T]], list[T]]:
    """What the ranks give, with memory for pieces of 64 bytes."""
    here = threading.local()
    monkeypatch.setattr(shared_gpu, "PIECE_BYTES", 64)
    monkeypatch.setattr(shared_gpu, "share", lambda nbytes, group, device: (None, Handle(group, here.rank)))
    monkeypatch.setattr(shared_gpu, "Signals", lambda handle, device: None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: here.rank)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: len(group.buffers))
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "0")

    def run(size: int, work: Callable[[SharedGpu, int], T]) -> list[T]:
        memory: Any = Memory(size, 64)

        def one(rank: int) -> T:
            here.rank = rank
            return work(SharedGpu(memory, torch.device("cpu")), rank)

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, range(size)))

    return run


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 4), (4, 4), (5, 13)])
@pytest.mark.parametrize("size", [2, 3])
def test_sums(together: Any, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def work(gpu: SharedGpu, rank: int) -> list[torch.Tensor]:
        parts = [numbers(rank + 10 * turn, *shape, dtype=dtype) for turn in range(3)]
        for part in parts:
            gpu.sum(part)
        return parts

    for turn, totals in enumerate(zip(*together(size, work), strict=True)):
        expected = numbers(10 * turn, *shape, dtype=dtype)
        for rank in range(1, size):
            expected = expected + numbers(rank + 10 * turn, *shape, dtype=dtype)
        assert all(torch.equal(total, expected) for total in totals)


@pytest.mark.parametrize("shape", [(1, 4), (5, 13)])
def test_gathers(together: Any, shape: tuple[int, ...]) -> None:
    def work(gpu: SharedGpu, rank: int) -> torch.Tensor:
        out = torch.empty(3 * shape[0], shape[1])
        gpu.gather(out, numbers(rank, *shape))
        return out

    expected = torch.cat([numbers(rank, *shape) for rank in range(3)])
    assert all(torch.equal(out, expected) for out in together(3, work))


def test_what_is_sent_is_received_in_order(together: Any) -> None:
    """Through a chain of three, as the stages of a pipeline."""
    sent = [numbers(turn, 5, 13) for turn in range(4)]

    def work(gpu: SharedGpu, rank: int) -> list[torch.Tensor]:
        got = []
        for x in sent:
            out = x.clone() if rank == 2 else torch.empty(5, 13)
            if rank < 2:
                gpu.receive(out, rank + 1)
            got.append(out)
            if rank > 0:
                gpu.send(out + 1, rank - 1)
        return got

    last, middle, _ = together(3, work)
    for x, once, twice in zip(sent, middle, last, strict=True):
        assert torch.equal(once, x + 1)
        assert torch.equal(twice, once + 1)


def test_ranks_take_turns_on_the_gpus() -> None:
    shared = ParallelConfig(tensor=2, data=2, first_device=2, shared_gpus=2)
    assert [str(Ranks(local_rank=rank).device("cuda", shared)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert str(Ranks(local_rank=1).device("cuda", ParallelConfig(tensor=2, shared_gpus=1))) == "cuda:0"
    assert str(Ranks(local_rank=1).device("cuda", ParallelConfig(tensor=2))) == "cuda:1"
