"""The GGUF container (versions 2 and 3): metadata and tensor directory.

Owns the byte layout of the container, nothing about what the metadata mean or about how quantised values are packed. The file is taken
for hostile: every count, length and offset is checked against the bytes that are really there before anything is allocated,
so a truncated or damaged file is a `CheckpointError` and never a crash.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from octavo.checkpoint.files import require_file
from octavo.checkpoint.stand_in import stand_in
from octavo.errors import CheckpointError

GGML_TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""Type id -> (name, values in a block, bytes of a block)."""

ROPE_DIVISORS: Final = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that are no weights: divisors of the rotary frequencies. How converters store Llama 3.1 scaling, and twice LongRoPE's."""
_SCALARS: Final[Mapping[int, str]] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type id -> `struct` code of one value."""
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_NESTING: Final = 4
_MAX_DIMS: Final = 4
_MAX_NAME: Final = 65535
_MAX_STRING: Final = 2**26
_FIRST_READ: Final = 2**22
"""Bytes: most headers are shorter."""
_TOKENIZER: Final = "tokenizer."
_MAX_ARRAY: Final = 2**22
"""Sixteen times the largest vocabulary: a damaged count is refused before gigabytes of "values" are made."""


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor's bytes are."""

    name: str
    type: str
    """Name of the ggml type: F32, Q4_1, ..."""
    shape: tuple[int, ...]
    """Outermost dimension first, as numpy and torch have it (the file has it the other way round)."""
    offset: int
    """Of the first byte, from the start of the file."""
    nbytes: int
    """As stored, that is packed."""


@dataclass(frozen=True)
class GgufFile:
    """A parsed header. Holds no open file: tensor bytes are read from `path` by whoever needs them."""

    metadata: dict[str, Any]
    """Numbers, bools, strings and lists of them. Bytes that are no UTF-8 inside a string value become U+FFFD."""
    tensors: dict[str, GgufTensor]
    data_offset: int
    path: str


class _MoreNeeded(Exception):
    """The header goes on behind what was read."""


class _Cursor:
    """Reads forward through the header; every read checks the end of the file first.

    Args:
        data: the file's beginning.
        size: of the file.
        tokenizer: what is said of the tokenizer is wanted.

    Raises:
        _MoreNeeded: by any method.
    """

    def __init__(self, data: bytes, size: int, path: str, tokenizer: bool = True) -> None:
        self.data = data
        self.size = size
        self.pos = 0
        self.path = path
        self.tokenizer = tokenizer
        self.where = "the header"
        self.keeps = True
        """The strings of lists are made; off: they are only looked for."""

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: not a sound GGUF file: {self.where} {problem}. Download or convert it again.")

    def check(self, count: int) -> None:
        """The file may hold so many more bytes."""
        if count > self.size - self.pos:
            raise self.fail(f"needs {count} bytes at offset {self.pos}, but the file ends at {self.size} (truncated?)")

    def need(self, count: int) -> None:
        """They are at hand."""
        self.check(count)
        if count > len(self.data) - self.pos:
            raise _MoreNeeded

    def u32(self) -> int:
        self.need(4)
        self.pos += 4
        return int.from_bytes(self.data[self.pos - 4 : self.pos], "little")

    def u64(self) -> int:
        self.need(8)
        self.pos += 8
        return int.from_bytes(self.data[self.pos - 8 : self.pos], "little")

    def name(self) -> str:
        length = self.u64()
        if length > _MAX_NAME:
            raise self.fail(f"has a name of {length} bytes")
        self.need(length)
        self.pos += length
        try:
            return self.data[self.pos - length : self.pos].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("has a name that is not UTF-8") from None

    def strings(self, count: int) -> list[str]:
        """`count` length-prefixed strings, or none where they are not kept. The one hot loop here: vocabularies and merges have 50k to 300k entries."""
        data, size, pos = self.data, len(self.data), self.pos
        length_at = struct.Struct("<Q").unpack_from
        out: list[str] = []
        keeps = self.keeps
        for _ in range(count):
            start = pos + 8
            if start > size or (length := length_at(data, pos)[0]) > min(size - start, _MAX_STRING):
                if size < self.size and (start > size or length <= min(self.size - start, _MAX_STRING)):
                    raise _MoreNeeded
                raise self.fail(f"has a string at offset {pos} that reaches past the end of the file (truncated?)")
            end = start + length
            if keeps:
                out.append(data[start:end].decode("utf-8", "replace"))
            pos = end
        self.pos = pos
        return out

    def scalars(self, kind: int, count: int) -> list[Any]:
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        self.need(layout.size)
        self.pos += layout.size
        if not self.keeps:
            return []
        return list(layout.unpack_from(self.data, self.pos - layout.size))

    def values(self, kind: int, count: int, depth: int = 0) -> list[Any]:
        if count > _MAX_ARRAY:
            raise self.fail(f"has an array of {count} values")
        if kind in _SCALARS:
            return self.scalars(kind, count)
        if kind == _STRING:
            self.check(8 * count)
            return self.strings(count)
        if kind == _ARRAY and depth < _MAX_NESTING:
            self.check(12 * count)
            return [self.values(self.u32(), self.u64(), depth + 1) for _ in range(count)]
        raise self.fail(f"has a value of unknown type {kind}")


def read_gguf(path: str, *, tokenizer: bool = True) -> GgufFile:
    """Parse the header of a GGUF file: milliseconds for a 49k vocabulary, tensor data is not touched.

    Args:
        tokenizer: keep what the metadata say of the tokenizer. Its lists are most of a header, some 100 bytes of memory a token; who only
            loads weights has no use for them. They are checked all the same.

    Raises:
        CheckpointError: unreadable, not GGUF, truncated or damaged; the message names the file and the place.
    """
    require_file(path)
    wanted = _FIRST_READ
    while True:
        try:
            # Read, not mapped: a mapped file that is cut short meanwhile ends the process.
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                data = file.read(min(wanted, size))
        except OSError as e:
            raise CheckpointError(f"{path}: cannot be read as a GGUF file: {e}") from None
        if not data:
            raise CheckpointError(f"{path}: cannot be read as a GGUF file: it is empty. Download it again.")
        try:
            return _parse(_Cursor(data, size if len(data) == min(wanted, size) else len(data), path, tokenizer))
        except _MoreNeeded:
            wanted *= 4


def _parse(cursor: _Cursor) -> GgufFile:
    cursor.need(4)
    if cursor.data[:4] != b"GGUF" and (what := stand_in(cursor.path)) is not None:
        raise CheckpointError(what)
    if cursor.data[:4] != b"GGUF":
        raise CheckpointError(f"{cursor.path}: not a GGUF file (it starts with {cursor.data[:4]!r}, not b'GGUF').")
    cursor.pos = 4
    version = cursor.u32()
    if version not in (2, 3):
        if version in (2 << 24, 3 << 24):
            raise CheckpointError(
                f"{cursor.path} is a big-endian GGUF file, and only little-endian ones can be read. Convert it again without --bigendian."
            )
        raise CheckpointError(f"{cursor.path}: GGUF version {version} cannot be read, only 2 and 3.")
    num_tensors, num_values = cursor.u64(), cursor.u64()
    # The smallest entries: an empty key with a one-byte value, a nameless tensor of one dimension.
    cursor.check(num_values * 13 + num_tensors * 32)

    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        cursor.where = "the metadata"
        key = cursor.name()
        cursor.where = f"the metadata key {key!r}"
        if key in metadata:
            raise cursor.fail("appears twice")
        cursor.keeps = cursor.tokenizer or not key.startswith(_TOKENIZER)
        found = cursor.values(cursor.u32(), 1)
        metadata[key] = found[0] if cursor.keeps else None
    if not cursor.tokenizer:
        metadata = {key: value for key, value in metadata.items() if not key.startswith(_TOKENIZER)}

    directory = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.fail(f"has general.alignment {alignment!r}, which is no power of two")
    data_offset = -(-cursor.pos // alignment) * alignment
    return GgufFile(metadata, _place_tensors(cursor, directory, alignment, data_offset), data_offset, cursor.path)


def _tensor_info(cursor: _Cursor) -> GgufTensor:
    """One directory entry; its offset still counts from the start of the data."""
    cursor.where = "the tensor directory"
    name = cursor.name()
    cursor.where = f"tensor {name!r}"
    num_dims = cursor.u32()
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.fail(f"has {num_dims} dimensions (1 to {_MAX_DIMS} are allowed)")
    dims = [cursor.u64() for _ in range(num_dims)]
    kind, offset = cursor.u32(), cursor.u64()
    if kind not in GGML_TYPES:
        raise cursor.fail(f"has the unknown type {kind}")
    type_name, block_values, block_bytes = GGML_TYPES[kind]
    if min(dims) < 1 or dims[0] % block_values:
        raise cursor.fail(f"has dimensions {dims}, which {type_name} (blocks of {block_values}) cannot hold")
    return GgufTensor(name, type_name, tuple(reversed(dims)), offset, math.prod(dims) // block_values * block_bytes)


def _place_tensors(cursor: _Cursor, directory: list[GgufTensor], alignment: int, data_offset: int) -> dict[str, GgufTensor]:
    """Each begins where the one before ends, aligned, as all writers have it: a tensor whose type or shape is damaged, so that it
    seems smaller than it is, shows by the hole behind it."""
    tensors: dict[str, GgufTensor] = {}
    end_of_previous, previous = 0, ""
    for info in sorted(directory, key=lambda t: t.offset):
        cursor.where = f"tensor {info.name!r}"
        if info.name in tensors:
            raise cursor.fail("appears twice")
        if info.offset % alignment or info.offset < end_of_previous:
            raise cursor.fail(f"has the offset {info.offset}, which is not aligned to {alignment} or overlaps another tensor")
        if info.offset != (expected := -(-end_of_previous // alignment) * alignment):
            what = f"tensor {previous!r} ends at {end_of_previous}" if previous else "it is the first"
            raise cursor.fail(f"has the offset {info.offset}, but {what}, so it must be {expected}: a type or a shape is damaged")
        end_of_previous, previous = info.offset + info.nbytes, info.name
        if data_offset + end_of_previous > cursor.size:
            raise cursor.fail(f"ends at byte {data_offset + end_of_previous}, but the file has {cursor.size} (truncated?)")
        tensors[info.name] = GgufTensor(info.name, info.type, info.shape, data_offset + info.offset, info.nbytes)
    if tensors and (type_name := _fills_the_file(last := tensors[previous], alignment, cursor.size)) is not None:
        behind = cursor.size - last.offset - last.nbytes
        raise cursor.fail(
            f"is the last one and has type {last.type}, but {behind} bytes follow, which it has as {type_name}: its type is damaged"
        )
    return tensors


def _fills_the_file(last: GgufTensor, alignment: int, size: int) -> str | None:
    """Of the last tensor, whose end no other shows: the larger type with which it would end where the file does. None: there is none;
    what else somebody has appended does no harm.
    """
    if size - last.offset - last.nbytes < alignment:
        return None
    values = math.prod(last.shape)
    for name, block_values, block_bytes in GGML_TYPES.values():
        if last.shape[-1] % block_values == 0 and 0 <= size - last.offset - values // block_values * block_bytes < alignment:
            return name
    return None


def rope_divisors(gguf: GgufFile, name: str) -> list[float] | None:
    """One of `ROPE_DIVISORS`; None: the file has none.

    Raises:
        CheckpointError: they are stored in a way that cannot be read.
    """
    if (tensor := gguf.tensors.get(name)) is None:
        return None
    if tensor.type not in ("F32", "F16"):
        raise CheckpointError(f"{gguf.path}: tensor {name} has type {tensor.type}: F32 was expected.")
    with open(gguf.path, "rb") as file:
        file.seek(tensor.offset)
        stored = file.read(tensor.nbytes)
    if len(stored) != tensor.nbytes:
        raise CheckpointError(f"{gguf.path}: tensor {name} reaches past the end of the file (truncated?). Download or convert it again.")
    return [number for (number,) in struct.iter_unpack("<f" if tensor.type == "F32" else "<e", stored)]
