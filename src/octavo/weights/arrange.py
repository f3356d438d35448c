"""Stored tensors in another arrangement than the checkpoint has them, without reading them before their turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import CheckpointError
from octavo.ops.coded import CodedRows
from octavo.ops.packed import EncodedRows
from octavo.weights.read_ahead import LARGEST_BYTES
from octavo.weights.stored import StoredTensor


def _room_for(stored: StoredTensor, destination: torch.Tensor) -> torch.Tensor:
    """As the checkpoint has it, where it is to be rearranged: on the destination's device, unless that is much beside the weights there."""
    device = destination.device if stored.nbytes <= LARGEST_BYTES else torch.device("cpu")
    return torch.empty(stored.shape, dtype=destination.dtype, device=device)


def transposed(stored: StoredTensor) -> StoredTensor:
    """A matrix the other way round, or each of several."""

    def copy_into(destination: torch.Tensor) -> None:
        whole = _room_for(stored, destination)
        stored.copy_into(whole)
        destination.copy_(whole.transpose(-1, -2))

    *several, rows, columns = stored.shape
    return replace(stored, shape=(*several, columns, rows), copy_into=copy_into, copy_region=None, encoded=None, raw=None)


def stacked(stored: StoredTensor) -> StoredTensor:
    """Several matrices as one, with the rows of one below those of the other."""

    def copy_into(destination: torch.Tensor) -> None:
        stored.copy_into(destination.view(stored.shape))

    count, rows, columns = stored.shape
    return replace(stored, shape=(count * rows, columns), copy_into=copy_into, copy_region=None, encoded=None, raw=None)


def flattened(stored: StoredTensor) -> StoredTensor:
    """Several vectors as one, end to end."""

    def copy_into(destination: torch.Tensor) -> None:
        stored.copy_into(destination.view(stored.shape))

    return replace(stored, shape=(math.prod(stored.shape),), copy_into=copy_into, copy_region=None, encoded=None, raw=None)


def reordered(stored: StoredTensor, order: npt.NDArray[np.int64]) -> StoredTensor:
    """Row i of the result is row `order[i]` of what is stored; of its elements, where `order` has one entry for each.

    Raises:
        CheckpointError: the tensor has another number of rows.
    """
    flat = len(order) == math.prod(stored.shape)
    if stored.shape[0] != len(order) and not flat:
        raise CheckpointError(
            f"{stored.file}: tensor {stored.name} has the shape {list(stored.shape)}, where {len(order)} rows were expected."
        )

    def copy_into(destination: torch.Tensor) -> None:
        whole = _room_for(stored, destination)
        stored.copy_into(whole)
        rows = whole.flatten() if flat else whole
        destination.copy_(rows[torch.from_numpy(order).to(rows.device)].view(stored.shape))

    encoded = None if stored.encoded is None else _encoded(stored.encoded, order)
    coded = None if stored.coded is None else _coded(stored.coded, order)
    return replace(stored, copy_into=copy_into, copy_region=None, encoded=encoded, coded=coded, raw=None)


def _coded(inner: Callable[[], CodedRows], order: npt.NDArray[np.int64]) -> Callable[[], CodedRows]:
    def coded() -> CodedRows:
        rows = inner()
        return rows.select_rows(torch.from_numpy(order).to(rows.codes.device))

    return coded


def _encoded(inner: Callable[[], EncodedRows], order: npt.NDArray[np.int64]) -> Callable[[], EncodedRows]:
    def encoded() -> EncodedRows:
        rows = inner()
        return replace(rows, order=order if rows.order is None else rows.order[order])

    return encoded


def with_shape(stored: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """The same numbers in the same order in another shape."""
    if stored.shape == shape:
        return stored

    def copy_into(destination: torch.Tensor) -> None:
        stored.copy_into(destination.view(stored.shape))

    return replace(stored, shape=shape, copy_into=copy_into, copy_region=None, raw=None)
