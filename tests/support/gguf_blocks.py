"""Random blocks of GGUF's types, made without the gguf package: kernels are also tested where it is not installed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.gguf_file import GGML_TYPES

SIZES = {name: (values, size) for name, values, size in GGML_TYPES.values()}
"""Type -> values and bytes of a block."""


_HALVES = {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}
"""Where in a block there are float16 numbers; else at its beginning."""


def blocks_of(name: str, rows: int = 6, columns: int = 512, seed: int = 3) -> npt.NDArray[np.uint8]:
    """Rows of blocks of a ggml type: random bytes, with numbers where numbers must be."""
    values, size = SIZES[name]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    if name == "MXFP4":
        raw[..., 0] = 120 + raw[..., 0] % 8
    else:
        for place in _HALVES.get(name, (0, 2)):
            raw[..., place : place + 2] &= 0xBF  # finite
    return raw.reshape(rows, -1)


_WORTH = {
    "Q3_K": 5e-4,
    "Q2_K": 3e-3,
    "Q4_K": 4e-4,
    "Q5_K": 2e-4,
    "Q6_K": 3e-5,
    "IQ4_NL": 1e-3,
    "IQ4_XS": 5e-5,
    "Q8_0": 8e-4,
    "Q5_0": 5e-3,
    "Q5_1": 5e-3,
    "IQ3_XXS": 1e-3,
    "IQ3_S": 1e-3,
    "IQ2_XXS": 2e-3,
    "IQ2_XS": 2e-3,
    "IQ2_S": 2e-3,
}
"""Of a code, in `small_blocks`; 0.01 for others."""


def small_blocks(name: str, rows: int, columns: int, seed: int) -> npt.NDArray[np.uint8]:
    """`blocks_of` with scales that make weights of the size of a trained layer's."""
    raw = blocks_of(name, rows, columns, seed)
    raw = raw.reshape(rows, -1, SIZES[name][1])
    worth = _WORTH.get(name, 1e-2)

    def half(value: float) -> npt.NDArray[np.uint8]:
        return np.frombuffer(np.float16(value).tobytes(), np.uint8)

    if name == "MXFP4":
        raw[..., 0] = 122
    elif name == "NVFP4":
        raw[..., :4] = 0x10 + raw[..., :4] % 8
    elif name == "IQ1_M":  # its number lies in the upper halves of four bytes
        for i, nibble in enumerate(f"{int(np.float16(worth).view(np.uint16)):04x}"[::-1]):
            raw[..., 49 + 2 * i] = (raw[..., 49 + 2 * i] & 15) | (int(nibble, 16) << 4)
    elif name in _HALVES:
        for place in _HALVES[name]:
            raw[..., place : place + 2] = half(worth)
    else:
        raw[..., :2] = half(worth)
    if name in ("Q4_1", "Q5_1"):
        raw[..., 2:4] = half(-worth * (7 if name == "Q4_1" else 15))
    if name in ("Q4_K", "Q5_K"):
        raw[..., 2:4] = half(worth * (7.5 if name == "Q4_K" else 15.5))
    return raw.reshape(rows, -1)
