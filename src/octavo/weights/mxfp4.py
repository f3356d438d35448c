"""MXFP4 matrices (OCP Microscaling Formats 1.0, 2023) as gpt-oss stores them, dequantised while they are copied to their place.

A matrix of several experts is two tensors: `<name>_blocks` [experts, rows, blocks, 16], of which a byte holds two 4-bit floats of a
block of 32 (the first in the low half), and `<name>_scales` [experts, rows, blocks], the exponents of powers of two, biased by 127.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

import torch

from octavo.errors import CheckpointError
from octavo.weights.stored import StoredTensor

BLOCKS: Final = "_blocks"
SCALES: Final = "_scales"
_BLOCK: Final = 32
_BIAS: Final = 127
_NAN: Final = 255
"""The exponent that stands for no number."""
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES: Final = (*_E2M1, *(-v for v in _E2M1))
_PAIRS: Final = torch.tensor([(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)]).view(torch.float64).flatten()
"""[256] what each byte stands for: two float32 side by side, fetched as one number of twice the width."""
_POWERS: Final = torch.tensor([2.0 ** (exponent - _BIAS) for exponent in range(256)], dtype=torch.float64).float()
"""[256] what each scale stands for."""
_CHUNK_BYTES: Final = 1 << 18
"""Packed bytes dequantised at a time: the temporaries are some twenty times as large."""


def join_mxfp4(tensors: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
    """The tensors of a checkpoint, with blocks and scales joined to one matrix under the name of the blocks; others as they are.

    Whichever of the two comes first is read at once: its file may be closed when the other one comes.

    Raises:
        CheckpointError: blocks without scales, scales without blocks, or shapes that do not fit each other.
    """
    waiting: dict[str, tuple[StoredTensor, torch.Tensor]] = {}
    for stored in tensors:
        kind = next((k for k in (BLOCKS, SCALES) if stored.name.endswith(k)), None)
        if kind is None:
            yield stored
            continue
        partner = stored.name.removesuffix(kind) + (SCALES if kind == BLOCKS else BLOCKS)
        bytes_ = torch.empty(stored.shape, dtype=torch.uint8)
        stored.copy_into(bytes_)
        if partner not in waiting:
            waiting[stored.name] = stored, bytes_
            continue
        other, other_bytes = waiting.pop(partner)
        pair = (stored, bytes_, other_bytes) if kind == BLOCKS else (other, other_bytes, bytes_)
        yield replace(_joined(*pair), nbytes=stored.nbytes + other.nbytes)
    for name, (stored, _) in waiting.items():
        lacking = name.removesuffix(SCALES) + BLOCKS if name.endswith(SCALES) else name.removesuffix(BLOCKS) + SCALES
        raise CheckpointError(f"{stored.file}: tensor {name} is one half of a packed matrix, and {lacking} is missing.")


def _joined(stored: StoredTensor, blocks: torch.Tensor, scales: torch.Tensor) -> StoredTensor:
    *outer, columns, width = blocks.shape
    if not outer or width != _BLOCK // 2 or scales.shape != blocks.shape[:-1]:
        raise CheckpointError(
            f"{stored.file}: tensor {stored.name} has the shape {list(blocks.shape)} and its scales {list(scales.shape)}: "
            f"they are not blocks of {_BLOCK // 2} bytes with a scale each."
        )
    if bool((scales == _NAN).any()):
        raise CheckpointError(f"{stored.file}: tensor {stored.name} has a scale that is no number.")
    return StoredTensor(stored.name, (*outer, columns * _BLOCK), stored.nbytes, stored.file, _copier(blocks, scales))


def _copier(blocks: torch.Tensor, scales: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def copy_into(destination: torch.Tensor) -> None:
        columns = blocks.shape[-2]
        packed, exponents = blocks.view(-1, columns, _BLOCK // 2), scales.view(-1, columns)
        target = destination.view(len(packed), -1)
        step = max(1, _CHUNK_BYTES // (columns * _BLOCK // 2))
        for start in range(0, len(packed), step):
            chunk = slice(start, start + step)
            target[chunk].copy_(dequantise(packed[chunk], exponents[chunk]))

    return copy_into


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of packed rows, in float32, in which all of them are exact.

    Args:
        blocks: [rows, blocks, 16] uint8
        scales: [rows, blocks] uint8

    Returns:
        [rows, 32 * blocks]
    """
    values = _PAIRS.index_select(0, blocks.reshape(-1).int()).view(torch.float32).view(*scales.shape, _BLOCK)
    return values.mul_(_POWERS[scales.int()].unsqueeze(-1)).flatten(1)
