"""Unpacking of GGUF's block formats to floating point.

The plain formats are done here in torch, several times faster than the gguf package's numpy and without a float32 copy of
the tensor; K-quants and the rest go through the package. Layouts: ggml-common.h of the ggml project.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32: [..., 1]."""
    return blocks[..., start : start + 2].view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """16 bytes -> 32 values: the low halves, then the high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """32 bits from byte `start`, each as the value 16 or 0: [..., 32] uint8."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((blocks[..., start : start + 4, None] >> shifts) & 1).flatten(-2) << 4


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[..., 2:].view(torch.int8) * _half(blocks, 0)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[..., 2:]).view(torch.int8) - 8) * _half(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[..., 4:]) * _half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return ((_nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)).view(torch.int8) - 16) * _half(blocks, 0)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return ((_nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)) * _half(blocks, 0)).add_(_half(blocks, 2))


_TORCH: Final[Mapping[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
}
"""Type -> (bytes of a block of 32 values, blocks [..., bytes] uint8 -> values [..., 32] float32)."""
_FLOATS: Final[Mapping[str, torch.dtype]] = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def is_float(type_name: str) -> bool:
    """Whether a ggml type is plain floating point, without blocks."""
    return type_name in _FLOATS


def unpack(rows: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], type_name: str) -> torch.Tensor:
    """Packed rows as floating point.

    Args:
        rows: [rows, bytes of a row], writable.
        type_name: ggml type.

    Returns:
        [rows, values of a row], float32 (or as stored, for the float types).

    Raises:
        NotImplementedError: a type that holds no weights, or that nobody here can unpack.
    """
    if type_name in _FLOATS:
        return torch.from_numpy(rows).view(_FLOATS[type_name])
    if type_name in _TORCH:
        block_bytes, convert = _TORCH[type_name]
        return convert(torch.from_numpy(rows).view(rows.shape[0], -1, block_bytes)).flatten(1)
    from gguf import GGMLQuantizationType, quants

    if type_name not in GGMLQuantizationType.__members__:
        raise NotImplementedError(f"unpacking of {type_name}")
    return torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[type_name]))
