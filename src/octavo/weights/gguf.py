"""Weights of a GGUF file under their own names, unpacked on the way into the parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch

from octavo.checkpoint.gguf_file import GgufFile, GgufTensor
from octavo.errors import CheckpointError
from octavo.ops.coded import CodedRows
from octavo.ops.packed import EncodedRows
from octavo.weights.gguf_blocks import unpack
from octavo.weights.gguf_coded import coded_rows, packed_bits
from octavo.weights.stored import StoredTensor

_CHUNK_VALUES: Final = 2**20
"""Values unpacked at a time: small enough that the temporaries stay in the cache."""

_ROPE_DIVISORS: Final = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def open_gguf(gguf: GgufFile, packed_on: torch.device | None = None) -> Iterator[StoredTensor]:
    """The tensors of a parsed file, except the rotary divisors (see `rope_divisors`).

    Args:
        packed_on: where matrices are wanted as codes too, if they are.

    Those of experts, and of heads kept apart, are handed on one by one: `blk.3.ffn_up_exps.weight` as `blk.3.ffn_up_exps.0.weight`, ...

    Raises:
        CheckpointError: the file cannot be mapped, or it is not what its header says.
    """
    try:
        data = np.memmap(gguf.path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{gguf.path}: cannot be read: {e}") from None
    for whole in gguf.tensors.values():
        if whole.name in _ROPE_DIVISORS:
            continue
        for tensor in _slices(whole):
            copier, encoded = _copier(data, tensor, gguf.path), _encoded(data, tensor)
            coded = None if packed_on is None else _coded(data, tensor, gguf.path, packed_on)
            yield StoredTensor(tensor.name, tensor.shape, tensor.nbytes, gguf.path, copier, encoded=encoded, coded=coded)


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


def rope_divisors(gguf: GgufFile, name: str = _ROPE_DIVISORS[0]) -> list[float] | None:
    """Divisors of the rotary frequencies: how converters store Llama 3.1 scaling, and twice LongRoPE's. None: the file has none.

    Raises:
        CheckpointError: they are stored in a way that cannot be read.
    """
    if (tensor := gguf.tensors.get(name)) is None:
        return None
    out = torch.empty(tensor.shape, dtype=torch.float32)
    _copier(np.memmap(gguf.path, dtype=np.uint8, mode="r"), tensor, gguf.path)(out)
    return out.flatten().tolist()


def _encoded(data: np.ndarray[Any, np.dtype[np.uint8]], tensor: GgufTensor) -> Callable[[], EncodedRows] | None:
    if len(tensor.shape) != 2:
        return None
    rows, columns = tensor.shape
    stored = data[tensor.offset : tensor.offset + tensor.nbytes].reshape(rows, -1)
    return lambda: EncodedRows(tensor.type, (rows, columns), stored)


def _coded(
    data: np.ndarray[Any, np.dtype[np.uint8]], tensor: GgufTensor, path: str, device: torch.device
) -> Callable[[], CodedRows] | None:
    if len(tensor.shape) != 2 or packed_bits(tensor.type) is None:
        return None

    def coded() -> CodedRows:
        stored = data[tensor.offset : tensor.offset + tensor.nbytes].reshape(tensor.shape[0], -1)
        rows = coded_rows(torch.from_numpy(np.array(stored)).to(device), tensor.type)
        for worth in (rows.scales, rows.minimums):
            if worth is not None and not bool(torch.isfinite(worth).all()):
                raise CheckpointError(f"{path}: tensor {tensor.name} holds scales that are NaN or infinite: it is damaged.")
        return rows

    return coded


def _copier(
    data: np.ndarray[Any, np.dtype[np.uint8]],
    tensor: GgufTensor,
    path: str,
) -> Callable[[torch.Tensor], None]:
    def copy_into(destination: torch.Tensor) -> None:
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        stored = data[tensor.offset : tensor.offset + tensor.nbytes].reshape(rows, -1)
        target = destination.view(rows, -1)
        step = max(1, _CHUNK_VALUES // target.shape[1])
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            chunk = np.array(stored[start:stop])  # a copy: the map is read-only
            try:
                target[start:stop].copy_(unpack(chunk, tensor.type))
            except NotImplementedError:
                raise CheckpointError(f"{path}: tensor {tensor.name} has type {tensor.type}, which cannot be read.") from None

    return copy_into
