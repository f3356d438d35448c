"""The tensors of a quantised checkpoint as if it were not: the pieces of each weight become one tensor under the weight's own name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

import torch

from octavo.errors import CheckpointError
from octavo.ops.coded import CodedRows, dequantize
from octavo.quantization.pieces import Format, Pieces
from octavo.weights.stored import StoredTensor

_BYTE_TYPES: Final = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)


def whole_weights(tensors: Iterable[StoredTensor], names: Iterable[str], form: Format, device: torch.device) -> Iterator[StoredTensor]:
    """Each tensor as it is, or instead of the last piece of a quantised weight the weight. Pieces are held until then.

    Args:
        names: of all tensors of the checkpoint.
        device: where the weights are wanted.

    Raises:
        CheckpointError: a piece is missing, of another shape than the others, or not finite; names the tensor.
    """
    wanted = _pieces_of(names, form)
    held: dict[str, dict[str, torch.Tensor]] = {}
    sizes: dict[str, int] = {}
    files: dict[str, dict[str, str]] = {}
    for stored in tensors:
        module, piece = _split(stored.name, form)
        if piece in form.ignored:
            continue
        if piece is None or module not in wanted:
            quantized = module in wanted or stored.name.removesuffix(".bias") in wanted
            if piece is not None and (piece != "weight" or stored.dtype in _BYTE_TYPES):
                Pieces(module, stored.file, {}).any(form.first_missing or min(form.marks))
            yield replace(stored, spare=True) if quantized and stored.name.endswith(".bias") else stored
            continue
        if stored.raw is None:
            raise CheckpointError(f"{stored.file}: tensor {stored.name} has a dtype that is not read.")
        held.setdefault(module, {})[piece] = stored.raw(device)
        files.setdefault(module, {})[piece] = stored.file
        sizes[module] = sizes.get(module, 0) + stored.nbytes
        if held[module].keys() == wanted[module]:
            rows = form.read(Pieces(module, stored.file, held.pop(module), files=files.pop(module)))
            yield _as_stored(f"{module}.weight", rows, sizes.pop(module), stored.file)


def has_pieces(names: Iterable[str], form: Format) -> bool:
    """Whether any weight is stored in a format's pieces."""
    return any(_split(name, form)[1] in form.marks for name in names)


def _pieces_of(names: Iterable[str], form: Format) -> dict[str, set[str]]:
    """The pieces of each quantised module."""
    found: dict[str, set[str]] = {}
    for name in names:
        module, piece = _split(name, form)
        if piece is not None and piece not in form.ignored:
            found.setdefault(module, set()).add(piece)
    return {module: pieces for module, pieces in found.items() if pieces & form.marks}


def _split(name: str, form: Format) -> tuple[str, str | None]:
    """A tensor's module and which piece of its weight it is, the longest that fits; None: none."""
    at = name.find(".")
    while at >= 0:
        piece = name[at + 1 :]
        if piece in form.pieces or piece in form.ignored:
            return name[:at], piece
        at = name.find(".", at + 1)
    return name, None


def _as_stored(name: str, rows: CodedRows, nbytes: int, file: str) -> StoredTensor:
    def copy_into(destination: torch.Tensor) -> None:
        destination.copy_(dequantize(rows, destination.dtype if destination.dtype.is_floating_point else torch.float32))

    return StoredTensor(name, rows.shape, nbytes, file, copy_into, coded=lambda: rows)
