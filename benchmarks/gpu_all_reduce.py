"""Sums over GPUs, as a decode step has them (many in one CUDA graph): NCCL against symmetric memory, by size; and with the addition to the
residual stream and the norm behind them, in kernels apart against one kernel (`ops.cuda.sum_norm`), by rows.

    python benchmarks/gpu_all_reduce.py                   on all GPUs of this host
    python benchmarks/gpu_all_reduce.py --gpus 2 --write-table

Prints a table and writes benchmarks/results/gpu_all_reduce.json. --write-table keeps the limits that follow in octavo/parallel/sum_table.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from octavo.ops.registry import load_ops
from octavo.parallel import sum_table
from octavo.parallel.fused_sums import FusedSums
from octavo.parallel.group import Rows
from octavo.parallel.small_sums import try_out, what_fails
from octavo.parallel.sum_table import FusedLimits, Limits
from octavo.parallel.symmetric import ALIGNMENT, RANKS, SymmetricSums
from octavo.protocol.boot import NO_MULTICAST

SIZES = tuple(1 << n for n in range(12, 24))
"""4 KiB to 8 MiB: a token of 2,048 numbers to 512 tokens of 8,192."""
SUMS = 64
"""In a graph: those of a 32-layer model."""
RESULTS = Path(__file__).parent / "results" / "gpu_all_reduce.json"
METHODS = ("nccl", "one_shot", "two_shot")
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
DIMS = (4096, 8192)
_MOST = ROWS[-1] * DIMS[0] * 2
FUSED = {
    "words": FusedLimits(words=_MOST, one_shot=_MOST, most=_MOST),
    "flags": FusedLimits(words=0, one_shot=_MOST, most=_MOST),
    "words, two shots": FusedLimits(words=_MOST, one_shot=0, most=_MOST),
    "flags, two shots": FusedLimits(words=0, one_shot=0, most=_MOST),
}
"""The ways of the one kernel."""
CLOSE = 1.03
"""Times that far apart are taken for equal."""
APART = "apart"
"""... against the sum as the table says, and a kernel for addition and norm."""


def microseconds(call: Callable[[], object], repeats: int = 9) -> float:
    """Median time of one of many calls in a graph, on this rank. All ranks have to call it."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SUMS):
            call()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        dist.barrier()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / SUMS)
    return statistics.median(times[2:])


def measure(rank: int, ranks: int, store: str, results: Any) -> None:
    """One rank's part. Rank 0 hands on the times, the slowest rank's each."""
    os.environ.update(NO_MULTICAST)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=ranks, device_id=device)
    group = dist.group.WORLD
    assert group is not None

    def nccl(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def smallest(number: int) -> int:
        least = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

    ways: dict[str, SymmetricSums] = {}
    for name, given in (("one_shot", Limits(SIZES[-1], SIZES[-1])), ("two_shot", Limits(2 * ALIGNMENT, SIZES[-1]))):
        sums = SymmetricSums(group, rank, ranks, device, reference=nccl, smallest=smallest, limits=given)
        verdict = try_out(sums, smallest)
        if rank == 0:
            print(f"{name}: {verdict.words}", flush=True)
        if verdict.small is not None:
            ways[name] = sums
    times: dict[str, dict[int, float]] = {name: {} for name in METHODS if name == "nccl" or name in ways}
    for nbytes in SIZES:
        x = torch.randn(nbytes // 2, device=device).to(torch.bfloat16)
        # NCCL adds up in place, so its numbers grow without bound; the time of sums of this size is not that of arithmetic.
        for name, by_size in times.items():
            add = nccl if name == "nccl" else ways[name].sum
            slowest = torch.tensor(microseconds(functools.partial(add, x)))
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            by_size[nbytes] = float(slowest)
    fused: dict[int, dict[str, dict[int, float]]] = {}
    quickest = SymmetricSums(group, rank, ranks, device, reference=nccl, smallest=smallest)
    apart = try_out(quickest, smallest).small
    norm = load_ops("cuda").add_rms_norm
    for dim in DIMS:
        fused[dim] = {}
        weight = torch.randn(dim, device=device).to(torch.bfloat16)
        ways_of_dim: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {}

        def one_by_one(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor = weight) -> object:
            total = None if apart is None else apart.sum(x)
            return norm(nccl(x) if total is None else total, residual, weight, 1e-5)

        ways_of_dim[APART] = one_by_one
        rows = Rows(dim, torch.bfloat16, patience=20.0)
        for name, given in FUSED.items():
            if ranks == 2 and not given.one_shot:
                continue  # as many bytes, and a wait more
            sums = FusedSums(group, rank, ranks, device, rows, reference=nccl, limits=given)
            why = what_fails(sums, smallest)
            if rank == 0:
                print(f"{dim}, {name}: {why or 'self-test passed'}", flush=True)
            if why is None:
                ways_of_dim[name] = functools.partial(_fused, sums, weight)
        for name, call in ways_of_dim.items():
            fused[dim][name] = {}
            for count in ROWS:
                if count * dim * 2 > _MOST:
                    continue
                x, residual = (torch.randn(count, dim, device=device).to(torch.bfloat16) for _ in range(2))
                slowest = torch.tensor(microseconds(functools.partial(call, x, residual)))
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                fused[dim][name][count] = float(slowest)
    if rank == 0:
        results.put((times, fused))
    dist.barrier()
    dist.destroy_process_group()


def _fused(sums: FusedSums, weight: torch.Tensor, x: torch.Tensor, residual: torch.Tensor) -> object:
    return sums.add_norm(x, residual, weight, 1e-5)


def fused_limits_from(times: Mapping[int, Mapping[str, Mapping[int, float]]]) -> FusedLimits | None:
    """Up to which size each way is the quickest, the mean of all dims, without a gap; None where the kernels apart are at the smallest."""

    def up_to(best: Sequence[str]) -> int:
        last = 0
        by_bytes: dict[int, list[float]] = {}
        for dim, by_name in times.items():
            for rows in by_name[APART]:
                ours = min(by_name[name][rows] for name in best if name in by_name)
                by_bytes.setdefault(rows * dim * 2, []).append(ours / min(t[rows] for t in by_name.values()))
        for nbytes, slower in sorted(by_bytes.items()):
            if statistics.mean(slower) > CLOSE:
                break
            last = nbytes
        return last

    most, two_shots = up_to(list(FUSED)), any("two" in name for by_name in times.values() for name in by_name)
    one_shot = up_to(["words", "flags"]) if two_shots else most
    return FusedLimits(words=up_to(["words", "words, two shots"]), one_shot=one_shot, most=most) if most else None


def limits_from(times: Mapping[str, Mapping[int, float]]) -> Limits | None:
    """Up to which size each way is the quickest, without a gap; None where NCCL is at the smallest."""

    def up_to(best: Sequence[str]) -> int:
        last = 0
        for nbytes in SIZES:
            if min(times, key=lambda name: times[name][nbytes]) not in best:
                break
            last = nbytes
        return last

    one, both = up_to(["one_shot"]), up_to(["one_shot", "two_shot"])
    return Limits(one_shot=one or ALIGNMENT, two_shot=both) if both else None


def write_table(gpu: str, ranks: int, measured: Limits | None, fused: FusedLimits | None) -> None:
    """Put what was measured into the package's tables, beside what is there."""
    path = Path(sum_table.__file__)
    text = path.read_text()
    text = _with(text, "MEASURED: dict[tuple[str, int], Limits | None] = {", {**sum_table.MEASURED, (gpu, ranks): measured})
    text = _with(text, "MEASURED_FUSED: dict[tuple[str, int], FusedLimits | None] = {", {**sum_table.MEASURED_FUSED, (gpu, ranks): fused})
    path.write_text(text)


def _with(text: str, begin: str, table: Mapping[tuple[str, int], Limits | FusedLimits | None]) -> str:
    lines = [f'    ("{name}", {n}): {limits!r},\n' for (name, n), limits in sorted(table.items(), key=str)]
    head, found, tail = text.partition(begin)
    assert found
    return f"{head}{begin}\n{''.join(lines)}}}{re.sub(r'^[^}]*}', '', tail, count=1)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="default: the most that there are")
    parser.add_argument("--write-table", action="store_true", help="keep the limits in the package's table")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    there = torch.cuda.device_count()
    ranks = args.gpus or max((n for n in RANKS if n <= there), default=0)
    if ranks not in RANKS or ranks > there:
        sys.exit(f"This benchmark needs {', '.join(map(str, RANKS))} NVIDIA GPUs; there are {there}.")
    context = get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=measure, args=(rank, ranks, f"{folder}/store", results)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"A rank failed: exit codes {[process.exitcode for process in processes]}.")
        times, fused = results.get()
    gpu = torch.cuda.get_device_name()
    print(f"\n{ranks} x {gpu}, bfloat16, microseconds a sum (in graphs of {SUMS})")
    print(f"{'KiB':>6}" + "".join(f"{name:>10}" for name in times))
    for nbytes in SIZES:
        print(f"{nbytes >> 10:>6}" + "".join(f"{times[name][nbytes]:>10.1f}" for name in times))
    measured = limits_from(times)
    print(f"limits: {measured}")
    fused_limits = fused_limits_from(fused)
    for dim, by_name in fused.items():
        print(f"\nwith the norm behind it, rows of {dim}")
        print(f"{'rows':>6}" + "".join(f"{name:>18}" for name in by_name))
        for rows in by_name[APART]:
            print(f"{rows:>6}" + "".join(f"{by_name[name][rows]:>18.1f}" for name in by_name))
    print(f"limits: {fused_limits}")
    if args.write_table:
        write_table(gpu, ranks, measured, fused_limits)
    record = {
        "gpu": gpu,
        "ranks": ranks,
        "torch": torch.__version__,
        "sums_in_a_graph": SUMS,
        "microseconds": times,
        "limits": None if measured is None else asdict(measured),
        "with_norm_microseconds": fused,
        "with_norm_limits": None if fused_limits is None else asdict(fused_limits),
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
