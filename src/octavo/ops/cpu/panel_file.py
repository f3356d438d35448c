"""Packed weights in a file that every process serving the same checkpoint maps: in memory once, and packed once.

A file belongs to one state of one checkpoint (path, size, time, header) and one layout of panels; it is written beside its place,
and appears there whole or not at all. Whatever is wrong with one (a header that does not add up, a short file, panels whose checksum is
another) means that it is replaced; whatever goes wrong while writing means private memory, as without it. Nothing here fails a start.
What happens to the file afterwards does not reach the processes that use it (`held_file`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from octavo.config.device import usable_cores
from octavo.config.digest import sha256
from octavo.ops.cpu.abi import LAYOUT
from octavo.ops.cpu.held_file import Region, hold, open_file
from octavo.ops.packed import EncodedRows, Panels

logger = logging.getLogger(__name__)

MAGIC: Final = b"octavo panels\n"
FORMAT: Final = 2
"""Of the file around the panels: to be raised when it changes."""
HEADER_BYTES: Final = 4096
ALIGNMENT: Final = 64
SUFFIX: Final = ".panels"
MIN_BYTES: Final = 32 << 20
"""Checkpoints smaller than this are packed in less time than a file is worth."""
_CHECKED_AT_ONCE: Final = 4
"""Threads that compute checksums: more than memory can feed."""
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
            digest = sha256(file.read(header_bytes)).hexdigest()
        return cls(real, status.st_size, status.st_mtime_ns, digest)

    def is_current(self) -> bool:
        with contextlib.suppress(OSError):
            status = os.stat(self.path)
            return (status.st_size, status.st_mtime_ns) == (self.size, self.changed_ns)
        return False

    @property
    def name(self) -> str:
        text = json.dumps([FORMAT, LAYOUT, self.path, self.size, self.changed_ns, self.header])
        return f"{Path(self.path).stem[:80]}-{sha256(text.encode()).hexdigest()[:20]}{SUFFIX}"


@dataclass(frozen=True)
class _Entry:
    """One call of `pack`, by what was asked for."""

    rows: str
    kind: str
    count: int
    offset: int
    nbytes: int
    crc32: int = 0
    """Of the panels; in a file that is being written, computed at its end."""


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
    _sound: bool = True
    """No weight was NaN or infinite. A model of such weights answers nothing, and need not start quickly."""

    def pack_rows(self, rows: EncodedRows) -> Panels:
        """See `ops.registry.PackRows`."""
        if rows.unpacked:  # may need far more room than the checkpoint: they stay private
            return self.pack(rows, None)
        asked = _describe(rows)
        if self.found:
            if self._next < len(self.entries) and self.entries[self._next].rows == asked:
                entry = self.entries[self._next]
                self._next += 1
                return Panels(entry.kind, entry.count, self.memory[entry.offset : entry.offset + entry.nbytes])  # type: ignore[arg-type]
            self._missed = True
        nbytes = self.packed_bytes(rows)
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        if self.found or start + nbytes > len(self.memory):
            return self.pack(rows, None)
        panels = self.pack(rows, self.memory[start : start + nbytes])
        self._end = start + nbytes
        self._sound = self._sound and panels.finite
        self.entries.append(_Entry(asked, panels.kind, panels.rows, start, nbytes))
        return panels


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
    path, handle, region = draft
    try:
        with os.fdopen(handle, "r+b", buffering=0) as written:
            file = PanelFile(pack, packed_bytes, region.array(), [], found=False)
            yield file.pack_rows
            region.freeze()
            sound = file.entries and file._sound and source.is_current()
            size = _complete(file, written.fileno(), source) if sound else 0
        if size:
            _publish(path, folder / source.name, size, region, file.entries)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)  # gone already where it was published


def _describe(rows: EncodedRows) -> str:
    order = b"" if rows.order is None else np.ascontiguousarray(rows.order, np.int64).tobytes()
    return sha256(json.dumps([rows.encoding, *rows.shape, list(rows.data.shape)]).encode() + order).hexdigest()


def _read(path: Path) -> tuple[Any, list[_Entry]] | None:
    """The bytes of the file and what is in it; None where there is none that can be used."""
    try:
        with open(open_file(str(path)), "rb") as file:
            head = _header(file.read(HEADER_BYTES))
        if not HEADER_BYTES <= head["index"] <= head["size"]:
            raise ValueError("its header is damaged")
        entries: list[_Entry] = []
        memory = hold(str(path), head["size"], sound=functools.partial(_is_sound, entries)).array()
        index = memory[head["index"] :].tobytes()
        if sha256(index).hexdigest() != head["digest"]:
            raise ValueError("its index is damaged")
        entries += [_Entry(**entry) for entry in json.loads(index)]
        if not all(HEADER_BYTES <= e.offset <= e.offset + e.nbytes <= head["index"] for e in entries):
            raise ValueError("its index points outside")
        if not _is_sound(entries, memory):
            raise ValueError("its weights are damaged: their checksum is not what it should be")
        return memory, entries
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("Packed weights in %s are not used, and packed anew: %s.", path, error)
        return None


def _header(line: bytes) -> dict[str, Any]:
    """What the first bytes of a file say of it."""
    try:
        head: dict[str, Any] = json.loads(line.removeprefix(MAGIC).rstrip(b"\0"))
    except ValueError:
        raise ValueError("its header is damaged") from None
    return head


def _is_sound(entries: Sequence[_Entry], memory: npt.NDArray[np.uint8]) -> bool:
    """Whether the panels are still what they were checked to be."""
    return _checksums(memory, entries) == [e.crc32 for e in entries]


def _checksums(memory: npt.NDArray[np.uint8], entries: Sequence[_Entry]) -> list[int]:
    """By entry; at the speed of memory, since these bytes are looked at in every start."""
    with ThreadPoolExecutor(min(_CHECKED_AT_ONCE, usable_cores())) as threads:
        return list(threads.map(lambda e: zlib.crc32(memory[e.offset : e.offset + e.nbytes].data), entries))


def _draft(folder: Path, source: Source) -> tuple[str, int, Region] | None:
    """A file of more than enough room, mapped to be written. None where the disk has no good room for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        room = HEADER_BYTES + source.size * 3 // 2
        if shutil.disk_usage(folder).free < 4 * room:
            return None
        handle, path = tempfile.mkstemp(prefix=".packing-", dir=folder)
    except OSError as error:
        logger.debug("Packed weights are not kept: %s.", error)
        return None
    try:
        os.posix_fallocate(handle, 0, room)  # a page that the disk has no room for would kill the process that touches it
        return path, handle, Region.draft(handle, room)
    except (OSError, ValueError) as error:
        logger.debug("Packed weights are not kept: %s.", error)
        os.close(handle)
        os.unlink(path)
        return None


def _complete(file: PanelFile, handle: int, source: Source) -> int:
    """Write what stands around the panels. Returns the size of the file; 0 where it could not be written."""
    try:
        checked = [replace(e, crc32=crc) for e, crc in zip(file.entries, _checksums(file.memory, file.entries), strict=True)]
        file.entries[:] = checked
        index = json.dumps([vars(entry) for entry in checked]).encode()
        size = file._end + len(index)
        head = {"size": size, "index": file._end, "digest": sha256(index).hexdigest(), "source": vars(source)}
        line = MAGIC + json.dumps(head).encode()
        if len(line) > HEADER_BYTES:
            return 0
        os.ftruncate(handle, file._end)
        os.pwrite(handle, index, file._end)
        os.fsync(handle)
        os.pwrite(handle, line, 0)  # last: without it the file is none
        os.fsync(handle)
        return size
    except OSError as error:
        logger.debug("Packed weights are not kept: %s.", error)
        return 0


def _publish(path: str, target: Path, size: int, region: Region, entries: Sequence[_Entry]) -> None:
    """Put the file in its place. From here on nobody writes, this process included."""
    try:
        hold(path, size, region, functools.partial(_is_sound, entries))
        os.replace(path, target)
    except (OSError, ValueError) as error:
        logger.debug("Packed weights are not kept: %s.", error)


def _tidy(folder: Path) -> None:
    """Remove files whose checkpoint is gone or has changed, other layouts' files, and drafts that were left behind."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if path.name.startswith(".packing-"):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()
            elif path.suffix == SUFFIX:
                try:
                    with open(open_file(str(path)), "rb") as file:
                        line = file.read(HEADER_BYTES)
                except ValueError:  # no regular file: not ours
                    continue
                try:
                    source = Source(**_header(line)["source"])
                    current = source.is_current() and source.name == path.name
                except (ValueError, KeyError, TypeError):
                    current = False
                if not current:
                    path.unlink()
