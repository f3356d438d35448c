"""Low-bit rows in the block formats that the compiled CPU kernels take, without unpacking where they can say the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import torch

from octavo.ops.coded import CodedRows, dequantize, with_row_block
from octavo.ops.packed import EncodedRows

GROUP: Final = 32
_HALF_MAX: Final = 65504.0
_HALF_NORMAL: Final = 2.0**-14
"""Below it float16 loses digits."""


def block_rows(rows: CodedRows) -> EncodedRows:
    """4-bit groups as Q4_1, 8-bit ones as Q8_0; what neither can say (tables, other groups, float8, scales out of float16's range) in
    16 bits, or in 32 where those do not reach."""
    flat = with_row_block(rows, 1)
    consecutive = rows.table is None and rows.group_of is None and rows.outliers is None
    fits = rows.scales is not None and rows.shape[1] % GROUP == 0 and rows.columns_a_group % GROUP == 0
    if consecutive and fits and not rows.codes.is_floating_point():
        assert flat.scales is not None
        scales = _by_block(rows, flat.scales.float())
        zeros = torch.zeros_like(scales) if flat.zeros is None else _by_block(rows, flat.zeros.float())
        minimums = -scales * zeros
        if flat.minimums is not None:
            minimums = minimums + _by_block(rows, flat.minimums.float())
        if rows.bits == 4 and _in_half(scales) and _in_half(minimums):
            return _q4_1(rows.codes, scales, minimums)
        middle = 128.0 if rows.codes.dtype == torch.uint8 else 0.0
        if rows.bits == 8 and _in_half(scales) and bool((zeros == middle).all()) and flat.minimums is None:
            return _q8_0((rows.codes ^ 128).view(torch.int8) if middle else rows.codes, scales)
    return unpacked_rows(dequantize(rows))


def unpacked_rows(weight: torch.Tensor) -> EncodedRows:
    """A float32 matrix that was stored in few bits: 16 hold them, unless they are too large."""
    if float(weight.abs().max()) < _HALF_MAX:
        return replace(_encoded("F16", weight.half()), unpacked=True)
    return replace(_encoded("F32", weight), unpacked=True)


def _by_block(rows: CodedRows, values: torch.Tensor) -> torch.Tensor:
    """[rows, groups] -> [rows, blocks]"""
    blocks = rows.shape[1] // GROUP
    return values.expand(-1, blocks) if values.shape[1] == 1 else values[:, torch.arange(blocks) * GROUP // rows.columns_a_group]


def _in_half(values: torch.Tensor) -> bool:
    """Whether float16 holds the values as well as it holds the largest of them."""
    size = values.abs()
    largest = float(size.max())
    return largest <= _HALF_MAX and (largest >= 2 * _HALF_NORMAL or bool(((size == 0) | (size >= _HALF_NORMAL)).all()))


def _q4_1(codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> EncodedRows:
    blocks = codes.reshape(len(codes), -1, GROUP)
    nibbles = blocks[..., :16] | blocks[..., 16:] << 4
    head = torch.stack((scales, minimums), -1).half().view(torch.uint8)
    return _encoded("Q4_1", torch.cat((head, nibbles), -1).flatten(1), codes.shape[1])


def _q8_0(codes: torch.Tensor, scales: torch.Tensor) -> EncodedRows:
    head = scales.half().unsqueeze(-1).view(torch.uint8)
    return _encoded("Q8_0", torch.cat((head, codes.view(torch.uint8).reshape(len(codes), -1, GROUP)), -1).flatten(1), codes.shape[1])


def _encoded(encoding: str, data: torch.Tensor, columns: int | None = None) -> EncodedRows:
    stored = np.asarray(data.contiguous().view(torch.uint8))
    return EncodedRows(encoding, (data.shape[0], columns or data.shape[1]), stored)
