"""Uploaded files and batches on disk: their records in SQLite, contents as plain files beside it. Survives the server.

A record is the JSON object that the API shows. Use from one thread; the folder belongs to one server at a time (`claim_folder`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from octavo.config.scratch import remove_scratch, scratch_folder
from octavo.errors import ConfigError, InvalidRequest
from octavo.frontend.http.batches.records import Record
from octavo.frontend.http.errors import Conflict

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, expires_at INTEGER, record BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, status TEXT NOT NULL, record BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS attempts (
    batch TEXT NOT NULL, line BLOB NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (batch, line)
);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);
"""

DATABASE = "batches.db"
"""Name of the database in the folder."""

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
"""States of a batch that somebody has to do something about."""

_INPUT_OF_BATCH = "json_extract(CAST(record AS TEXT), '$.input_file_id')"
_UNFINISHED_MARKS = ", ".join("?" * len(UNFINISHED))

Table = Literal["files", "batches"]


def default_folder(port: int) -> Path:
    """Where the server on `port` keeps its files when nobody says otherwise."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "octavo" / f"server-{port}"


@contextlib.contextmanager
def claim_folder(folder: Path) -> Iterator[None]:
    """Make `folder` ours alone while the context lasts; the kernel lets go of it if we die.

    Raises:
        ConfigError: it cannot be used, or another server has it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as e:
        raise ConfigError(f"The state folder {folder} cannot be used: {e.strerror or e}. Choose another with --state-dir.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"Another server uses the state folder {folder}. Choose another with --state-dir.") from None
    finally:
        os.close(lock)


@dataclass(frozen=True)
class Page:
    """A part of a list."""

    data: list[Record]
    has_more: bool


class BatchStore:
    """Files and batches of one server. Its API servers may have one of these each, in the same folder.

    Args:
        folder: where everything is; None makes a temporary one, which `close` removes.
        max_bytes: of all file contents together.
        sweep: clear away what a crash has left. Not while others may be writing.
    """

    def __init__(self, folder: Path | None, *, max_bytes: int, clock: Callable[[], float] = time.time, sweep: bool = True) -> None:
        self._temporary = folder is None
        self._folder = scratch_folder() if folder is None else folder
        self.max_bytes = max_bytes
        self.clock = clock
        self._contents = self._folder / "files"
        self._contents.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / DATABASE
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
        self._db.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; {_SCHEMA}")
        path.chmod(0o600)
        if sweep:
            self._sweep()

    def _sweep(self) -> None:
        """Removes contents that a crash left without a record; those of running batches get theirs at the end."""
        known = {file_id for (file_id,) in self._db.execute("SELECT id FROM files")}
        running = [name for (name,) in self._db.execute(f"SELECT id FROM batches WHERE status IN ({_UNFINISHED_MARKS})", UNFINISHED)]
        for path in self._contents.iterdir():
            if path.name not in known and not any(path.name.endswith(name.removeprefix("batch_")) for name in running):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self._db.close()
        if self._temporary:
            remove_scratch(self._folder)

    # Files

    def write_content(self, file_id: str, content: IO[bytes]) -> None:
        """Writes a file's content, before its record is there. May run on any thread."""
        with open(os.open(self.path(file_id), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as target:
            shutil.copyfileobj(content, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())

    def insert_file(self, record: Record, owner: str) -> None:
        """Keep a file whose content is there."""
        row = (record["id"], owner, record["purpose"], record["bytes"], record.get("expires_at"), msgspec.json.encode(record))
        self._db.execute("INSERT OR REPLACE INTO files (id, owner, purpose, bytes, expires_at, record) VALUES (?, ?, ?, ?, ?, ?)", row)

    def path(self, file_id: str) -> Path:
        """Where a file's content is. Ids are made by the server, so they are safe in a path."""
        return self._contents / file_id

    def file(self, file_id: str, owner: str) -> Record | None:
        self.drop_expired_files()
        return self._one("files", file_id, owner)

    def delete_file(self, file_id: str, owner: str) -> bool:
        """Delete a file, unless a batch that is not done reads it; False if there is none.

        Raises:
            Conflict: such a batch.
        """
        with self._alone():
            if self._one("files", file_id, owner) is None:
                return False
            for batch_id, status in self._readers(file_id):
                raise Conflict(
                    f"The file is the input of {batch_id}, which is {status}. Wait for its end, or cancel it first.", param="file_id"
                )
            self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path(file_id).unlink(missing_ok=True)
        return True

    def _readers(self, file_id: str) -> list[tuple[str, str]]:
        """Batches that read a file and are not done: id and status."""
        rows = self._db.execute(
            f"SELECT id, status FROM batches WHERE status IN ({_UNFINISHED_MARKS}) AND {_INPUT_OF_BATCH} = ?", (*UNFINISHED, file_id)
        )
        return rows.fetchall()

    def used_bytes(self) -> int:
        self.drop_expired_files()
        used: int = self._db.execute("SELECT coalesce(sum(bytes), 0) FROM files").fetchone()[0]
        return used

    def drop_expired_files(self) -> None:
        """Those that a batch still reads wait for its end."""
        reading = f"SELECT {_INPUT_OF_BATCH} FROM batches WHERE status IN ({_UNFINISHED_MARKS})"
        expired = f"DELETE FROM files WHERE expires_at <= ? AND id NOT IN ({reading}) RETURNING id"
        for (file_id,) in self._db.execute(expired, (self.clock(), *UNFINISHED)).fetchall():
            self.path(file_id).unlink(missing_ok=True)

    def files(self, owner: str, *, purpose: str | None, limit: int, after: str | None, ascending: bool) -> Page:
        self.drop_expired_files()
        where, values = ("AND purpose = ?", (purpose,)) if purpose is not None else ("", ())
        return self._page("files", owner, where, values, limit=limit, after=after, ascending=ascending)

    # Batches

    def put_batch(self, record: Record, owner: str) -> None:
        """Keep a batch, in the place of the one with its id."""
        row = (record["id"], owner, record["status"], msgspec.json.encode(record))
        self._db.execute(
            "INSERT INTO batches (id, owner, status, record) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET status = excluded.status, record = excluded.record",
            row,
        )

    def add_batch(self, record: Record, owner: str) -> bool:
        """Keep a new batch; False if its input file is not there (any more)."""
        with self._alone():
            if self._one("files", record["input_file_id"], owner) is None:
                return False
            self.put_batch(record, owner)
        return True

    @contextlib.contextmanager
    def changing(self, batch_id: str, owner: str) -> Iterator[Record | None]:
        """A batch's record to change, which nobody else changes meanwhile, in this process or another; it is kept at the end."""
        with self._alone():
            record = self.batch(batch_id, owner)
            yield record
            if record is not None:
                self.put_batch(record, owner)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else changes anything meanwhile, in this process or another."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def batch(self, batch_id: str, owner: str) -> Record | None:
        return self._one("batches", batch_id, owner)

    def batches(self, owner: str, *, limit: int, after: str | None) -> Page:
        return self._page("batches", owner, "", (), limit=limit, after=after, ascending=False)

    def next_unfinished(self, without: Collection[str] = ()) -> tuple[Record, str] | None:
        """The oldest batch that is not done, and its owner.

        Args:
            without: ids of batches that are left out.
        """
        rows = self._db.execute(
            f"SELECT id, owner FROM batches WHERE status IN ({_UNFINISHED_MARKS}) ORDER BY number", UNFINISHED
        ).fetchall()
        for batch_id, owner in rows:
            if batch_id not in without and (record := self.batch(batch_id, owner)) is not None:
                return record, owner
        return None

    def interrupted(self) -> dict[str, str]:
        """Unfinished batches with lines begun and not ended, oldest first: id -> owner. To be asked before any line is begun."""
        rows = self._db.execute(
            f"SELECT id, owner FROM batches WHERE status IN ({_UNFINISHED_MARKS}) AND id IN (SELECT batch FROM attempts) ORDER BY number",
            UNFINISHED,
        )
        return dict(rows.fetchall())

    def begin_line(self, batch_id: str, line: str) -> None:
        """A line is about to be sent. What is still written down when a server starts was in work when the last one died."""
        self._db.execute(
            "INSERT INTO attempts (batch, line, count) VALUES (?, ?, 1) ON CONFLICT (batch, line) DO UPDATE SET count = count + 1",
            (batch_id, _key(line)),
        )

    def end_line(self, batch_id: str, line: str) -> None:
        """A line has its reply, or was taken back in good order."""
        self._db.execute("DELETE FROM attempts WHERE batch = ? AND line = ?", (batch_id, _key(line)))

    def attempts(self, batch_id: str) -> dict[str, int]:
        """Lines begun and not ended: how many times."""
        found = self._db.execute("SELECT line, count FROM attempts WHERE batch = ?", (batch_id,))
        return {line.decode("utf-8", "surrogatepass"): count for line, count in found}

    def forget_attempts(self, batch_id: str) -> None:
        self._db.execute("DELETE FROM attempts WHERE batch = ?", (batch_id,))

    # Both

    def _one(self, table: Table, record_id: str, owner: str) -> Record | None:
        row = self._db.execute(f"SELECT record FROM {table} WHERE id = ? AND owner = ?", (record_id, owner)).fetchone()
        return None if row is None else msgspec.json.decode(row[0])

    def _page(
        self, table: Table, owner: str, where: str, values: tuple[Any, ...], *, limit: int, after: str | None, ascending: bool
    ) -> Page:
        if after is not None:
            row = self._db.execute(f"SELECT number FROM {table} WHERE id = ? AND owner = ?", (after, owner)).fetchone()
            if row is None:
                raise InvalidRequest(
                    f"after names {after[:100]!r}, which is not here. Give the id of the last entry that you have.", param="after"
                )
            where, values = f"{where} AND number {'>' if ascending else '<'} ?", (*values, row[0])
        order = "ASC" if ascending else "DESC"
        rows = self._db.execute(
            f"SELECT record FROM {table} WHERE owner = ? {where} ORDER BY number {order} LIMIT ?", (owner, *values, limit + 1)
        ).fetchall()
        return Page([msgspec.json.decode(record) for (record,) in rows[:limit]], len(rows) > limit)


def _key(line: str) -> bytes:
    """A custom_id as it is kept: JSON may hold halves of characters, which no text column takes."""
    return line.encode("utf-8", "surrogatepass")
