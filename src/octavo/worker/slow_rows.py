"""Numbers of rows that take longer to multiply than more rows do: steps of so many are better run as larger ones.

Beyond the rows that our own kernels multiply, a library chooses a kernel by the number of rows, and not always a good one: on an H200 cuBLAS
takes 431 us for the products of an 8B layer with 448 rows, and 304 us for those with 512. Which numbers these are depends on the
shapes, the card and the library, so it is measured when a model starts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from octavo.layers.linear import Linear

FEWEST_ROWS = 129
"""Fewer are multiplied by our own kernels, for which fewer rows are never slower."""
MARGIN = 1.03
"""A larger step has other work too, and two measurements differ."""
ENOUGH_BYTES = 128 << 20
"""Of weights: more than a GPU's L2 cache holds, so that they are read from memory as in a step."""
REPEATS = 2


def slow_rows(seconds: Mapping[int, float]) -> frozenset[int]:
    """The numbers of rows for which a larger one is quicker.

    Args:
        seconds: of a step by its rows.
    """
    slow, best = set(), float("inf")
    for rows in sorted(seconds, reverse=True):
        if seconds[rows] > MARGIN * best:
            slow.add(rows)
        best = min(best, seconds[rows])
    return frozenset(slow)


@torch.inference_mode()
def product_seconds(
    layers: Sequence[Sequence[Linear]], head: Linear | None, numbers: Iterable[int], dtype: torch.dtype, device: torch.device
) -> dict[int, float]:
    """Seconds that all products of a step take on a GPU, by the number of rows.

    Args:
        layers: the linear layers of each decoder layer; all alike, or nearly: as many are multiplied as are more than a cache holds.
        numbers: of rows.
        dtype: of the inputs.
    """
    taken, size = [], 0
    for layer in layers:
        if size >= ENOUGH_BYTES:
            break
        taken.append(layer)
        size += sum(linear.weight.nbytes for linear in layer)
    groups = [([linear for layer in taken for linear in layer], len(layers) / len(taken))]
    if head is not None:
        groups.append(([head], 1.0))
    widths = {linear.weight.in_features for linears, _ in groups for linear in linears}
    times: dict[int, float] = {}
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    generator = torch.Generator(device).manual_seed(0)  # zeros would be multiplied faster
    for rows in numbers:
        inputs = {width: torch.randn(rows, width, dtype=dtype, device=device, generator=generator) for width in widths}
        times[rows] = sum(share * _seconds(functools.partial(_multiply, linears, inputs), stream) for linears, share in groups)
    torch._C._cuda_clearCublasWorkspaces()  # the one of this stream would stay
    return times


def _multiply(linears: Sequence[Linear], inputs: Mapping[int, torch.Tensor]) -> None:
    for linear in linears:
        linear(inputs[linear.weight.in_features])


def _seconds(work: Callable[[], None], stream: torch.cuda.Stream) -> float:
    """The least of a few runs, captured: small kernels would wait for their launches."""
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        work()  # whatever is loaded or chosen at first use must not be so during a capture
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        moments = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 2)]  # type: ignore[no-untyped-call]
        for moment in moments:
            moment.record(stream)
            graph.replay()
    stream.synchronize()
    graph.reset()
    return min(float(a.elapsed_time(b)) for a, b in itertools.pairwise(moments[1:])) / 1e3
