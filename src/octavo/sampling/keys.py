"""The keys of random numbers (see `random`): (seed, sibling index, position) folded into 64 bits, on the host. No torch.

By the SplitMix64 finaliser (Steele, Lea & Flood 2014), a bijection of each part.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_keys(seeds: npt.NDArray[np.int64], indices: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """The key of each row's random numbers.

    Args:
        seeds, indices, positions: [rows] seed, sibling index, and position in the sequence of the token to draw.

    Returns:
        [rows, 2] int64, each a 32-bit number.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = _mix64(seeds.view(np.uint64) + golden)
    key = _mix64(key ^ (indices.astype(np.uint64) + np.uint64(1)) * golden)
    key = _mix64(key ^ (positions.astype(np.uint64) + np.uint64(1)) * golden)
    return np.stack([key & np.uint64(0xFFFFFFFF), key >> np.uint64(32)], axis=1).astype(np.int64)
