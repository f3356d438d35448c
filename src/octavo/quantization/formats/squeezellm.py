"""SqueezeLLM (Kim et al. 2023): 4- or 3-bit codes into a table of each output's own, and outliers in a sparse matrix beside them."""

from __future__ import annotations

import torch

from octavo.ops.coded import CodedRows, Outliers
from octavo.quantization.pieces import FLOATS, Format, Pieces, unpacked
from octavo.quantization.random_codes import Storage, everywhere
from octavo.quantization.settings import Settings

_TABLE = ("qweight", "lookup_table")
_SPARSE = ("rows", "cols", "vals", "full_rows", "full_row_indices")


def squeezellm(settings: Settings) -> Format:
    """
    Raises:
        UnsupportedModel: another number of bits.
    """
    bits = settings.bits("wbits", "bits", allowed=(3, 4))
    return Format(
        "squeezellm",
        frozenset(_TABLE + _SPARSE),
        frozenset(_TABLE),
        lambda pieces: _read(pieces, bits),
        everywhere(Storage("table", 1 << bits)),
        frozenset({"startrows"}),
    )


def _read(pieces: Pieces, bits: int) -> CodedRows:
    words = pieces.of("qweight", torch.int32, dims=2)
    if words.shape[0] * 32 % bits:
        raise pieces.fail("qweight", f"int32 words of whole codes of {bits} bits")
    columns, rows = words.shape[0] * 32 // bits, words.shape[1]
    table = pieces.scales("lookup_table", shape=(rows, 1 << bits))
    table = torch.nn.functional.pad(table, (0, 16 - table.shape[1]))
    return CodedRows(unpacked(words.T, bits, columns), 4, table=table, outliers=_outliers(pieces, rows, columns))


def _speaks_of(pieces: Pieces, values: str, places: str, begins: str = "") -> bool:
    """Whether there are any of these outliers: none of the tensors, or empty ones, say that there are none.

    Raises:
        CheckpointError: only some of the tensors are there.
    """
    if not any(name in pieces for name in (values, places, begins)):
        return False
    said = pieces.any(values).numel() + pieces.any(places).numel()
    return said > 0 or bool(begins and (pieces.any(begins) != 0).any())


def _outliers(pieces: Pieces, rows: int, columns: int) -> Outliers | None:
    found = []
    if _speaks_of(pieces, "vals", "cols", "rows"):
        values = pieces.scales("vals")
        begins = pieces.shaped("rows", torch.int32, torch.int64, shape=(rows + 1,)).long()
        inputs = pieces.shaped("cols", torch.int32, torch.int64, shape=tuple(values.shape)).long()
        counts = begins.diff()
        if bool((counts < 0).any()) or int(begins[0]) != 0 or int(begins[-1]) != len(values):
            raise pieces.fail("rows", f"ascending from 0 to the number of outliers ({len(values)})")
        if bool((inputs < 0).any()) or bool((inputs >= columns).any()):
            raise pieces.fail("cols", f"numbers from 0 to {columns - 1}")
        outputs = torch.arange(rows, device=values.device).repeat_interleave(counts)
        found.append((outputs, inputs, values.float()))
    if _speaks_of(pieces, "full_rows", "full_row_indices"):
        # Whole outputs kept dense, side by side: those with most outliers.
        full = pieces.finite("full_rows", pieces.of("full_rows", *FLOATS, dims=2)).float()
        if full.shape[0] != columns:
            raise pieces.fail("full_rows", f"of shape [{columns}, {full.shape[1]}]")
        index = pieces.shaped("full_row_indices", torch.int32, torch.int64, shape=(full.shape[1],)).long()
        if bool((index < 0).any()) or bool((index >= rows).any()):
            raise pieces.fail("full_row_indices", f"numbers from 0 to {rows - 1}")
        found.append((index.repeat_interleave(columns), torch.arange(columns, device=full.device).repeat(len(index)), full.T.flatten()))
    if not found:
        return None
    outputs, inputs, values = (torch.cat(part) for part in zip(*found, strict=True))
    order = torch.argsort(outputs, stable=True)
    return Outliers(outputs[order], inputs[order], values[order])
