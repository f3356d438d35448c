"""The tensors that a quantised weight is stored as, and the shape of a format: how they become `CodedRows`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from octavo.errors import CheckpointError
from octavo.ops.coded import CodedRows
from octavo.quantization.random_codes import Storage

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Pieces:
    """What there is of one module's weight. Every reading checks: what is missing, of the wrong shape or not finite is named."""

    def __init__(self, module: str, file: str, tensors: Mapping[str, torch.Tensor], *, name: str | None = None) -> None:
        self.module = module
        self._file = file
        self._tensors = tensors
        self.where = name or module

    def __contains__(self, piece: str) -> bool:
        return piece in self._tensors

    def fail(self, piece: str, rule: str) -> CheckpointError:
        found = self._tensors.get(piece)
        given = "is missing" if found is None else f"has dtype {str(found.dtype).removeprefix('torch.')} and shape {list(found.shape)}"
        return CheckpointError(f"{self._file}: tensor {self.module}.{piece} {given}; it must be {rule}.")

    def any(self, piece: str) -> torch.Tensor:
        """A piece that must be there."""
        if piece not in self._tensors:
            raise self.fail(piece, "there, for the other tensors of this layer say that it is quantised")
        return self._tensors[piece]

    def of(self, piece: str, *dtypes: torch.dtype, dims: int | None = None) -> torch.Tensor:
        """A piece of one of the dtypes."""
        tensor = self.any(piece)
        if tensor.dtype not in dtypes or (dims is not None and tensor.ndim != dims):
            kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise self.fail(piece, kinds if dims is None else f"{kinds} with {dims} dimensions")
        if not tensor.numel():
            raise self.fail(piece, "more than nothing")
        return tensor

    def shaped(self, piece: str, *dtypes: torch.dtype, shape: tuple[int, ...], why: str = "") -> torch.Tensor:
        tensor = self.of(piece, *dtypes)
        if tuple(tensor.shape) != shape:
            raise self.fail(piece, f"of shape {list(shape)}{why}")
        return tensor

    def finite(self, piece: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, once it is known to hold neither NaN nor infinity: one of them in a scale makes every answer nonsense."""
        wrong = int((~torch.isfinite(tensor.float())).sum())
        if wrong:
            raise CheckpointError(
                f"{self._file}: tensor {self.module}.{piece} holds {wrong} values of {tensor.numel()} that are NaN or infinite. "
                "The checkpoint is damaged, or was quantised in a dtype that overflowed; take another one."
            )
        return tensor

    def scales(self, piece: str, *, shape: tuple[int, ...] | None = None, why: str = "") -> torch.Tensor:
        """Floating point, finite, and of the shape where one is given."""
        return self.finite(piece, self.of(piece, *FLOATS) if shape is None else self.shaped(piece, *FLOATS, shape=shape, why=why))

    def one(self, piece: str) -> torch.Tensor:
        """A single finite number: [] float32."""
        tensor = self.scales(piece)
        if tensor.numel() != 1:
            raise self.fail(piece, "a single number")
        return tensor.float().reshape(())


@dataclass(frozen=True)
class Format:
    """One way of storing weights, with the settings of one checkpoint."""

    method: str
    pieces: frozenset[str]
    """What follows a module's name in the names of the tensors its weight is stored as."""
    marks: frozenset[str]
    """Those of them that only a quantised module has."""
    read: Callable[[Pieces], CodedRows]
    storage: Callable[[str, tuple[int, int]], Storage | None]
    """What a module's weight of a shape is stored as, where it is to be made up; None: in full precision."""
    ignored: frozenset[str] = frozenset()
    """Pieces that say nothing about the weight, and are left out."""


def groups_of(columns: int, group: int) -> int:
    """How many groups `columns` make; the last one may be short."""
    return 1 if group == -1 else -(-columns // group)


def unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes that lie one behind the other in the bits of int32 words, lowest first; those of 3 bits cross from word to word.

    Args:
        words: [rows, words] int32

    Returns:
        [rows, count] uint8
    """
    octets = words.reshape(-1).view(torch.uint8).view(len(words), -1)  # machines that run this store the lowest byte first
    if bits == 8:
        return octets[:, :count]
    if bits == 4:
        return torch.stack((octets & 15, octets >> 4), -1).flatten(1)[:, :count]
    if bits == 2:
        return torch.stack([octets >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)[:, :count]
    single = torch.stack([octets >> shift & 1 for shift in range(8)], -1).flatten(1)[:, : count * bits]
    weights = torch.tensor([1 << i for i in range(bits)], dtype=torch.uint8, device=words.device)
    return (single.reshape(-1, count, bits) * weights).sum(-1, dtype=torch.uint8)
