"""Random weight rows in every encoding that the compiled kernels pack, and what they mean as float32."""

from __future__ import annotations

import numpy as np
import torch

from octavo.ops.packed import EncodedRows
from octavo.weights.gguf_blocks import unpack
from tests.support.gguf_blocks import SIZES

STORED = ("Q4_0", "Q4_1", "Q8_0")
"""Blocks that are packed as they are."""
CONVERTED = ("Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS", "MXFP4")
"""Blocks that become others first."""
ENCODINGS = ("F32", "F16", "BF16", *STORED, *CONVERTED)
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82), "MXFP4": ()}
"""Where in a block there are float16; else at its beginning."""


def block_values(encoding: str) -> int:
    """Columns that a row has a multiple of, and 32 at least: groups of the kernels."""
    return max(32, SIZES[encoding][0])


def random_rows(encoding: str, rows: int, columns: int, seed: int) -> EncodedRows:
    """Block formats need whole blocks. Scales that are multiplied with others are powers of two, so that no product is rounded."""
    generator = np.random.default_rng(seed)
    if encoding in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[encoding]
        values = torch.from_numpy(generator.standard_normal((rows, columns), np.float32)).to(dtype)
        return EncodedRows(encoding, (rows, columns), values.view(torch.uint8).numpy())
    size, nbytes = SIZES[encoding]
    blocks = generator.integers(0, 256, (rows, columns // size, nbytes), np.uint8)
    for at in _HALVES.get(encoding, (0,)):
        if size == 32:
            scales = generator.uniform(-0.1, 0.1, blocks.shape[:2]).astype(np.float16)
        else:
            scales = np.ldexp(generator.choice([-1.0, 1.0], blocks.shape[:2]), generator.integers(-10, -8, blocks.shape[:2])).astype(
                np.float16
            )
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    if encoding == "MXFP4":
        blocks[:, :, 0] = 120 + blocks[:, :, 0] % 6
    return EncodedRows(encoding, (rows, columns), blocks.reshape(rows, -1))


def as_float(rows: EncodedRows) -> torch.Tensor:
    """[rows, columns] float32, in the order asked for."""
    data = rows.bytes() if rows.order is None else rows.bytes()[rows.order]
    return unpack(data.copy(), rows.encoding).float().view(rows.shape)
