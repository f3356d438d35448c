"""Packed weights in a file that every process serving the same checkpoint maps: in memory once, and packed once.

A file belongs to one state of one checkpoint (path, size, time, header) and one layout of panels; it is written beside its place,
and appears there whole or not at all. Whatever is wrong with one (another layout, a header that does not add up, a short file) means
that it is not used; whatever goes wrong while writing means private memory, as without it. Nothing here fails a start.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from octavo.ops.cpu.abi import LAYOUT
from octavo.ops.packed import EncodedRows, Panels

logger = logging.getLogger(__name__)

MAGIC: Final = b"octavo panels\n"
HEADER_BYTES: Final = 4096
ALIGNMENT: Final = 64
SUFFIX: Final = ".panels"
MIN_BYTES: Final = 32 << 20
"""Checkpoints smaller than this are packed in less time than a file is worth."""
ABANDONED_SECONDS: Final = 3600.0

PackRows = Callable[[EncodedRows, Any], Panels]
"""(rows, place [bytes] uint8) -> panels, packed into that place."""


@dataclass(frozen=True)
class Source:
    """One state of a checkpoint."""

    path: str
    size: int
    changed_ns: int
    header: str
    """Digest of its metadata and tensor directory."""

    @classmethod
    def of(cls, path: str, header_bytes: int) -> Source:
        real = os.path.realpath(path)
        status = os.stat(real)
        with open(real, "rb") as file:
            digest = hashlib.sha256(file.read(header_bytes)).hexdigest()
        return cls(real, status.st_size, status.st_mtime_ns, digest)

    def is_current(self) -> bool:
        with contextlib.suppress(OSError):
            status = os.stat(self.path)
            return (status.st_size, status.st_mtime_ns) == (self.size, self.changed_ns)
        return False

    @property
    def name(self) -> str:
        text = json.dumps([LAYOUT, self.path, self.size, self.changed_ns, self.header])
        return f"{Path(self.path).stem[:80]}-{hashlib.sha256(text.encode()).hexdigest()[:20]}{SUFFIX}"


@dataclass(frozen=True)
class _Entry:
    """One call of `pack`, by what was asked for."""

    rows: str
    kind: str
    count: int
    offset: int
    nbytes: int


@dataclass
class PanelFile:
    """Packs rows, or finds them packed. Calls must come in the same order whenever a checkpoint is loaded, which they do."""

    pack: PackRows
    packed_bytes: Callable[[EncodedRows], int]
    memory: Any
    """[bytes] uint8, mapped."""
    entries: list[_Entry]
    found: bool
    """The file was there; else it is being written."""
    _next: int = 0
    _end: int = HEADER_BYTES
    _missed: bool = field(default=False)

    def pack_rows(self, rows: EncodedRows) -> Panels:
        """See `ops.registry.PackRows`."""
        if rows.unpacked:  # may need far more room than the checkpoint: they stay private
            return self.pack(rows, None)
        asked = _describe(rows)
        if self.found:
            if self._next < len(self.entries) and self.entries[self._next].rows == asked:
                entry = self.entries[self._next]
                self._next += 1
                return Panels(entry.kind, entry.count, self._tensor(entry.offset, entry.nbytes))  # type: ignore[arg-type]
            self._missed = True
        nbytes = self.packed_bytes(rows)
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        if self.found or start + nbytes > len(self.memory):
            return self.pack(rows, None)
        panels = self.pack(rows, self.memory[start : start + nbytes])
        self._end = start + nbytes
        self.entries.append(_Entry(asked, panels.kind, panels.rows, start, nbytes))
        return panels

    def _tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of memory that cannot be written, which is the point
            return torch.from_numpy(self.memory[offset : offset + nbytes])


@contextlib.contextmanager
def panel_file(
    folder: Path, checkpoint: str, header_bytes: int, pack: PackRows, packed_bytes: Callable[[EncodedRows], int]
) -> Iterator[Callable[[EncodedRows], Panels]]:
    """`pack_rows` for loading a checkpoint, in the body of this context. The file, if it has to be written, is there afterwards.

    Args:
        header_bytes: of the checkpoint: all that is not weights.
    """
    private: Callable[[EncodedRows], Panels] = lambda rows: pack(rows, None)  # noqa: E731
    try:
        source = Source.of(checkpoint, header_bytes)
        wanted = source.size >= MIN_BYTES
        found = _read(folder / source.name) if wanted else None
    except OSError:
        wanted, found = False, None
    if not wanted:
        yield private
        return
    if found is not None:
        file = PanelFile(pack, packed_bytes, *found, found=True)
        yield file.pack_rows
        if file._missed:  # written by code that asked for other rows under the same layout
            with contextlib.suppress(OSError):
                (folder / source.name).unlink()
        return
    draft = _draft(folder, source)
    if draft is None:
        yield private
        return
    path, handle, mapped = draft
    file = PanelFile(pack, packed_bytes, np.frombuffer(mapped, np.uint8), [], found=False)
    try:
        yield file.pack_rows
        _publish(file, mapped, handle, path, folder / source.name, source)
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            os.unlink(path)  # gone already where it was published


def _describe(rows: EncodedRows) -> str:
    order = b"" if rows.order is None else np.ascontiguousarray(rows.order, np.int64).tobytes()
    return hashlib.sha256(json.dumps([rows.encoding, *rows.shape, list(rows.data.shape)]).encode() + order).hexdigest()


def _read(path: Path) -> tuple[Any, list[_Entry]] | None:
    """The mapped file and what is in it; None where there is none that can be used."""
    try:
        with path.open("rb") as file:
            head = json.loads(file.read(HEADER_BYTES).removeprefix(MAGIC).rstrip(b"\0"))
            if os.fstat(file.fileno()).st_size != head["size"]:
                raise ValueError("the file is not as long as it should be")
            file.seek(head["index"])
            index = file.read(head["size"] - head["index"])
            if hashlib.sha256(index).hexdigest() != head["digest"]:
                raise ValueError("its index is damaged")
            mapped = mmap.mmap(file.fileno(), head["size"], prot=mmap.PROT_READ)
        entries = [_Entry(**entry) for entry in json.loads(index)]
        if not all(HEADER_BYTES <= e.offset <= e.offset + e.nbytes <= head["index"] for e in entries):
            raise ValueError("its index points outside")
        return np.frombuffer(mapped, np.uint8), entries
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.info("Packed weights in %s are not used: %s.", path, error)
        return None


def _draft(folder: Path, source: Source) -> tuple[str, int, mmap.mmap] | None:
    """A file of more than enough room, mapped to be written. None where the disk has no good room for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        room = HEADER_BYTES + source.size * 5 // 4
        if shutil.disk_usage(folder).free < 4 * room:
            return None
        handle, path = tempfile.mkstemp(prefix=".packing-", dir=folder)
    except OSError as error:
        logger.debug("Packed weights are not kept: %s.", error)
        return None
    try:
        os.posix_fallocate(handle, 0, room)  # a page that the disk has no room for would kill the process that touches it
        return path, handle, mmap.mmap(handle, room)
    except (OSError, ValueError) as error:
        logger.debug("Packed weights are not kept: %s.", error)
        os.close(handle)
        os.unlink(path)
        return None


def _publish(file: PanelFile, mapped: mmap.mmap, handle: int, path: str, target: Path, source: Source) -> None:
    try:
        # From here on nobody writes, this process included.
        ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(file.memory.ctypes.data), ctypes.c_size_t(len(mapped)), 1)
        if not file.entries:
            return
        index = json.dumps([vars(entry) for entry in file.entries]).encode()
        head = {"size": file._end + len(index), "index": file._end, "digest": hashlib.sha256(index).hexdigest(), "source": vars(source)}
        line = MAGIC + json.dumps(head).encode()
        if len(line) > HEADER_BYTES:
            return
        os.ftruncate(handle, file._end)
        os.pwrite(handle, index, file._end)
        os.fsync(handle)
        os.pwrite(handle, line, 0)  # last: without it the file is none
        os.fsync(handle)
        os.replace(path, target)
    except (OSError, AttributeError) as error:
        logger.debug("Packed weights are not kept: %s.", error)


def _tidy(folder: Path) -> None:
    """Remove files whose checkpoint is gone or has changed, other layouts' files, and drafts that were left behind."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if path.name.startswith(".packing-"):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()
            elif path.suffix == SUFFIX:
                with path.open("rb") as file:
                    line = file.read(HEADER_BYTES)
                try:
                    source = Source(**json.loads(line.removeprefix(MAGIC).rstrip(b"\0"))["source"])
                    current = source.is_current() and source.name == path.name
                except (ValueError, KeyError, TypeError):
                    current = False
                if not current:
                    path.unlink()
