"""The tensors that a quantised weight is stored as, and the shape of a format: how they become `CodedRows`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from octavo.errors import CheckpointError
from octavo.ops.coded import CodedRows
from octavo.quantization.random_codes import Storage

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Pieces:
    """What there is of one module's weight. Every reading checks: what is missing, of the wrong shape or not finite is named."""

    def __init__(self, module: str, file: str, tensors: Mapping[str, torch.Tensor], *, files: Mapping[str, str] | None = None) -> None:
        """
        Args:
            file: where what is missing would be looked for.
            files: of those pieces that are in others.
        """
        self.module = module
        self._file = file
        self._files = files or {}
        self._tensors = tensors

    def __contains__(self, piece: str) -> bool:
        return piece in self._tensors

    def fail(self, piece: str, rule: str) -> CheckpointError:
        found = self._tensors.get(piece)
        given = "is missing" if found is None else f"has dtype {str(found.dtype).removeprefix('torch.')} and shape {list(found.shape)}"
        return CheckpointError(f"{self._named(piece)} {given}; it must be {rule}.")

    def _named(self, piece: str) -> str:
        """The file and the tensor, for messages."""
        return f"{self._files.get(piece, self._file)}: tensor {self.module}.{piece}"

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
                f"{self._named(piece)} holds {wrong} values of {tensor.numel()} that are NaN or infinite. "
                "The checkpoint is damaged, or was quantised in a dtype that overflowed; take another one."
            )
        return tensor

    def scales(self, piece: str, *, shape: tuple[int, ...] | None = None, why: str = "") -> torch.Tensor:
        """Floating point, finite, and of the shape where one is given."""
        return self.finite(piece, self.of(piece, *FLOATS) if shape is None else self.shaped(piece, *FLOATS, shape=shape, why=why))

    def magnitudes(self, piece: str, *, shape: tuple[int, ...] | None = None, why: str = "") -> torch.Tensor:
        """Scales of which none is negative. Those of integers in groups may be: auto-round puts the sign of the largest weight there."""
        tensor = self.scales(piece, shape=shape, why=why)
        if bool((tensor < 0).any()):
            raise self.fail(piece, "nowhere negative, for it is made of absolute values")
        return tensor

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
    first_missing: str = ""
    """The mark to name where a module has other pieces and no mark; default: any."""


def groups_of(columns: int, group: int) -> int:
    """How many groups `columns` make; the last one may be short."""
    return 1 if group == -1 else -(-columns // group)


def in_groups(columns: int, group: int) -> str:
    """Why scales have the shape that is asked for, for messages."""
    width = columns if group == -1 else group
    short = f", of which {width} does not divide {columns}: the last one would be short" if columns % width else ""
    return f" for {columns} inputs in groups of {width}{short}"


_TOOLS: Final[Mapping[str, str]] = {
    "g_idx": "GPTQ",
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "scales": "GPTQ or AWQ",
    "lookup_table": "SqueezeLLM",
    "weight_packed": "compressed-tensors",
    "weight_shape": "compressed-tensors",
    "weight_zero_point": "compressed-tensors",
    "weight_global_scale": "compressed-tensors",
    "weight_scale": "FP8, INT8 or compressed-tensors",
    "input_scale": "FP8, INT8 or compressed-tensors",
    "weight_scale_inv": "FP8",
    "SCB": "bitsandbytes",
    "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes",
    "nested_absmax": "bitsandbytes",
    "nested_quant_map": "bitsandbytes",
    "bitsandbytes__nf4": "bitsandbytes",
    "bitsandbytes__fp4": "bitsandbytes",
}


def tools_of(tensor: str) -> str | None:
    """What stores tensors of such names beside or instead of weights; None: nothing that is known."""
    return _TOOLS.get(tensor.rpartition(".")[2])


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
