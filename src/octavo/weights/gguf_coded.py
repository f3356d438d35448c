"""GGUF's block formats as codes, for weights that stay packed, and to be dequantised where they are wanted.

Codes and their worth are exact; K-quants' scales are products of two numbers in the file, which takes float32 to hold. Formats whose
runs are shorter than kernels take (Q6_K, Q2_K) do not stay packed; those whose codes are no plain numbers (most IQ types) are not read here.
Layouts: ggml-common.h of the ggml project.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from octavo.ops.coded import CodedRows

RUN: Final = 32
_IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class _Block:
    bytes: int
    read: Callable[[torch.Tensor], CodedRows]
    """[rows, blocks, bytes] uint8 -> [rows, columns]"""
    bits: float | None = None
    """Of a weight, as it is kept packed; None: it cannot be."""


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """[rows, blocks] float16: the one at byte `start` of each block."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., bytes] -> [..., 2 * bytes]: the low halves, then the high halves."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """[..., 32] uint8, 16 or 0: the bits of four bytes."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[..., start : start + 4, None] >> shifts) & 1).flatten(-2) << 4


def _four_bits(codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None) -> CodedRows:
    """Codes [rows, blocks, columns] from 0 to 15; their zero point is in the middle, as where there is no minimum."""
    minimums = None if minimums is None else minimums.float() + 8 * scales.float()
    zeros = torch.full(scales.shape, 8, dtype=torch.int16, device=codes.device)
    return CodedRows(codes.flatten(1), 4, scales, zeros, minimums=minimums, group=RUN)


def _five_bits(codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None) -> CodedRows:
    """Codes [rows, blocks, columns] from 0 to 31."""
    minimums = None if minimums is None else minimums.float() + 16 * scales.float()
    return CodedRows((codes.view(torch.int8) - 16).flatten(1), 8, scales, minimums=minimums, group=RUN)


def _q4_0(blocks: torch.Tensor) -> CodedRows:
    return _four_bits(_nibbles(blocks[..., 2:]), _half(blocks, 0), None)


def _q4_1(blocks: torch.Tensor) -> CodedRows:
    return _four_bits(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> CodedRows:
    return _five_bits(_nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2), _half(blocks, 0), None)


def _q5_1(blocks: torch.Tensor) -> CodedRows:
    return _five_bits(_nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> CodedRows:
    return CodedRows(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), 8, _half(blocks, 0), group=RUN)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums [rows, 8 * blocks] float32 of blocks that begin with two float16 and eight pairs of 6-bit numbers."""
    low, high, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = torch.cat((low & 63, (rest & 15) | ((low >> 2) & 48)), -1).float()
    minimum = torch.cat((high & 63, (rest >> 4) | ((high >> 2) & 48)), -1).float()
    d, dmin = (_half(blocks, at).float().unsqueeze(-1) for at in (0, 2))
    return (d * scale).flatten(1), (-dmin * minimum).flatten(1)


def _k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, 128] -> [rows, blocks, 256]: of 32 bytes each the low halves, then the high halves."""
    return _nibbles(packed.reshape(*packed.shape[:2], 4, RUN)).flatten(-2)


def _q4_k(blocks: torch.Tensor) -> CodedRows:
    return _four_bits(_k_nibbles(blocks[..., 16:]), *_k_scales(blocks))


def _q5_k(blocks: torch.Tensor) -> CodedRows:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    fifth = ((blocks[..., 16:48].unsqueeze(-2) >> shifts) & 1).flatten(-2) << 4
    return _five_bits(_k_nibbles(blocks[..., 48:]) | fifth, *_k_scales(blocks))


def _shifted(packed: torch.Tensor, *shifts: int) -> torch.Tensor:
    """[rows, blocks, bytes] -> [rows, blocks, shifts * bytes]: of 32 bytes each all shifts, one after the other."""
    by = torch.tensor(shifts, dtype=torch.uint8, device=packed.device).unsqueeze(-1)
    return (packed.reshape(*packed.shape[:2], -1, 1, RUN) >> by).flatten(2)


def _q6_k(blocks: torch.Tensor) -> CodedRows:
    halves = blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)
    codes = _nibbles(halves).flatten(-2) | (_shifted(blocks[..., 128:192], 0, 2, 4, 6) & 3) << 4
    scales = _half(blocks, 208).float().unsqueeze(-1) * blocks[..., 192:208].contiguous().view(torch.int8).float()
    return CodedRows((codes.view(torch.int8) - 32).flatten(1), 8, scales.flatten(1), group=16)


def _q3_k(blocks: torch.Tensor) -> CodedRows:
    """A code times its run's 6-bit scale is a number of 8 bits, if its sign is turned: -32 * -4 is the one that would not fit."""
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    scales = torch.cat((low & 15, low >> 4), -1) | ((high.unsqueeze(-2) >> shifts) & 3).flatten(-2) << 4
    taken = (_shifted(blocks[..., :32], *range(8)) & 1 ^ 1) << 2  # the offset is zero where the bit is one
    codes = (_shifted(blocks[..., 32:96], 0, 2, 4, 6) & 3).view(torch.int8) - taken.view(torch.int8)
    worth = (32 - scales.view(torch.int8)).repeat_interleave(16, -1)
    return CodedRows((codes * worth).flatten(1), 8, -_half(blocks, 108), group=256)


def _q2_k(blocks: torch.Tensor) -> CodedRows:
    scales, d, dmin = blocks[..., :16], *(_half(blocks, at).float().unsqueeze(-1) for at in (80, 82))
    codes = _shifted(blocks[..., 16:80], 0, 2, 4, 6) & 3
    worth, minimums = d * (scales & 15).float(), -dmin * (scales >> 4).float()
    return CodedRows(codes.flatten(1), 4, worth.flatten(1), minimums=minimums.flatten(1), group=16)


def _table(codes: torch.Tensor, scales: torch.Tensor, values: tuple[int, ...]) -> CodedRows:
    return CodedRows(codes.flatten(1), 4, scales, table=torch.tensor([values], dtype=torch.float32, device=codes.device), group=RUN)


def _iq4_nl(blocks: torch.Tensor) -> CodedRows:
    return _table(_nibbles(blocks[..., 2:]), _half(blocks, 0), _IQ4)


def _iq4_xs(blocks: torch.Tensor) -> CodedRows:
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[..., 2:4, None] >> shifts) & 3).flatten(-2)
    scales = _half(blocks, 0).float().unsqueeze(-1) * ((low | high << 4).float() - 32)
    return _table(_nibbles(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16)), scales.flatten(1), _IQ4)


def _mxfp4(blocks: torch.Tensor) -> CodedRows:
    scales = torch.exp2(blocks[..., 0].float() - 128.0)  # half of what the exponent says: the table has doubles
    return _table(_nibbles(blocks[..., 1:]), scales.bfloat16(), _MXFP4)


_BLOCKS: Final[Mapping[str, _Block]] = {
    "Q4_0": _Block(18, _q4_0, 4.5),
    "Q4_1": _Block(20, _q4_1, 5.5),
    "Q5_0": _Block(22, _q5_0, 8.5),
    "Q5_1": _Block(24, _q5_1, 9.5),
    "Q8_0": _Block(34, _q8_0, 8.5),
    "Q4_K": _Block(144, _q4_k, 6.0),
    "Q5_K": _Block(176, _q5_k, 10.0),
    "IQ4_NL": _Block(18, _iq4_nl, 4.5),
    "IQ4_XS": _Block(136, _iq4_xs, 5.0),
    "MXFP4": _Block(17, _mxfp4, 4.5),
    "Q3_K": _Block(110, _q3_k, 8.0625),
    "Q6_K": _Block(210, _q6_k),
    "Q2_K": _Block(84, _q2_k),
}


def packed_bits(type_name: str) -> float | None:
    """Bits of a weight of a ggml type that is kept packed; None: it cannot be."""
    block = _BLOCKS.get(type_name)
    return None if block is None else block.bits


def is_readable(type_name: str) -> bool:
    """Whether `coded_rows` reads a type."""
    return type_name in _BLOCKS


def coded_rows(rows: torch.Tensor, type_name: str) -> CodedRows:
    """A matrix of a type that is readable.

    Args:
        rows: [rows, bytes of a row] uint8
    """
    block = _BLOCKS[type_name]
    return block.read(rows.view(len(rows), -1, block.bytes))
