"""Low-bit weights: their layouts, the way back, and products by dequantising first. What the kernels for them are tested against."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch.nn import functional as F

from octavo.ops.coded import Activations, CodedRows, Outliers, dequantize, with_row_block
from octavo.ops.packed import (
    DenseWeight,
    Float8Weight,
    Int4Weight,
    Int8Weight,
    LinearWeight,
    OffsetWeight,
    SegmentedWeight,
    SparseRows,
    TableWeight,
)

BLOCK: Final = 64
HALF: Final = 32
FLOAT8: Final = torch.float8_e4m3fn
FLOAT8_MAX: Final = 448.0


def pack_low_bit(rows: CodedRows, dtype: torch.dtype) -> LinearWeight:
    """See `ops.registry.PackCoded`."""
    if rows.minimums is None:
        return pack_coded(rows, dtype)
    return with_offsets(pack_coded(replace(rows, minimums=None), dtype), rows, dtype)


def pack_coded(rows: CodedRows, dtype: torch.dtype) -> DenseWeight | Int4Weight | TableWeight | Int8Weight | Float8Weight:
    """`pack_low_bit` where a group is a scale and a zero point. What no layout has (minimums, groups that are not a multiple of 32 columns,
    or cut) is dequantised."""
    cut = rows.group_of is not None and (rows.table is not None or rows.codes.dtype == FLOAT8)
    if cut or rows.minimums is not None:
        return DenseWeight.plain(dequantize(rows, dtype))
    if rows.codes.dtype == FLOAT8:
        return _pack_float8(rows)
    ordered, columns = _in_order(rows)
    fitting = _fitting(ordered, rows.bits)
    if fitting is None:
        return DenseWeight.plain(dequantize(rows, dtype))
    if rows.table is not None:
        return _pack_table(fitting)
    return _pack_int4(fitting, rows.shape[1], columns) if rows.bits == 4 else _pack_int8(fitting, rows.shape[1], columns)


def unpack(weight: LinearWeight, dtype: torch.dtype) -> torch.Tensor:
    """[out_features, in_features] of any kind but a laid-out dense one."""
    match weight:
        case DenseWeight():
            assert weight.layout == "plain"
            return weight.data.to(dtype)
        case SegmentedWeight():
            return torch.cat([unpack(part, dtype) for part in weight.parts])
        case OffsetWeight():
            offsets = weight.offsets.T.repeat_interleave(weight.in_features // len(weight.offsets), 1)
            return (unpack(weight.codes, torch.float32) + offsets).to(dtype)
        case Float8Weight():
            coded = CodedRows(weight.data, 8, weight.scales, row_block=weight.row_block, group=weight.group)
            return dequantize(coded, dtype)
        case Int8Weight():
            zeros = None if weight.zeros is None else weight.zeros.T
            codes = bytes_out_of_order(weight.data) if weight.ordered else weight.data
            coded = CodedRows(codes, 8, weight.scales.T, zeros, group=weight.group)
            return _to_inputs(dequantize(coded, dtype), weight.columns, weight.in_features)
        case Int4Weight():
            codes = _whole_bytes(out_of_order(weight.data) if weight.ordered else weight.data)
            zeros = torch.full_like(weight.scales, 8, dtype=torch.int16) if weight.zeros is None else weight.zeros
            stored = weight.in_features if weight.columns is None else len(weight.columns)
            coded = CodedRows(codes[:, :stored], 4, weight.scales.T, zeros.T, group=weight.group)
            return _to_inputs(dequantize(coded, dtype), weight.columns, weight.in_features)
        case TableWeight():
            codes = _whole_bytes(weight.data)[:, : weight.in_features]
            scales = None if weight.scales is None else weight.scales.T
            group = weight.group if weight.group < weight.in_features else 0
            return dequantize(
                CodedRows(codes, 4, scales, table=weight.table, group=group, outliers=_dense_outliers(weight.outliers)), dtype
            )


def low_bit_linear(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """`ops.registry.Linear` by dequantising the weight to x's dtype; x is rounded as the weight's checkpoint asks."""
    if isinstance(weight, SegmentedWeight):
        out = torch.cat([low_bit_linear(x, part, None) for part in weight.parts], -1)
        return out if bias is None else out + bias
    if isinstance(weight, (Int8Weight, Float8Weight)) and weight.activations.kind != "float":
        x = rounded(x, weight.activations, activation_group(weight))
    return F.linear(x, unpack(weight, x.dtype), bias)


def activation_group(weight: Int8Weight | Float8Weight) -> int:
    """Features of x that share a scale where it is rounded while running: as many as the weight's groups have; 0: all of a token."""
    split = isinstance(weight, Float8Weight) and weight.group < weight.in_features and weight.in_features % weight.group == 0
    return weight.group if split and weight.activations.scale is None else 0


def rounded(x: torch.Tensor, activations: Activations, group: int = 0) -> torch.Tensor:
    """x [tokens, features] as a layer with 8-bit activations sees it.

    Args:
        group: features that share a scale, where it is not the token's.
    """
    if activations.kind == "float":
        return x
    codes, scale = round_activations(x, activations, group)
    back = codes.float()
    if group:
        return (back.view(len(x), -1, group) * scale.unsqueeze(-1)).flatten(1).to(x.dtype)
    return (back * scale).to(x.dtype)


def round_activations(x: torch.Tensor, activations: Activations, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes of x and what one of them is worth.

    Returns:
        (int8 or float8_e4m3fn of x's shape, scales float32: [tokens, 1]; with `group`, [tokens, groups]; [] where it is calibrated)
    """
    # 255 steps of an int8 from -127.5 to 127.5, as the tools that calibrate for it count them.
    largest = 127.5 if activations.kind == "int8" else FLOAT8_MAX
    values = x.float()
    if activations.scale is not None:
        scale = activations.scale
        codes = values / scale
    else:
        grouped = values.reshape(len(x), -1, group) if group else values.unsqueeze(-2)
        wide = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-10) / largest
        codes, scale = (grouped / wide).flatten(-2), wide.squeeze(-1)
    if activations.kind == "int8":
        return codes.round().clamp(-128, 127).to(torch.int8), scale
    return codes.clamp(-largest, largest).to(FLOAT8), scale


def interleaved(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [rows, columns] as `Int4Weight` has them, padded to whole blocks with zeros."""
    padded = F.pad(codes, (0, -codes.shape[1] % BLOCK)) if codes.shape[1] % BLOCK else codes
    halves = _eights(padded).view(len(codes), -1, 2, HALF // 8)
    return (halves[:, :, 1] << 4 | halves[:, :, 0]).flatten(1).view(torch.uint8)


_LOW_HALVES: Final = 0x0F0F0F0F0F0F0F0F


def _eights(data: torch.Tensor) -> torch.Tensor:
    """Rows of bytes as int64, eight at a time: operations on them take an eighth of the time."""
    data = data.contiguous()
    return (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)


def _whole_bytes(data: torch.Tensor) -> torch.Tensor:
    """The way back from `interleaved`, with the padding."""
    blocks = data.view(len(data), -1, HALF)
    return torch.stack((blocks & 15, blocks >> 4), 2).flatten(1)


def in_order(data: torch.Tensor) -> torch.Tensor:
    """4-bit codes [rows, bytes], of whole blocks of 128 columns, as `Int4Weight.ordered` has them."""
    eights = _eights(data).view(len(data), -1, 2, 2)  # 64 columns, sixteen, eight: the lower halves of 32 columns, the upper of the next
    first, second = eights[..., 0], eights[..., 1]
    lower = (second & _LOW_HALVES) << 4 | first & _LOW_HALVES
    upper = (second & ~_LOW_HALVES) | (first >> 4 & _LOW_HALVES)
    placed = torch.stack((lower, upper), 2).view(torch.uint8).view(len(data), -1, 2, 4, 2)  # 32 columns, sixteen, quarter, odd
    return placed.permute(0, 1, 3, 4, 2).reshape(len(data), -1)


def out_of_order(data: torch.Tensor) -> torch.Tensor:
    """The way back from `in_order`."""
    bytes_ = data.view(len(data), -1, 4, 2, 2)  # 32 columns, quarter, odd, sixteen
    codes = torch.stack((bytes_ & 15, bytes_ >> 4), -1).permute(0, 1, 4, 5, 2, 3)
    return interleaved(codes.reshape(len(data), -1))


def bytes_in_order(data: torch.Tensor) -> torch.Tensor:
    """8-bit codes [rows, columns], of whole blocks of 16 columns, as `Int8Weight.ordered` has them."""
    return _pairs_exchanged(data, 2, 4)


def bytes_out_of_order(data: torch.Tensor) -> torch.Tensor:
    """The way back from `bytes_in_order`."""
    return _pairs_exchanged(data, 4, 2)


def _pairs_exchanged(data: torch.Tensor, *lines: int) -> torch.Tensor:
    """The pairs of each 16 bytes, which are lines of a matrix, column by column."""
    data = data.contiguous()
    pairs = (data if data.storage_offset() % 2 == 0 else data.clone()).view(torch.int16).view(len(data), -1, *lines)
    return pairs.transpose(2, 3).reshape(len(data), -1).view(data.dtype)


def _to_inputs(weight: torch.Tensor, columns: torch.Tensor | None, in_features: int) -> torch.Tensor:
    if columns is None:
        return weight
    out = weight.new_zeros(len(weight), in_features + 1)
    out[:, columns] = weight
    return out[:, :in_features]


def _in_order(rows: CodedRows) -> tuple[CodedRows, torch.Tensor | None]:
    """The same with columns in order of their groups, and which column each was.

    Groups that have lost columns to another rank, or were never equal, are filled up to runs of 32, each with a copy of its scale.
    """
    if rows.group_of is None:
        return rows, None
    flat = with_row_block(rows, 1)
    order = torch.argsort(rows.group_of, stable=True)
    counts = torch.bincount(rows.group_of)
    groups, width = rows.group_of[order], int(counts.max())
    if bool((counts == width).all()) and (width % BLOCK == 0 or width == HALF):
        same = bool((order == torch.arange(len(order), device=order.device)).all())
        ordered = CodedRows(flat.codes[:, order], rows.bits, flat.scales, flat.zeros, group=width, activations=rows.activations)
        return ordered, None if same else order
    columns: list[torch.Tensor] = []
    runs: list[int] = []
    for group, count in enumerate(counts.tolist()):
        if count:
            columns.append(F.pad(order[groups == group], (0, -count % HALF), value=rows.shape[1]))
            runs += [group] * -(-count // HALF)
    places = torch.cat(columns)
    codes = F.pad(flat.codes, (0, 1))[:, places]
    scales = None if flat.scales is None else flat.scales[:, runs]
    zeros = None if flat.zeros is None else flat.zeros[:, runs]
    return CodedRows(codes, rows.bits, scales, zeros, group=HALF, activations=rows.activations), places


def _fitting(rows: CodedRows, bits: int) -> CodedRows | None:
    """With groups that the layouts have; None where they cannot be had."""
    flat, group = with_row_block(rows, 1), rows.columns_a_group
    if rows.scales is None or group >= rows.shape[1] or group % BLOCK == 0 or group == HALF:
        return flat
    if group % HALF or (bits == 8 and group < HALF):
        return None
    count = -(-rows.shape[1] // HALF)
    runs = torch.arange(count, device=rows.codes.device) * HALF // group
    assert flat.scales is not None
    return CodedRows(
        flat.codes,
        rows.bits,
        flat.scales[:, runs],
        None if flat.zeros is None else flat.zeros[:, runs],
        flat.table,
        group=HALF,
        outliers=rows.outliers,
        activations=rows.activations,
    )


def _pack_int4(rows: CodedRows, in_features: int, columns: torch.Tensor | None) -> Int4Weight:
    assert rows.scales is not None
    data, scales = interleaved(rows.codes), rows.scales.T.contiguous()
    zeros = None if rows.zeros is None or bool((rows.zeros == 8).all()) else rows.zeros.T.contiguous().to(torch.uint8)
    if rows.zeros is None:
        zeros = torch.zeros_like(scales, dtype=torch.uint8)
    nbytes = data.nbytes + scales.nbytes + (0 if zeros is None else zeros.nbytes) + (0 if columns is None else columns.nbytes)
    return Int4Weight(data, scales, zeros, rows.columns_a_group, columns, rows.shape[0], in_features, nbytes)


def _pack_int8(rows: CodedRows, in_features: int, columns: torch.Tensor | None) -> Int8Weight:
    assert rows.scales is not None
    codes, zeros = rows.codes, rows.zeros
    if codes.dtype == torch.uint8:
        codes = (codes ^ 128).view(torch.int8)
        zeros = (torch.zeros_like(rows.scales, dtype=torch.int16) if zeros is None else zeros) - 128
    if zeros is not None:
        zeros = None if bool((zeros == 0).all()) else zeros.T.contiguous()
    scales = rows.scales.T.contiguous()
    nbytes = codes.nbytes + scales.nbytes + (0 if zeros is None else zeros.nbytes) + (0 if columns is None else columns.nbytes)
    return Int8Weight(
        codes.contiguous(), scales, zeros, rows.columns_a_group, columns, rows.activations, rows.shape[0], in_features, nbytes
    )


def with_offsets(codes: LinearWeight, rows: CodedRows, dtype: torch.dtype) -> LinearWeight:
    """`rows`, of which all but the minimums are packed as `codes`.

    Groups that another rank has a part of are dequantised: what their inputs add up to could not be had from a view of them.
    """
    group, flat = rows.columns_a_group, with_row_block(rows, 1)
    assert flat.minimums is not None
    whole = rows.group_of is None and rows.shape[1] % group == 0
    if whole and isinstance(codes, (Int4Weight, Int8Weight)) and codes.group == group:
        offsets = flat.minimums.T.float().contiguous()
        return OffsetWeight(codes, offsets, *rows.shape, codes.nbytes + offsets.nbytes)
    return DenseWeight.plain(dequantize(rows, dtype))


def _pack_float8(rows: CodedRows) -> Float8Weight:
    scales = torch.ones(1, 1, device=rows.codes.device) if rows.scales is None else rows.scales.float().contiguous()
    block = rows.shape[0] if rows.scales is None else rows.row_block
    data = rows.codes.contiguous()
    out, inner = rows.shape
    return Float8Weight(data, scales, block, rows.columns_a_group, rows.activations, out, inner, data.nbytes + scales.nbytes)


def _pack_table(rows: CodedRows) -> TableWeight:
    assert rows.table is not None
    data, scales, sparse = interleaved(rows.codes), None if rows.scales is None else rows.scales.T.contiguous(), None
    if rows.outliers is not None:
        counts = torch.bincount(rows.outliers.rows, minlength=rows.shape[0])
        begins = F.pad(counts.cumsum(0), (1, 0)).int()
        sparse = SparseRows(begins, rows.outliers.columns.int(), rows.outliers.values)
    nbytes = data.nbytes + rows.table.nbytes + (0 if scales is None else scales.nbytes) + (0 if sparse is None else sparse.nbytes)
    return TableWeight(data, rows.table, scales, rows.columns_a_group, sparse, *rows.shape, nbytes)


def _dense_outliers(sparse: SparseRows | None) -> Outliers | None:
    if sparse is None:
        return None
    counts = sparse.begins.diff().long()
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return Outliers(rows, sparse.columns.long(), sparse.values)
