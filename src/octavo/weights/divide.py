"""A part of a stored tensor: what one rank keeps of a parameter. Only that part is read, where the format allows it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from octavo.ops.coded import CodedRows
from octavo.weights.stored import StoredTensor


@dataclass(frozen=True)
class Part:
    """Rows and columns of a matrix, or elements of a vector."""

    rows: npt.NDArray[np.int64] | None = None
    """In this order; None: all."""
    columns: npt.NDArray[np.int64] | None = None
    """None: all."""


WHOLE = Part()


def divided(stored: StoredTensor, part: Part) -> StoredTensor:
    """`part` of `stored`, a matrix, or a vector and then without columns."""
    if part.rows is None and part.columns is None:
        return stored
    chosen = [
        indices if indices is not None else np.arange(size) for indices, size in zip((part.rows, part.columns), stored.shape, strict=False)
    ]
    shape = tuple(map(len, chosen))

    def copy_into(destination: torch.Tensor) -> None:
        runs = [_run(indices) for indices in chosen]
        region = tuple(run for run in runs if run is not None)
        if stored.copy_region is not None and len(region) == len(chosen):
            stored.copy_region(region, destination)
            return
        part_of_it = torch.empty(stored.shape, dtype=destination.dtype)
        stored.copy_into(part_of_it)
        for dimension, (indices, run) in enumerate(zip(chosen, runs, strict=True)):
            if run is not None:
                part_of_it = part_of_it.narrow(dimension, run.start, run.stop - run.start)
            else:
                part_of_it = part_of_it.index_select(dimension, torch.from_numpy(indices))
        destination.copy_(part_of_it)

    nbytes = stored.nbytes * math.prod(shape) // max(1, math.prod(stored.shape))
    coded = None if stored.coded is None else _coded(stored.coded, part)
    return replace(stored, shape=shape, nbytes=nbytes, copy_into=copy_into, copy_region=None, encoded=None, raw=None, coded=coded)


def _coded(inner: Callable[[], CodedRows], part: Part) -> Callable[[], CodedRows]:
    def coded() -> CodedRows:
        kept = inner()
        if part.rows is not None:
            run = _run(part.rows)
            order = torch.from_numpy(part.rows).to(kept.codes.device)
            kept = kept.select_rows(order) if run is None else kept.narrow_rows(run.start, run.stop)
        if part.columns is not None:
            run = _run(part.columns)
            assert run is not None, "the inputs of a linear layer are divided in order"
            kept = kept.narrow_columns(run.start, run.stop)
        return kept

    return coded


def _run(indices: npt.NDArray[np.int64]) -> slice | None:
    """Indices that lie one behind the other, as a slice; None of others."""
    start = int(indices[0]) if len(indices) else 0
    run = slice(start, start + len(indices))
    return run if np.array_equal(indices, np.arange(run.start, run.stop)) else None
