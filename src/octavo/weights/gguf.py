"""Weights of a GGUF file under their own names, unpacked on the way into the parameter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from octavo.checkpoint.gguf_file import ROPE_DIVISORS, GgufFile, GgufTensor
from octavo.errors import CheckpointError
from octavo.ops.coded import CodedRows, dequantize, joined
from octavo.ops.packed import EncodedRows
from octavo.weights.gguf_blocks import is_float, unpack
from octavo.weights.gguf_bytes import GgufBytes, unread_rows
from octavo.weights.gguf_coded import coded_rows, is_readable, packed_bits
from octavo.weights.parallel_read import Arrival, ParallelReader
from octavo.weights.read_ahead import LARGEST_BYTES, in_advance
from octavo.weights.stored import StoredTensor

_CHUNK_VALUES: Final = 2**20
"""Values unpacked at a time: small enough that the temporaries stay in the cache."""
_DEVICE_CHUNK_VALUES: Final = 2**26
"""The same on a device, where few and large operations are quickest: temporaries of a gigabyte at most."""


def open_gguf(gguf: GgufFile, packed_on: torch.device | None = None, reader: ParallelReader | None = None) -> Iterator[StoredTensor]:
    """The tensors of a parsed file, except the rotary divisors (see `checkpoint.gguf_file`).

    Those of experts, and of heads kept apart, are handed on one by one: `blk.3.ffn_up_exps.weight` as `blk.3.ffn_up_exps.0.weight`, ...

    Args:
        packed_on: where matrices are wanted as codes too, if they are.
        reader: reads instead what its device unpacks, before its turn where that is not too much.

    Raises:
        CheckpointError: the file cannot be opened, or it is not what its header says.
    """
    tensors = _tensors(gguf, packed_on, reader)
    yield from (stored for stored, _ in tensors) if reader is None else in_advance(tensors)


def _tensors(gguf: GgufFile, packed_on: torch.device | None, reader: ParallelReader | None) -> Iterator[tuple[StoredTensor, int]]:
    """And the bytes of each that are on their way."""
    data = GgufBytes(gguf)
    scales = _outer_scales(gguf, data)
    for whole in gguf.tensors.values():
        if whole.name in ROPE_DIVISORS or _is_outer_scale(gguf, whole.name):
            continue
        parts = list(_slices(whole))
        outer = scales.get(whole.name, [1.0])
        if len(outer) not in (1, len(parts)):
            raise CheckpointError(f"{gguf.path}: tensor {whole.name} has {len(outer)} scales, and consists of {len(parts)} matrices.")
        for i, tensor in enumerate(parts):
            arrival = None
            if reader is not None and is_readable(tensor.type) and tensor.nbytes <= LARGEST_BYTES:
                place = torch.empty(tensor.nbytes, dtype=torch.uint8, device=reader.device)
                (arrival,) = reader.begin(gguf.path, tensor.offset, [place])
            blocks = _Blocks(data, tensor, gguf.path, reader, outer[i % len(outer)], arrival)
            copier, encoded = _copier(blocks), _encoded(data, tensor)
            coded = None if packed_on is None else _coded(blocks, packed_on)
            stored = StoredTensor(tensor.name, tensor.shape, tensor.nbytes, gguf.path, copier, encoded=encoded, coded=coded)
            yield stored, 0 if arrival is None else tensor.nbytes


_SCALE, _INPUT_SCALE = ".scale", ".input_scale"


def _is_outer_scale(gguf: GgufFile, name: str) -> bool:
    """Whether a tensor is what blocks with scales of 8 bits are multiplied with besides, or what inputs would be rounded by."""
    stem, kind = os.path.splitext(name)
    weight = gguf.tensors.get(f"{stem}.weight")
    return kind in (_SCALE, _INPUT_SCALE) and weight is not None and weight.type == "NVFP4"


def _outer_scales(gguf: GgufFile, data: GgufBytes) -> dict[str, list[float]]:
    """Name of a weight -> what its values are multiplied with, one number or one for each of its experts.

    Raises:
        CheckpointError: they are no positive numbers.
    """
    scales = {}
    for tensor in gguf.tensors.values():
        if not (tensor.name.endswith(_SCALE) and _is_outer_scale(gguf, tensor.name)):
            continue
        stored = data.read(tensor.name, tensor.offset, tensor.nbytes)
        numbers = stored.view(np.float32) if tensor.type == "F32" else np.zeros(1)
        if not (np.isfinite(numbers).all() and (numbers > 0).all()):
            raise CheckpointError(f"{gguf.path}: tensor {tensor.name} must hold numbers greater than 0 (as F32).")
        scales[tensor.name.removesuffix(_SCALE) + ".weight"] = [float(one) for one in numbers]
    return scales


def _slices(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The matrices of a tensor of three dimensions, or the vectors of the biases of experts; any other as it is."""
    stem, _, kind = tensor.name.rpartition(".")
    if len(tensor.shape) != 3 and not (len(tensor.shape) == 2 and stem.endswith("_exps") and kind == "bias"):
        yield tensor
        return
    count, *shape = tensor.shape
    size = tensor.nbytes // count
    for i in range(count):
        yield GgufTensor(f"{stem}.{i}.{kind}", tensor.type, tuple(shape), tensor.offset + i * size, size)


def _encoded(data: GgufBytes, tensor: GgufTensor) -> Callable[[], EncodedRows] | None:
    if len(tensor.shape) != 2:
        return None
    rows, columns = tensor.shape
    return lambda: unread_rows(data, tensor, (rows, columns))


@dataclass(frozen=True)
class _Blocks:
    """The bytes of a tensor."""

    data: GgufBytes
    tensor: GgufTensor
    path: str
    reader: ParallelReader | None = None
    outer: float = 1.0
    """What all values are multiplied with."""
    arrival: Arrival | None = None
    """The tensor's bytes, on their way to the reader's device."""

    @property
    def rows(self) -> int:
        return self.tensor.shape[0] if len(self.tensor.shape) > 1 else 1

    def read(self, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """Rows [start, stop): [rows, bytes of a row] uint8."""
        size = self.tensor.nbytes // self.rows
        if self.arrival is not None:
            return self.arrival.wait().view(self.rows, size)[start:stop].to(device)
        begin = self.tensor.offset + start * size
        if self.reader is None or self.reader.device.type != device.type:
            stored = self.data.read(self.tensor.name, begin, (stop - start) * size)
            return torch.from_numpy(stored).view(stop - start, size).to(device)
        out = torch.empty(stop - start, size, dtype=torch.uint8, device=device)
        self.reader.read(self.path, begin, out)
        return out


def _coded(blocks: _Blocks, device: torch.device) -> Callable[[], CodedRows] | None:
    tensor = blocks.tensor
    # What no kernel of a GPU takes is dequantised there piece by piece: `copy_into`.
    wanted = is_readable(tensor.type) if device.type == "cpu" else packed_bits(tensor.type) is not None
    if len(tensor.shape) != 2 or not wanted:
        return None

    def coded() -> CodedRows:
        step = max(1, _DEVICE_CHUNK_VALUES // tensor.shape[1])
        begins = range(0, blocks.rows, step)
        parts = [coded_rows(blocks.read(start, min(start + step, blocks.rows), device), tensor.type) for start in begins]
        rows = joined(parts)
        assert rows is not None, "rows of one type are alike"
        for worth in (rows.scales, rows.minimums):
            if worth is not None and not bool(torch.isfinite(worth).all()):
                raise CheckpointError(f"{blocks.path}: tensor {tensor.name} holds scales that are NaN or infinite: it is damaged.")
        return rows

    return coded


def _copier(blocks: _Blocks) -> Callable[[torch.Tensor], None]:
    tensor = blocks.tensor

    def copy_into(destination: torch.Tensor) -> None:
        target = destination.view(blocks.rows, -1)
        device = destination.device
        # A device unpacks faster than the host, and its bus carries less.
        there = device.type != "cpu" and is_readable(tensor.type)
        step = max(1, (_DEVICE_CHUNK_VALUES if there else _CHUNK_VALUES) // target.shape[1])
        for start in range(0, blocks.rows, step):
            stop = min(start + step, blocks.rows)
            if there:
                target[start:stop].copy_(dequantize(coded_rows(blocks.read(start, stop, device), tensor.type), destination.dtype))
                continue
            try:
                values = unpack(blocks.read(start, stop, torch.device("cpu")).numpy(), tensor.type)
            except NotImplementedError:
                raise CheckpointError(f"{blocks.path}: tensor {tensor.name} has type {tensor.type}, which cannot be read.") from None
            if not is_float(tensor.type) and not bool(torch.isfinite(values).all()):
                raise CheckpointError(f"{blocks.path}: tensor {tensor.name} holds scales that are NaN or infinite: it is damaged.")
            target[start:stop].copy_(values if blocks.outer == 1.0 else values * blocks.outer)

    return copy_into
