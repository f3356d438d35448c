"""Up to which size sums over GPUs go through symmetric memory, and how. `benchmarks/gpu_all_reduce.py --write-table` measures it.

What is not measured is assumed: with N ranks a one-shot sum reads N - 1 times the tensor over NVLink and waits for the others twice; a two-shot
sum reads twice the tensor at most and waits three times. Above both limits NCCL is left to it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    one_shot: int
    """Bytes up to which every rank reads all of the others' tensors."""
    two_shot: int
    """... and up to which each adds up a part, and reads the others' parts."""


ASSUMED = {
    2: Limits(one_shot=512 << 10, two_shot=512 << 10),  # two halves are as much as one whole, and one wait more
    4: Limits(one_shot=128 << 10, two_shot=1 << 20),
    8: Limits(one_shot=64 << 10, two_shot=512 << 10),
}
"""Ranks -> limits where nothing has been measured."""

MEASURED: dict[tuple[str, int], Limits | None] = {}
"""(name of the GPU, ranks) -> limits; None where NCCL was quicker at every size."""


def limits(gpu: str, ranks: int) -> Limits | None:
    """For a group of GPUs of one name; None where symmetric memory is not used for so many."""
    return MEASURED[gpu, ranks] if (gpu, ranks) in MEASURED else ASSUMED.get(ranks)
