"""The bytes of the tensors of a GGUF file.

They are read, never touched where the file is mapped: a file that is cut short meanwhile (a download that starts again, say) would end the
process (SIGBUS). Reading finds less than there should be, which can be told.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.gguf_file import GgufFile, GgufTensor
from octavo.errors import CheckpointError
from octavo.ops.packed import EncodedRows, Unread

_MOST_READ: Final = 1 << 30
"""Bytes of one read: the system takes no more than two of these."""


class GgufBytes:
    """One state of the file: another that takes its place is not seen.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, gguf: GgufFile) -> None:
        self._path = gguf.path
        try:
            self._handle = os.open(gguf.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise CheckpointError(f"{gguf.path}: cannot be read: {e}") from None
        weakref.finalize(self, os.close, self._handle)

    def read(self, name: str, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A copy of `nbytes` from `offset` on, which belong to tensor `name`.

        Raises:
            CheckpointError: the file ends before, or cannot be read there.
        """
        out, done = np.empty(nbytes, np.uint8), 0
        while done < nbytes:
            try:
                count = os.preadv(self._handle, [out[done : done + _MOST_READ].data], offset + done)
            except OSError as e:
                raise CheckpointError(f"{self._path}: cannot be read at byte {offset + done}: {e}") from None
            if count == 0:
                size = os.fstat(self._handle).st_size
                raise CheckpointError(
                    f"{self._path}: not a sound GGUF file: tensor {name!r} ends at byte {offset + nbytes}, but the file has {size} "
                    "(truncated?). Download or convert it again."
                )
            done += count
        return out


def unread_rows(data: GgufBytes, tensor: GgufTensor, shape: tuple[int, int], order: npt.NDArray[Any] | None = None) -> EncodedRows:
    """A matrix as it is stored, whose bytes are read by who packs it.

    Args:
        shape: (rows, columns)
        order: see `EncodedRows`.
    """
    stored = (shape[0], tensor.nbytes // shape[0])

    def read() -> npt.NDArray[np.uint8]:
        return data.read(tensor.name, tensor.offset, tensor.nbytes).reshape(stored)

    return EncodedRows(tensor.type, shape, Unread(stored, read), order)
