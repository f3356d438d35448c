"""Sums through symmetric memory, between processes: one a GPU where there are several, else all on one GPU, which takes turns between
them. (Slow, and no case for NCCL, but the same memory, kernels and signals.)"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from octavo.errors import EngineDead
from octavo.ops.cuda.compiler import architecture
from octavo.ops.reference.norm import rms_norm
from octavo.parallel.fused_sums import FusedSums
from octavo.parallel.group import Rows
from octavo.parallel.small_sums import try_out, what_fails
from octavo.parallel.sum_table import FusedLimits, Limits
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
        deadline = time.monotonic() + 2 * PATIENCE
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        assert [process.exitcode for process in processes] == [0] * ranks
        return [answer for _, answer in sorted(results.get() for _ in processes)]
    finally:
        for process in processes:
            process.kill()


def _rank(store: str, work: Callable[..., Any], rank: int, ranks: int, results: Any) -> None:
    faulthandler.dump_traceback_later(PATIENCE, exit=False)  # where it hangs, if it does
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


FUSED = {
    "one shot": FusedLimits(words=64 << 10, one_shot=512 << 10, most=512 << 10),
    "two shots": FusedLimits(words=64 << 10, one_shot=0, most=512 << 10),
}
DIM = 1024


def fused_sums(reference: Any, kind: str, dtype: torch.dtype = torch.bfloat16, *, patience: float = PATIENCE) -> FusedSums:
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    rows = Rows(DIM, dtype, patience)
    return FusedSums(group, dist.get_rank(), dist.get_world_size(), device, rows, reference=reference, limits=FUSED[kind])


class PatientFused:
    """As `Patient`."""

    def __init__(self, sums: FusedSums) -> None:
        self._sums = sums
        self.unusable, self.open, self.close = sums.unusable, sums.open, sums.close

    def test(self, seconds: float) -> str | None:
        return self._sums.test(PATIENCE)


def passes_the_fused_test(sums: SymmetricSums, smallest: Callable[[int], int], reference: Any) -> list[str | None]:
    kinds = [(kind, dtype) for kind in FUSED for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    return [what_fails(PatientFused(fused_sums(reference, kind, dtype)), smallest) for kind, dtype in kinds]


def steps(sums: SymmetricSums, smallest: Callable[[int], int], reference: Any) -> list[str]:
    """Many sums of changing sizes in one graph, replayed with other numbers; then the same rows with others beside them."""
    wrong: list[str] = []
    for kind in FUSED:
        fused = fused_sums(reference, kind)
        assert (fused.unusable(), fused.open()) == (None, None)
        smallest(1)
        counts = [1, 7, 200, 32, 33, 1, 256, 2]
        weight = torch.randn(DIM, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
        given = torch.zeros(len(counts), 256, DIM, device="cuda", dtype=torch.bfloat16)
        stream = torch.zeros(256, DIM, device="cuda", dtype=torch.bfloat16)
        outs = []
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            for number, rows in enumerate(counts):
                joined = fused.add_norm(given[number, :rows].clone(), stream[:rows], weight, 1e-5)
                assert joined is not None
                outs.append(joined[0])
            graph.capture_end()
            for replay in range(12):
                given.copy_(torch.randn(given.shape, generator=torch.Generator().manual_seed(100 * replay + dist.get_rank())))
                stream.copy_(torch.randn(stream.shape, generator=torch.Generator().manual_seed(replay)))
                expected, totals = stream.clone(), reference(given.float())
                graph.replay()
                side.synchronize()
                for number, rows in enumerate(counts):
                    expected[:rows] = (totals[number, :rows] + expected[:rows].float()).bfloat16()
                    last = (rms_norm(expected[:rows], weight, 1e-5).float() - outs[number].float()).abs()
                    if bool((last > 0.03 * (1 + outs[number].float().abs())).any()):
                        wrong.append(f"{kind}: norm of sum {number}, replay {replay}")
                if not torch.equal(stream, expected):
                    wrong.append(f"{kind}: stream, replay {replay}: {int((stream != expected).sum())} numbers")
            everything = torch.randn(256, DIM, generator=torch.Generator("cuda").manual_seed(5 + dist.get_rank()), device="cuda").bfloat16()
            whole = [t.clone() for t in fused.add_norm(everything.clone(), torch.ones_like(everything), weight, 1e-5) or ()]
            for rows in (1, 5, 32, 40):
                part = everything[:rows].clone()
                for got, all_rows in zip(fused.add_norm(part, torch.ones_like(part), weight, 1e-5) or (), whole, strict=True):
                    if not torch.equal(got, all_rows[:rows]):
                        wrong.append(f"{kind}: {rows} rows have other bits than among 256")
            side.synchronize()
        assert fused.add_norm(torch.zeros(257, DIM, device="cuda", dtype=torch.bfloat16), stream, weight, 1e-5) is None
        assert fused.add_norm(torch.zeros(4, DIM, device="cuda"), stream.float(), weight.float(), 1e-5) is None
        graph.reset()
    return wrong


def waits_in_vain(sums: SymmetricSums, smallest: Callable[[int], int], reference: Any) -> tuple[int | None, str, float]:
    """Only the first rank adds up."""
    fused = fused_sums(reference, "one shot", patience=1.0)
    assert (fused.unusable(), fused.open()) == (None, None)
    smallest(1)
    began, words = time.monotonic(), ""
    if dist.get_rank() == 0:
        x = torch.ones(8, DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(100):
            fused.add_norm(x, x.clone(), x[0], 1e-5)
        torch.cuda.synchronize()
        try:
            fused.check()
        except EngineDead as e:
            words = str(e)
    return fused.silent(), words, time.monotonic() - began


needs_kernels = pytest.mark.skipif(
    not torch.cuda.is_available() or architecture(torch.device("cuda")) is None, reason="needs a Hopper GPU and NVRTC"
)


@needs_kernels
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_self_test_of_fused_sums_passes(tmp_path: Path, ranks: int) -> None:
    assert together(tmp_path, passes_the_fused_test, ranks) == [[None] * 6] * ranks


@needs_kernels
def test_fused_sums_are_those_of_the_cpu_whatever_the_rows(tmp_path: Path) -> None:
    assert together(tmp_path, steps) == [[], []]


@needs_kernels
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    (silent, words, seconds), (other, _, _) = together(tmp_path, waits_in_vain)
    assert (silent, other) == (1, None)
    assert words == "Rank 1 did not take part in a sum over GPUs for 1 s."
    assert 1 <= seconds < 10


def test_the_self_test_passes(tmp_path: Path) -> None:
    for words in together(tmp_path, passes_its_test):
        assert words.startswith("symmetric memory in one shot up to 64 KiB, in two shots up to 256 KiB, NCCL above; self-test passed in ")


def test_sums_are_those_of_the_cpu(tmp_path: Path) -> None:
    assert together(tmp_path, adds_up) == [[], []]


def test_a_sum_that_never_ends_is_ended(tmp_path: Path) -> None:
    (words, seconds), _ = together(tmp_path, hangs)
    assert words == "a sum did not end within 1 s"
    assert seconds < 5
