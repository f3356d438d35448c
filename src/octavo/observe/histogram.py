"""A histogram that one event loop owns: no locks, and one call can count several equal observations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily


class Histogram:
    """Counts per bucket. `bounds` are inclusive upper bounds, rising; +Inf is added."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def counts(self) -> tuple[list[int], float]:
        """Observations in each bucket, and their sum."""
        return list(self._counts), self._sum

    def add(self, counts: Sequence[int], total: float) -> None:
        """Count in the `counts` of another histogram with these bounds."""
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, counts, strict=True)]
        self._sum += total

    @property
    def count(self) -> int:
        return sum(self._counts)

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((_bound_label(bound), total))
        family.add_metric(labels, buckets, sum_value=self._sum)


def _bound_label(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(float(bound))


def one_two_five(limit: float) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`: bounds for token counts."""
    bounds: list[float] = []
    scale = 1
    while scale <= limit:
        bounds += [m * scale for m in (1, 2, 5) if m * scale <= limit]
        scale *= 10
    return bounds
