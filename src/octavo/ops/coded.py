"""`CodedRows`: a low-bit matrix as codes and what they stand for, the one thing that every quantised format is read into.

It can be cut by rows and by columns, reordered and joined, and it has a value: `dequantize` is the formula that all kernels are
tested against. `ops.pack_coded` turns it into the layout of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

ActivationKind = Literal["float", "int8", "float8"]


@dataclass(frozen=True)
class Activations:
    """What a layer's input is rounded to before it is multiplied: part of how a checkpoint was calibrated."""

    kind: ActivationKind = "float"
    """float: not rounded."""
    scale: torch.Tensor | None = None
    """[] float32: of the whole tensor, calibrated. None: each token gets its own while running."""


AS_THEY_ARE = Activations()


@dataclass(frozen=True)
class Outliers:
    """Weights kept beside the coded ones, as a sparse matrix that is added. All of the same length."""

    rows: torch.Tensor
    """[count] int64, ascending."""
    columns: torch.Tensor
    """[count] int64"""
    values: torch.Tensor
    """[count] floating point"""


@dataclass(frozen=True)
class CodedRows:
    """weight = scale * (code - zero) + minimum, or scale * table[code]; without scales it is what the code stands for."""

    codes: torch.Tensor
    """[rows, columns]: uint8 for codes of up to 8 bits without sign, int8, or float8_e4m3fn."""
    bits: Literal[4, 8]
    """4: all codes are below 16."""
    scales: torch.Tensor | None = None
    """[row blocks, groups] floating point."""
    zeros: torch.Tensor | None = None
    """[row blocks, groups] int16."""
    table: torch.Tensor | None = None
    """[rows or 1, 16] floating point."""
    row_block: int = 1
    """Consecutive rows that share scales."""
    group: int = 0
    """Consecutive columns that share a scale; 0: all of a row."""
    group_of: torch.Tensor | None = None
    """[columns] int64: the group of each column where they are not consecutive."""
    minimums: torch.Tensor | None = None
    """[row blocks, groups] floating point: where a group begins, in formats whose zero points are no codes."""
    outliers: Outliers | None = None
    activations: Activations = AS_THEY_ARE

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def columns_a_group(self) -> int:
        return self.group or self.codes.shape[1]

    def column_groups(self) -> torch.Tensor:
        """[columns] int64: the group of each column."""
        if self.group_of is not None:
            return self.group_of
        return torch.arange(self.codes.shape[1], device=self.codes.device) // self.columns_a_group

    def select_rows(self, order: torch.Tensor) -> CodedRows:
        """Row i of the result is row `order[i]`; each at most once."""
        flat = with_row_block(self, 1)
        outliers = self.outliers
        if outliers is not None:
            place = torch.full((self.shape[0],), -1, dtype=torch.int64, device=order.device)
            place[order] = torch.arange(len(order), device=order.device)
            outliers = _sorted(place[outliers.rows], outliers.columns, outliers.values)
        return replace(
            flat,
            codes=self.codes[order],
            scales=None if flat.scales is None else flat.scales[order],
            zeros=None if flat.zeros is None else flat.zeros[order],
            minimums=None if flat.minimums is None else flat.minimums[order],
            table=self.table if self.table is None or len(self.table) == 1 else self.table[order],
            outliers=outliers,
        )

    def narrow_rows(self, start: int, stop: int) -> CodedRows:
        """Rows from `start` up to `stop`, without a copy where scales allow it."""
        own = self if start % self.row_block == 0 else with_row_block(self, math.gcd(start, self.row_block))
        blocks = slice(start // own.row_block, -(-stop // own.row_block))
        outliers = self.outliers
        if outliers is not None:
            kept = (outliers.rows >= start) & (outliers.rows < stop)
            outliers = Outliers(outliers.rows[kept] - start, outliers.columns[kept], outliers.values[kept])
        return replace(
            own,
            codes=self.codes[start:stop],
            scales=None if own.scales is None else own.scales[blocks],
            zeros=None if own.zeros is None else own.zeros[blocks],
            minimums=None if own.minimums is None else own.minimums[blocks],
            table=self.table if self.table is None or len(self.table) == 1 else self.table[start:stop],
            outliers=outliers,
        )

    def narrow_columns(self, start: int, stop: int) -> CodedRows:
        """Columns from `start` up to `stop`: what a rank holds of a layer that is split by its inputs.

        Groups that the cut splits are kept on both sides, and with `group_of` only groups that are left keep their scales.
        """
        outliers = self.outliers
        if outliers is not None:
            kept = (outliers.columns >= start) & (outliers.columns < stop)
            outliers = Outliers(outliers.rows[kept], outliers.columns[kept] - start, outliers.values[kept])
        part = replace(self, codes=self.codes[:, start:stop], outliers=outliers)
        if self.scales is None or self.scales.shape[1] == 1:
            return replace(part, group=0, group_of=None)
        groups = self.column_groups()[start:stop]
        aligned = self.group_of is None and start % self.columns_a_group == 0
        used, group_of = torch.unique(groups, return_inverse=True)
        return replace(
            part,
            scales=self.scales[:, used],
            zeros=None if self.zeros is None else self.zeros[:, used],
            minimums=None if self.minimums is None else self.minimums[:, used],
            group_of=None if aligned else group_of,
        )


def with_row_block(rows: CodedRows, block: int) -> CodedRows:
    """The same with scales for each `block` rows, which divides the present number or the beginning of every present block."""
    if rows.row_block == block or (rows.scales is None and rows.zeros is None):
        return replace(rows, row_block=block)
    count = rows.shape[0]

    def spread(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.repeat_interleave(rows.row_block, 0)[:count][::block].contiguous()

    return replace(rows, scales=spread(rows.scales), zeros=spread(rows.zeros), minimums=spread(rows.minimums), row_block=block)


def joined(parts: Sequence[CodedRows]) -> CodedRows | None:
    """The parts one below the other; None where they cannot be one matrix (other groups, another kind of code, some with a table)."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if not all(_alike(first, part) for part in parts[1:]):
        return None
    begins = [sum(p.shape[0] for p in parts[:i]) for i in range(1, len(parts))]
    block = math.gcd(*(p.row_block for p in parts), *begins)
    block = block if block >= 16 else 1
    same = [with_row_block(part, block) for part in parts]
    tables = [p.table if p.table is None or len(p.table) > 1 else p.table.expand(p.shape[0], -1) for p in same]
    return replace(
        first,
        codes=torch.cat([p.codes for p in same]),
        scales=_cat([p.scales for p in same]),
        zeros=_cat([p.zeros for p in same]),
        minimums=_cat([p.minimums for p in same]),
        table=first.table if _one_table(parts) else _cat(tables),
        row_block=block,
        outliers=_joined_outliers(parts, [0, *begins]),
        activations=_joined_activations(parts),
    )


def _alike(a: CodedRows, b: CodedRows) -> bool:
    if (a.codes.dtype, a.bits, a.shape[1], a.activations.kind) != (b.codes.dtype, b.bits, b.shape[1], b.activations.kind):
        return False
    if (a.activations.scale is None) != (b.activations.scale is None):
        return False
    for name in ("scales", "zeros", "minimums", "table", "group_of"):
        x, y = getattr(a, name), getattr(b, name)
        if (x is None) != (y is None) or (x is not None and y is not None and x.dtype != y.dtype):
            return False
    if a.scales is not None and b.scales is not None and a.scales.shape[1] != b.scales.shape[1]:
        return False
    if a.group_of is not None and b.group_of is not None:
        return torch.equal(a.group_of, b.group_of)
    return a.columns_a_group == b.columns_a_group


def _one_table(parts: Sequence[CodedRows]) -> bool:
    first = parts[0].table
    return first is None or all(p.table is not None and len(p.table) == 1 and torch.equal(p.table, first) for p in parts)


def _cat(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [t for t in tensors if t is not None]
    return torch.cat(present) if present else None


def _joined_outliers(parts: Sequence[CodedRows], begins: Sequence[int]) -> Outliers | None:
    found = [(begin, p.outliers) for begin, p in zip(begins, parts, strict=True) if p.outliers is not None]
    if not found:
        return None
    return Outliers(
        torch.cat([o.rows + begin for begin, o in found]),
        torch.cat([o.columns for _, o in found]),
        torch.cat([o.values for _, o in found]),
    )


def _joined_activations(parts: Sequence[CodedRows]) -> Activations:
    """One input for all parts: calibrated scales become the largest, which clips none of them."""
    scales = [p.activations.scale for p in parts if p.activations.scale is not None]
    return replace(parts[0].activations, scale=torch.stack(scales).amax() if scales else None)


def _sorted(rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> Outliers:
    kept = rows >= 0
    rows, columns, values = rows[kept], columns[kept], values[kept]
    order = torch.argsort(rows, stable=True)
    return Outliers(rows[order], columns[order], values[order])


def dequantize(rows: CodedRows, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the codes stand for: [rows, columns], computed in float32 and rounded once."""
    if rows.table is not None:
        table = rows.table.float().expand(rows.shape[0], -1)
        weight = table.gather(1, rows.codes.long())
    else:
        weight = rows.codes.float()
    if rows.scales is not None:
        flat = with_row_block(rows, 1)
        assert flat.scales is not None
        if flat.zeros is not None:
            weight = weight - _spread(rows, flat.zeros.float())
        weight = weight * _spread(rows, flat.scales.float())
        if flat.minimums is not None:
            weight = weight + _spread(rows, flat.minimums.float())
    if (outliers := rows.outliers) is not None:
        weight.index_put_((outliers.rows, outliers.columns), outliers.values.float(), accumulate=True)
    return weight.to(dtype)


def _spread(rows: CodedRows, values: torch.Tensor) -> torch.Tensor:
    """[rows, groups] -> [rows, columns], or [rows, 1] where one is for all."""
    return values if values.shape[1] == 1 else values[:, rows.column_groups()]
