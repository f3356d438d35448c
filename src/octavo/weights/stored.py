"""`StoredTensor`: one tensor of a checkpoint that has not been read yet. What every format hands to the loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.ops.coded import CodedRows
from octavo.ops.packed import EncodedRows


@dataclass(frozen=True)
class StoredTensor:
    """Reading is left to `copy_into`, so that at any time about one copy of the weights is in memory."""

    name: str
    """As the checkpoint calls it."""
    shape: tuple[int, ...]
    nbytes: int
    """As stored."""
    file: str
    copy_into: Callable[[torch.Tensor], None]
    """Read, convert to the dtype and device of the argument (of `shape`, rows contiguous) and write it there.

    Raises `CheckpointError` when the file turns out to be bad.
    """
    copy_region: Callable[[tuple[slice, ...], torch.Tensor], None] | None = None
    """`copy_into` of one slice in each dimension, which reads no more than that; None where the format cannot."""
    encoded: Callable[[], EncodedRows] | None = None
    """A matrix as it is stored, for kernels that compute with that; None where the format cannot say."""
    raw: Callable[[torch.device], torch.Tensor] | None = None
    """The numbers in the file's own dtype, whatever it is."""
    dtype: torch.dtype | None = None
    """Of `raw`."""
    coded: Callable[[], CodedRows] | None = None
    """A matrix of low-bit weights, for kernels that compute with them; `copy_into` dequantises."""
    spare: bool = False
    """Nothing is lost where the model has no place for it and it is all zeros: biases that some quantisers add."""
