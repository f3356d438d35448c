"""Sets of token ids as ascending arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def distinct(token_ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What `np.unique` gives, which imports NumPy's masked arrays: 50 ms and 1.5 MiB at an engine's first request."""
    ordered = np.sort(token_ids, axis=None)
    first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]
