"""Sums through symmetric memory, between processes: one a GPU where there are several, else all on one GPU, which takes turns between
them. (Slow, and no case for NCCL, but the same memory, kernels and signals.)"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from octavo.parallel.small_sums import try_out
from octavo.parallel.sum_table import Limits
from octavo.parallel.symmetric import DTYPES, SymmetricSums
from octavo.protocol.boot import NO_MULTICAST

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

LIMITS = Limits(one_shot=64 << 10, two_shot=256 << 10)
PATIENCE = 60.0


def together(tmp_path: Path, work: Callable[..., Any], ranks: int = 2) -> list[Any]:
    """What `work(sums, rank, ranks)` gives on each rank."""
    context = get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=_rank, args=(str(tmp_path / "store"), work, rank, ranks, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(2 * PATIENCE)
        assert [process.exitcode for process in processes] == [0] * ranks
        return [answer for _, answer in sorted(results.get() for _ in processes)]
    finally:
        for process in processes:
            process.kill()


def _rank(store: str, work: Callable[..., Any], rank: int, ranks: int, results: Any) -> None:
    os.environ.update(NO_MULTICAST)
    several = torch.cuda.device_count() >= ranks
    if not several:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", rank if several else 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None

    def reference(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x, device="cpu") for _ in range(ranks)]
        dist.all_gather(parts, x.cpu())
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(device)

    def smallest(number: int) -> int:
        least = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

    sums = SymmetricSums(group, rank, ranks, device, reference=reference, smallest=smallest, limits=LIMITS)
    results.put((rank, work(sums, smallest, reference)))
    dist.barrier()
    dist.destroy_process_group()


class Patient:
    """The test at start with more time: processes that share a GPU wait for their turns."""

    def __init__(self, sums: SymmetricSums) -> None:
        self._sums = sums
        self.unusable, self.open, self.close, self.sum = sums.unusable, sums.open, sums.close, sums.sum

    @property
    def described(self) -> str:
        return self._sums.described

    def test(self, seconds: float) -> str | None:
        return self._sums.test(PATIENCE)


def passes_its_test(sums: SymmetricSums, smallest: Callable[[int], int], reference: Any) -> str:
    return try_out(Patient(sums), smallest).words


def adds_up(sums: SymmetricSums, smallest: Callable[[int], int], reference: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    """Sizes around the limits, many times in one graph, as a model has them."""
    assert sums.unusable() is None
    sums.open()
    wrong = []
    for nbytes in (16, 4096, 64 << 10, 96 << 10, 256 << 10):
        for dtype in DTYPES:
            x = torch.randn(nbytes // dtype.itemsize, device="cuda").to(dtype)
            got = sums.sum(x)
            assert got is not None
            if not torch.equal(got, reference(x)):
                wrong.append(f"{nbytes} {dtype}")
    assert sums.sum(torch.ones(512 << 10, device="cuda")) is None
    assert sums.sum(torch.ones(8, dtype=torch.float16, device="cuda")) is None
    odd = torch.randn(1025, device="cuda")[1:]  # not where 16 bytes begin
    got = sums.sum(odd)
    assert got is not None
    if not torch.equal(got, reference(odd)):
        wrong.append("misaligned")
    return wrong


def hangs(sums: SymmetricSums, smallest: Callable[[int], int], reference: Any) -> tuple[str | None, float]:
    """Only the first rank adds up."""
    assert sums.unusable() is None
    sums.open()
    words, began = None, time.monotonic()
    if smallest(0) == 0 and sums._rank == 0:
        sums.sum(torch.ones(1024, device="cuda"))
        assert not sums._done(time.monotonic() + 1.0)
        words = sums._hung(1.0)
        assert float(torch.ones(1000, device="cuda").sum()) == 1000.0  # the GPU is there for others again
    return words, time.monotonic() - began


def test_the_self_test_passes(tmp_path: Path) -> None:
    for words in together(tmp_path, passes_its_test):
        assert words.startswith("symmetric memory in one shot up to 64 KiB, in two shots up to 256 KiB, NCCL above; self-test passed in ")


def test_sums_are_those_of_the_cpu(tmp_path: Path) -> None:
    assert together(tmp_path, adds_up) == [[], []]


def test_a_sum_that_never_ends_is_ended(tmp_path: Path) -> None:
    (words, seconds), _ = together(tmp_path, hangs)
    assert words == "a sum did not end within 1 s"
    assert seconds < 5
