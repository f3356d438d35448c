"""Random weight rows in every encoding that the compiled kernels pack, and what they mean as float32."""

from __future__ import annotations

import numpy as np
import torch

from octavo.ops.packed import EncodedRows
from octavo.weights.gguf_blocks import unpack

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
ENCODINGS = ("F32", "F16", "BF16", *BLOCK_BYTES)


def random_rows(encoding: str, rows: int, columns: int, seed: int) -> EncodedRows:
    """Block formats need whole blocks of 32 columns."""
    generator = np.random.default_rng(seed)
    if encoding not in BLOCK_BYTES:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[encoding]
        values = torch.from_numpy(generator.standard_normal((rows, columns), np.float32)).to(dtype)
        return EncodedRows(encoding, (rows, columns), values.view(torch.uint8).numpy())
    size = BLOCK_BYTES[encoding]
    blocks = generator.integers(0, 256, (rows, columns // 32, size), np.uint8)
    scales = generator.uniform(-0.1, 0.1, (rows, columns // 32, 2)).astype(np.float16)
    halves = 2 if encoding == "Q4_1" else 1
    blocks[:, :, : 2 * halves] = scales[:, :, :halves].copy().view(np.uint8)
    return EncodedRows(encoding, (rows, columns), blocks.reshape(rows, -1))


def as_float(rows: EncodedRows) -> torch.Tensor:
    """[rows, columns] float32, in the order asked for."""
    data = rows.bytes() if rows.order is None else rows.bytes()[rows.order]
    return unpack(data.copy(), rows.encoding).float().view(rows.shape)
