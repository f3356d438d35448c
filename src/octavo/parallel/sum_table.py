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

MEASURED: dict[tuple[str, int], Limits | None] = {
    ("NVIDIA H200", 2): Limits(one_shot=4194304, two_shot=4194304),
}
"""(name of the GPU, ranks) -> limits; None where NCCL was quicker at every size."""


def limits(gpu: str, ranks: int) -> Limits | None:
    """For a group of GPUs of one name; None where symmetric memory is not used for so many."""
    return MEASURED[gpu, ranks] if (gpu, ranks) in MEASURED else ASSUMED.get(ranks)


@dataclass(frozen=True)
class FusedLimits:
    """Of sums with the norm behind them in one kernel (`fused_sums`), in bytes of what is added up."""

    words: int
    """Up to which each four bytes travel with a number of their own: one way over NVLink, twice the bytes."""
    one_shot: int
    """... every rank gives its rows to all others; above, each row to the rank that adds it up."""
    most: int
    """... they go so at all."""


ASSUMED_FUSED = {
    2: FusedLimits(words=256 << 10, one_shot=8 << 20, most=8 << 20),  # two shots are as many bytes, and one wait more
    4: FusedLimits(words=128 << 10, one_shot=128 << 10, most=8 << 20),
    8: FusedLimits(words=64 << 10, one_shot=64 << 10, most=4 << 20),
}
"""Ranks -> limits where nothing has been measured."""

MEASURED_FUSED: dict[tuple[str, int], FusedLimits | None] = {
    ("NVIDIA H200", 2): FusedLimits(words=393216, one_shot=8388608, most=8388608),
}
"""(name of the GPU, ranks) -> limits; None where the kernels apart were quicker at every size."""


def fused_limits(gpu: str, ranks: int) -> FusedLimits | None:
    """As `limits`."""
    return MEASURED_FUSED[gpu, ranks] if (gpu, ranks) in MEASURED_FUSED else ASSUMED_FUSED.get(ranks)
