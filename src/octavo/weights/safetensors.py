"""Hugging Face folders of safetensors: which files there are, and their tensors, memory-mapped.

Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from octavo.checkpoint.files import is_there, read_json_object, require_file
from octavo.checkpoint.stand_in import stand_in
from octavo.errors import CheckpointError
from octavo.ops.packed import EncodedRows
from octavo.weights.parallel_read import ParallelReader
from octavo.weights.read_ahead import Entry, ReadAhead, in_advance
from octavo.weights.stored import StoredTensor

_DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes that a weight can have."""
_CODES: Final = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Further ones that the pieces of a quantised weight can have."""
Wanted = Callable[[str], bool]
"""Whether something asks for the tensor of a name."""

_INDEX: Final = "model.safetensors.index.json"


def weight_files(folder: str) -> list[str]:
    """The safetensors files that make up the model in `folder`, sorted.

    The index decides when there is one; else `model.safetensors`; else all files (some repositories add a second,
    consolidated copy of everything, which only the index or the name tells apart).

    Raises:
        CheckpointError: none, or one that the index names is missing.
    """
    if is_there(index := os.path.join(folder, _INDEX)):
        return _indexed_files(folder, index)
    if is_there(single := os.path.join(folder, "model.safetensors")):
        return [single]
    try:
        names = sorted(os.listdir(folder))
    except OSError as e:
        raise CheckpointError(f"{folder}: cannot be read: {e}") from None
    if found := [os.path.join(folder, n) for n in names if n.endswith(".safetensors") and not n.startswith("consolidated")]:
        for path in found:
            require_file(path)
        return found
    if any(n.endswith((".bin", ".pt", ".pth")) for n in names):
        raise CheckpointError(
            f"{folder}: has PyTorch weights, but not under the names that are read: pytorch_model.bin, or the files that "
            "pytorch_model.bin.index.json lists. Rename them, or take a safetensors version of the model."
        )
    raise CheckpointError(f"{folder}: holds no weights (*.safetensors, or pytorch_model.bin). For random weights use --load-format dummy.")


def _indexed_files(folder: str, index: str) -> list[str]:
    stored = read_json_object(Path(index))
    try:
        names = sorted(set(stored["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{index}: not a sound index of safetensors files: {e!r}") from None
    for name in names:
        if not isinstance(name, str) or os.path.basename(name) != name:
            raise CheckpointError(f"{index}: names the file {name!r}; only files of the same folder are allowed.")
        if not is_there(os.path.join(folder, name)):
            raise CheckpointError(f"{os.path.join(folder, name)}: missing, but {_INDEX} names it. Download the model again.")
    return [os.path.join(folder, name) for name in names]


def open_safetensors(path: str, reader: ParallelReader | None = None, ahead: Wanted | None = None) -> Iterator[StoredTensor]:
    """The tensors of one file. Pages are mapped, and read when a tensor is copied.

    Args:
        reader: reads instead what goes to a device as it is.
        ahead: which tensors that device will want whole: they are on their way before their turn. None: none.

    Raises:
        CheckpointError: unreadable, truncated or corrupt; names the first tensor that is hurt.
    """
    with _opened(path) as file:
        names = list(file.keys())
        entries = {} if reader is None else _entries(path)
        tensors = (_stored(file, name, path, reader, entries) for name in names)
        if reader is None or ahead is None:
            yield from tensors
        else:
            wanted = [entry for name in names if (entry := entries.get(name)) is not None and ahead(name)]
            yield from in_advance(map(ReadAhead(path, wanted, reader).arriving, tensors))


def tensor_names(path: str) -> list[str]:
    """Of one file.

    Raises:
        CheckpointError: see `open_safetensors`.
    """
    with _opened(path) as file:
        return list(file.keys())


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    require_file(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as e:
        what = stand_in(path) or f"{path}: not a sound safetensors file: {_diagnosis(path) or e}. Download it again."
        raise CheckpointError(what) from None


def _stored(file: Any, name: str, path: str, reader: ParallelReader | None, entries: Mapping[str, Entry]) -> StoredTensor:
    view = file.get_slice(name)
    dtype, shape = view.get_dtype(), tuple(view.get_shape())
    if dtype not in _DTYPES:  # refused when it is read: buffers that nobody reads may be of any dtype
        begin = None if reader is None or dtype not in _CODES else entries[name].begin
        raw = _raw(file, name, path, reader, begin, _CODES[dtype], shape) if dtype in _CODES else None
        nbytes = _CODES[dtype].itemsize * torch.Size(shape).numel() if dtype in _CODES else 0
        return StoredTensor(name, shape, nbytes, path, _refuser(name, dtype, path), raw=raw, dtype=_CODES.get(dtype))
    nbytes = _DTYPES[dtype].itemsize * torch.Size(shape).numel()
    place = None if reader is None else _Place(reader, entries[name].begin, _DTYPES[dtype])
    copy, region = _copier(file, name, path, place), _region_copier(file, name, path, place)
    raw = _raw(file, name, path, reader, None if place is None else place.offset, _DTYPES[dtype], shape)
    return StoredTensor(name, shape, nbytes, path, copy, region, _encoded(file, name, dtype, path), raw, _DTYPES[dtype])


def _read(file: Any, name: str, path: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path}: tensor {name} cannot be read: {e}") from None
    return tensor


def _refuser(name: str, dtype: str, path: str) -> Callable[[torch.Tensor], None]:
    def copy_into(destination: torch.Tensor) -> None:
        raise CheckpointError(f"{path}: tensor {name} has dtype {dtype}; weights must be one of {', '.join(_DTYPES)}.")

    return copy_into


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in its file, and who can read from there."""

    reader: ParallelReader
    offset: int
    dtype: torch.dtype

    def suits(self, destination: torch.Tensor) -> bool:
        """Whether the file's bytes are what the destination is to hold."""
        return destination.device.type != "cpu" and destination.dtype == self.dtype and destination.is_contiguous()


def _copier(file: Any, name: str, path: str, place: _Place | None) -> Callable[[torch.Tensor], None]:
    def copy_into(destination: torch.Tensor) -> None:
        if place is not None and place.suits(destination):
            place.reader.read(path, place.offset, destination)
        else:
            destination.copy_(_read(file, name, path))

    return copy_into


def _region_copier(file: Any, name: str, path: str, place: _Place | None) -> Callable[[tuple[slice, ...], torch.Tensor], None]:
    def copy_region(region: tuple[slice, ...], destination: torch.Tensor) -> None:
        view = file.get_slice(name)
        row = math.prod(view.get_shape()[1:])
        whole_rows = all(part == slice(0, size) for part, size in zip(region[1:], view.get_shape()[1:], strict=True))
        if place is not None and whole_rows and place.suits(destination):
            place.reader.read(path, place.offset + region[0].start * row * place.dtype.itemsize, destination)
            return
        try:
            part = view[region]
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {e}") from None
        destination.copy_(part)

    return copy_region


def _raw(
    file: Any, name: str, path: str, reader: ParallelReader | None, begin: int | None, dtype: torch.dtype, shape: tuple[int, ...]
) -> Callable[[torch.device], torch.Tensor]:
    def raw(device: torch.device) -> torch.Tensor:
        if reader is None or begin is None or device.type == "cpu" or 0 in shape:
            return _read(file, name, path).to(device)
        out = torch.empty(shape, dtype=dtype, device=device)
        reader.read(path, begin, out)
        return out

    return raw


def _entries(path: str) -> dict[str, Entry]:
    """Where in the file each tensor is whose dtype is known. The header was found sound."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    known = {**_DTYPES, **_CODES}
    return {
        name: Entry(name, known[entry["dtype"]], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in known
    }


def _encoded(file: Any, name: str, dtype: str, path: str) -> Callable[[], EncodedRows]:
    def encoded() -> EncodedRows:
        tensor = _read(file, name, path)
        rows, columns = tensor.shape
        return EncodedRows(dtype, (rows, columns), np.asarray(tensor.contiguous().view(torch.uint8)))

    return encoded


def _diagnosis(path: str) -> str | None:
    """Which tensor does not fit into the file; None when the header does not say."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if header_size > size - 8:
                return f"the header should have {header_size} bytes, the file has {size} (truncated?)"
            header = json.loads(file.read(header_size))
        entries = [(e["data_offsets"][1], name) for name, e in header.items() if name != "__metadata__"]
        for end, name in sorted(entries):
            if 8 + header_size + end > size:
                return f"tensor {name} ends at byte {8 + header_size + end}, the file has {size} (truncated?)"
    except RecursionError:
        return "its header is nested too deeply"
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        pass
    return None
