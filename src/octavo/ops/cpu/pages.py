"""Memory of our own in small pages."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt


def fresh_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    """[nbytes] zeros, at the beginning of a page, that take no memory before they are written.

    NumPy asks the system for large pages, the first touch of which is dear where a virtual machine is handed its memory on demand.

    Raises:
        MemoryError: the system does not give so many.
    """
    try:
        return np.frombuffer(mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)[:nbytes]
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"no memory for {nbytes} bytes") from error
