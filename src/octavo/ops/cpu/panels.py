"""Weights as panels of 16 rows (layouts: native/matmul.h), packed from a checkpoint's own bytes without unpacking them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo.config.types import CpuActivations
from octavo.ops.cpu.abi import KINDS, READ_AS, SOURCES, Engine, address, describe_linear, loaded
from octavo.ops.cpu.pages import fresh_bytes
from octavo.ops.packed import EncodedRows, Panels, PanelWeight

if TYPE_CHECKING:
    import torch


def packed_bytes(rows: EncodedRows) -> int:
    """What the rows take as panels."""
    nbytes: int = loaded().octavo_packed_bytes(KINDS[SOURCES[rows.encoding][1]], *rows.shape)
    return nbytes


def pack_rows(rows: EncodedRows, place: npt.NDArray[np.uint8] | None = None) -> Panels:
    """See `ops.registry.PackRows`.

    Args:
        place: [bytes] where the panels go; None: into memory of their own.
    """
    source, kind = SOURCES[rows.encoding]
    count, columns = rows.shape
    library = loaded()
    if place is None:
        place = fresh_bytes(packed_bytes(rows))
    order = None if rows.order is None else np.ascontiguousarray(rows.order, np.int64)
    stored = rows.bytes()
    finite = library.octavo_pack(
        source,
        stored.ctypes.data_as(ctypes.c_void_p),
        stored.shape[1],
        None if order is None else order.ctypes.data_as(ctypes.c_void_p),
        count,
        columns,
        address(place),
    )
    return Panels(kind, count, place, bool(finite))


def linear(engine: Engine, x: torch.Tensor, weight: PanelWeight, bias: torch.Tensor | None, *, activations: CpuActivations) -> torch.Tensor:
    """x @ weight.T + bias, one layer by itself.

    Args:
        x: [tokens, in_features] float32; its rows may be strided.
        activations: how x is rounded for q4 and q8 weights, with a scale for each 32 columns of a token.

    Returns:
        [tokens, out_features] float32
    """
    import torch

    out = torch.empty(x.shape[0], weight.out_features)
    described = describe_linear(weight, None if bias is None else bias.numpy())
    loaded().octavo_linear(
        engine.handle, ctypes.byref(described), x.data_ptr(), x.stride(0), x.shape[0], out.data_ptr(), out.stride(0), READ_AS[activations]
    )
    return out


def embedding(table: PanelWeight, token_ids: torch.Tensor) -> torch.Tensor:
    """Rows of a packed table: [tokens] int64 -> [tokens, in_features] float32."""
    import torch

    out = torch.empty(token_ids.shape[0], table.in_features)
    described = describe_linear(table)
    loaded().octavo_embedding(ctypes.byref(described), token_ids.contiguous().data_ptr(), token_ids.shape[0], out.data_ptr())
    return out
