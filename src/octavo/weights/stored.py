"""`StoredTensor`: one tensor of a checkpoint that has not been read yet. What every format hands to the loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

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
    encoded: Callable[[], EncodedRows] | None = None
    """A matrix as it is stored, for kernels that compute with that; None where the format cannot say."""
