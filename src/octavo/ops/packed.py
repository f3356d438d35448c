"""The weight kinds that `linear` takes. A checkpoint format is turned into one of these at load; kernels know only these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from octavo.ops.coded import Activations


@dataclass(frozen=True)
class DenseWeight:
    """Floating-point weight of a linear layer.

    `onednn` data is an opaque tensor in the layout that oneDNN chose for this CPU: nothing but its own kernels may read it.
    """

    data: torch.Tensor
    """[out_features, in_features]; in which order they lie in memory is up to `layout`."""
    out_features: int
    in_features: int
    nbytes: int
    layout: Literal["plain", "onednn"] = "plain"

    @classmethod
    def plain(cls, weight: torch.Tensor) -> DenseWeight:
        """`weight` [out_features, in_features] as it is."""
        return cls(weight, weight.shape[0], weight.shape[1], weight.nbytes)


@dataclass(frozen=True)
class Int4Weight:
    """4-bit codes in groups of columns: weight = scale * (code - zero).

    Columns lie in blocks of 64: byte j of a block has column j (low half) and column j + 32 (high half), so that each half of a
    block's bytes is a run of columns and belongs to one group.
    """

    data: torch.Tensor
    """[out_features, blocks * 32] uint8"""
    scales: torch.Tensor
    """[groups, out_features], as the checkpoint has them."""
    zeros: torch.Tensor | None
    """[groups, out_features] uint8; None: 8."""
    group: int
    """Columns of a group: 32 or a multiple of 64, or no less than all there are."""
    columns: torch.Tensor | None
    """[stored columns] int64: which input each column multiplies, where they were put in order of their groups; `in_features` is an
    input that is zero. None: as they lie."""
    out_features: int
    in_features: int
    nbytes: int
    ordered: bool = False
    """Columns lie in blocks of 128 instead, as the tensor cores take them: of block byte 16 * t + 4 * q + i, the low half is column
    32 * t + 16 * (i % 2) + 2 * q + i // 2, and the high half the one 8 further."""


@dataclass(frozen=True)
class TableWeight:
    """4-bit codes that index a table: weight = scale * table[code] + outliers. Columns lie as in `Int4Weight`."""

    data: torch.Tensor
    """[out_features, blocks * 32] uint8"""
    table: torch.Tensor
    """[out_features or 1, 16], as the checkpoint has it."""
    scales: torch.Tensor | None
    """[groups, out_features]"""
    group: int
    """As in `Int4Weight`."""
    outliers: SparseRows | None
    out_features: int
    in_features: int
    nbytes: int


@dataclass(frozen=True)
class SparseRows:
    """Compressed sparse rows."""

    begins: torch.Tensor
    """[rows + 1] int32"""
    columns: torch.Tensor
    """[count] int32"""
    values: torch.Tensor
    """[count]"""

    @property
    def nbytes(self) -> int:
        return self.begins.nbytes + self.columns.nbytes + self.values.nbytes


@dataclass(frozen=True)
class Int8Weight:
    """8-bit codes: weight = scale * (code - zero)."""

    data: torch.Tensor
    """[out_features, stored columns] int8"""
    scales: torch.Tensor
    """[groups, out_features]"""
    zeros: torch.Tensor | None
    """[groups, out_features] int16; None: 0."""
    group: int
    columns: torch.Tensor | None
    """As in `Int4Weight`."""
    activations: Activations
    out_features: int
    in_features: int
    nbytes: int
    ordered: bool = False
    """Columns lie in blocks of 16 as the tensor cores take them: bytes 4 * q to 4 * q + 3 of a block are columns 2 * q, the next one, and
    the two that are 8 further."""


@dataclass(frozen=True)
class Float8Weight:
    """8-bit floating point: weight = scale * code."""

    data: torch.Tensor
    """[out_features, in_features] float8_e4m3fn"""
    scales: torch.Tensor
    """[row blocks, groups] float32"""
    row_block: int
    group: int
    activations: Activations
    out_features: int
    in_features: int
    nbytes: int


@dataclass(frozen=True)
class OffsetWeight:
    """weight = what the codes stand for + the offset of the group: blocks of GGUF that begin at a minimum of their own."""

    codes: Int4Weight | Int8Weight
    """Columns as they lie, in whole groups."""
    offsets: torch.Tensor
    """[groups, out_features] float32"""
    out_features: int
    in_features: int
    nbytes: int

    @property
    def data(self) -> torch.Tensor:
        """Of the codes."""
        return self.codes.data


@dataclass(frozen=True)
class SegmentedWeight:
    """Parts one below the other that are stored differently: one of q, k and v left as it was, say."""

    parts: tuple[DenseWeight | Int4Weight | TableWeight | Int8Weight | Float8Weight | OffsetWeight, ...]
    out_features: int
    in_features: int
    nbytes: int

    @classmethod
    def of(cls, parts: Sequence[LinearWeight]) -> SegmentedWeight:
        flat = [p for part in parts for p in (part.parts if isinstance(part, SegmentedWeight) else (part,))]
        return cls(tuple(flat), sum(p.out_features for p in flat), flat[0].in_features, sum(p.nbytes for p in flat))


LinearWeight = DenseWeight | Int4Weight | TableWeight | Int8Weight | Float8Weight | OffsetWeight | SegmentedWeight
"""What `Ops.linear` takes, a layer at a time."""


@dataclass(frozen=True)
class ExpertsWeight:
    """One floating-point weight an expert, of equal shapes."""

    data: torch.Tensor
    """[experts, out_features, in_features]; empty where `parts` or `low_bit` has them."""
    num_experts: int
    out_features: int
    in_features: int
    nbytes: int
    parts: tuple[DenseWeight, ...] = ()
    """Each expert's own, where the device wants them so."""
    low_bit: Int4Weight | TableWeight | Int8Weight | Float8Weight | None = None
    """All of them, [experts * out_features, in_features], where they stay in few bits; their inputs are taken as they are."""

    @classmethod
    def plain(cls, weight: torch.Tensor) -> ExpertsWeight:
        """`weight` [experts, out_features, in_features] as it is."""
        count, rows, columns = weight.shape
        return cls(weight, count, rows, columns, weight.nbytes)


PanelKind = Literal["f32", "f16", "bf16", "q4", "q8", "q8_minimum", "q8_halves"]
"""q4: groups of 32 columns with a scale and a minimum; q8: groups of 32 with a scale; with a minimum too; with a scale for 16 columns each."""


@dataclass(frozen=True)
class Unread:
    """Bytes still in a file: who finds a matrix packed already never needs them."""

    shape: tuple[int, int]
    read: Callable[[], npt.NDArray[np.uint8]]


@dataclass(frozen=True)
class EncodedRows:
    """Rows of a matrix as a checkpoint stores them."""

    encoding: str
    """F32, F16, BF16, or a ggml block format such as Q4_1."""
    shape: tuple[int, int]
    """(rows, columns)"""
    data: npt.NDArray[np.uint8] | Unread
    """[stored rows, bytes of a row]"""
    order: npt.NDArray[Any] | None = None
    """[rows] which stored row each row is; None: as they lie."""
    unpacked: bool = False
    """Larger than what the checkpoint has of them."""

    def bytes(self) -> npt.NDArray[np.uint8]:
        """`data`, read if it has to be.

        Raises:
            CheckpointError: the file has been cut short, or cannot be read.
        """
        return self.data.read() if isinstance(self.data, Unread) else self.data


@dataclass(frozen=True)
class Panels:
    """Consecutive rows of a matrix, packed by `DecoderKernels.pack_rows`."""

    kind: PanelKind
    rows: int
    data: npt.NDArray[np.uint8]
    """[bytes]"""
    finite: bool = True
    """False: a number, or a scale of numbers, is NaN or infinite, or too large or small for what the rows were turned into."""


@dataclass(frozen=True)
class PanelWeight:
    """A weight made of parts that may be stored differently (q and v of a mixed quantisation, say)."""

    segments: tuple[Panels, ...]
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        return sum(segment.data.nbytes for segment in self.segments)


_PANEL_NAMES: Mapping[PanelKind, str] = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "q4": "4-bit groups",
    "q8": "8-bit integers",
    "q8_minimum": "8-bit integers",
    "q8_halves": "8-bit integers",
}


def stored_as(weight: torch.Tensor | npt.NDArray[np.float32] | LinearWeight | ExpertsWeight | PanelWeight) -> dict[str, int]:
    """What a weight is stored as, in words, and in how many bytes."""
    match weight:
        case Int4Weight():
            return {"4-bit groups": weight.nbytes}
        case TableWeight():
            return {"4-bit tables": weight.nbytes}
        case Int8Weight():
            return {"8-bit integers": weight.nbytes}
        case Float8Weight():
            return {"8-bit floating point": weight.nbytes}
        case OffsetWeight():
            return dict.fromkeys(stored_as(weight.codes), weight.nbytes)
        case DenseWeight():
            return {_dtype_name(weight.data): weight.nbytes}
        case SegmentedWeight():
            return added_up(stored_as(part) for part in weight.parts)
        case PanelWeight():
            return added_up({_PANEL_NAMES[panels.kind]: panels.data.nbytes} for panels in weight.segments)
        case ExpertsWeight():
            if weight.low_bit is not None:
                return stored_as(weight.low_bit)
            return added_up(map(stored_as, weight.parts)) if weight.parts else {_dtype_name(weight.data): weight.nbytes}
    return {_dtype_name(weight): weight.nbytes}


def added_up(kinds: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The bytes of each name."""
    total: dict[str, int] = {}
    for each in kinds:
        for name, nbytes in each.items():
            total[name] = total.get(name, 0) + nbytes
    return total


def _dtype_name(tensor: torch.Tensor | npt.NDArray[np.float32]) -> str:
    return str(tensor.dtype).removeprefix("torch.")
