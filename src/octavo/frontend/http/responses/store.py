"""Finished (and background) responses, and conversations, kept for a bounded time in a bounded space.

SQLite, so that several server processes can share one file; by default it lives in memory. A response is kept with its own
input only: the conversation before it is found by following `previous`. Reading a conversation makes all of it recent, so
that what is dropped for room is what nobody goes on with.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.frontend.http.responses.items import Item

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, status TEXT NOT NULL, used_at REAL NOT NULL,
    size INTEGER NOT NULL, response BLOB NOT NULL, items BLOB NOT NULL, keeper INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used_at);
CREATE TABLE IF NOT EXISTS outputs (item TEXT PRIMARY KEY, response TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS outputs_by_response ON outputs (response);
CREATE TRIGGER IF NOT EXISTS outputs_gone AFTER DELETE ON responses BEGIN DELETE FROM outputs WHERE response = old.id; END;
CREATE TABLE IF NOT EXISTS held (bytes INTEGER NOT NULL);
INSERT INTO held SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM held);
CREATE TRIGGER IF NOT EXISTS responses_added AFTER INSERT ON responses BEGIN UPDATE held SET bytes = bytes + new.size; END;
CREATE TRIGGER IF NOT EXISTS responses_gone AFTER DELETE ON responses BEGIN UPDATE held SET bytes = bytes - old.size; END;
"""
MAX_CHAIN = 10_000
"""Responses in one conversation."""
_OVERHEAD = 512
"""Bytes that a row takes beside its texts."""
_OVERHEAD_OF_OUTPUT = 256
"""The same for an item of its output."""


@dataclass(frozen=True)
class StoredResponse:
    response: dict[str, Any]
    """A response as the API shows it, or a conversation."""
    items: list[Item]
    """A response's own input, without the conversation before it; all items of a conversation."""
    owner: str

    @property
    def id(self) -> str:
        return str(self.response["id"])


class ResponseStore:
    """Use from one thread.

    Args:
        path: a file that several processes may share, or ":memory:".
        ttl: seconds that a response is kept after its last use.
        max_bytes: of all responses together; 0 keeps none.
        keeper: number of this process among those that share the file.
    """

    def __init__(
        self, path: str = ":memory:", *, ttl: float, max_bytes: int, clock: Callable[[], float] = time.time, keeper: int = 0
    ) -> None:
        self._keeper = keeper
        self._ttl = ttl
        self._max_bytes = max_bytes
        self._clock = clock
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
        # What is lost in a crash of the machine is lost with the server's memory too.
        self._db.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; {_SCHEMA}")

    def close(self) -> None:
        self._db.close()

    def put(self, stored: StoredResponse) -> None:
        """Keep a response, in the place of the one with its id; drop what is too old, and the least recent above the limit.

        A response that was cancelled meanwhile stays so.
        """
        with self._transaction():
            if self._status(stored.id) != "cancelled":
                self._keep(stored)

    @contextlib.contextmanager
    def changing(self, stored_id: str, owner: str) -> Iterator[StoredResponse | None]:
        """What is kept under an id, to change in place: nobody else does meanwhile, in this process or another."""
        with self._transaction():
            stored = self.get(stored_id, owner)
            yield stored
            if stored is not None:
                self._keep(stored)

    def _keep(self, stored: StoredResponse) -> None:
        response, items = msgspec.json.encode(stored.response), msgspec.json.encode(stored.items)
        outputs = stored.response.get("output") or ()
        size = len(response) + len(items) + _OVERHEAD + _OVERHEAD_OF_OUTPUT * len(outputs)
        previous, status = stored.response.get("previous_response_id"), stored.response.get("status", "completed")
        now = self._clock()
        self._db.execute("DELETE FROM responses WHERE used_at < ? OR id = ?", (now - self._ttl, stored.id))
        row = (stored.id, stored.owner, previous, status, now, size, response, items, self._keeper)
        self._db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        self._db.executemany("INSERT OR REPLACE INTO outputs VALUES (?, ?)", [(item["id"], stored.id) for item in outputs])
        while self.size() > self._max_bytes:
            self._db.execute("DELETE FROM responses WHERE id IN (SELECT id FROM responses ORDER BY used_at, id LIMIT 1)")

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """A response of `owner`; using it keeps it longer."""
        now = self._clock()
        row = self._db.execute(
            "SELECT response, items FROM responses WHERE id = ? AND owner = ? AND used_at >= ?", (response_id, owner, now - self._ttl)
        ).fetchone()
        if row is None:
            return None
        self._db.execute("UPDATE responses SET used_at = ? WHERE id = ?", (now, response_id))
        return StoredResponse(msgspec.json.decode(row[0]), msgspec.json.decode(row[1]), owner)

    def output_item(self, item_id: str, owner: str) -> Item | None:
        """An item of the output of a response of `owner`; using it keeps the response longer."""
        row = self._db.execute("SELECT response FROM outputs WHERE item = ?", (item_id,)).fetchone()
        stored = None if row is None else self.get(row[0], owner)
        return None if stored is None else next((item for item in stored.response["output"] if item["id"] == item_id), None)

    def chain(self, response_id: str, owner: str) -> list[StoredResponse] | None:
        """The conversation that ends with a response, oldest first. None: one of its responses is not there (any more)."""
        chain: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            stored = self.get(wanted, owner)
            if stored is None or len(chain) == MAX_CHAIN:
                return None
            chain.append(stored)
            wanted = stored.response.get("previous_response_id")
        return chain[::-1]

    def delete(self, response_id: str, owner: str) -> bool:
        return self._db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)).rowcount > 0

    def fail_running(self, message: str) -> None:
        """End the responses that a predecessor with our number was at work on: nobody goes on with them."""
        rows = self._db.execute(
            "SELECT response, items, owner FROM responses WHERE keeper = ? AND status IN ('queued', 'in_progress')", (self._keeper,)
        ).fetchall()
        for encoded, items, owner in rows:
            response = msgspec.json.decode(encoded)
            response.update(status="failed", error={"code": "server_error", "message": message})
            self.put(StoredResponse(response, msgspec.json.decode(items), owner))

    def cancelled(self, response_id: str) -> bool:
        """Whether somebody cancelled or deleted it, perhaps through another process."""
        return self._status(response_id) in (None, "cancelled")

    def size(self) -> int:
        """Bytes held."""
        held: int = self._db.execute("SELECT bytes FROM held").fetchone()[0]
        return held

    def _status(self, response_id: str) -> str | None:
        row = self._db.execute("SELECT status FROM responses WHERE id = ?", (response_id,)).fetchone()
        return None if row is None else str(row[0])

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)


class _Transaction:
    """BEGIN IMMEDIATE to COMMIT: takes the write lock first, so that two processes cannot deadlock upgrading theirs."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")
