"""Answers batches, oldest first, beside live traffic.

One batch runs at a time, with a bounded number of its lines in work. A new line is begun only while nothing waits in the engine's
queue, so that a batch takes what live requests leave. Every reply is on disk before it counts; a batch that a crash interrupted
goes on with the lines that have no reply yet. Those that were in work at the crash come first, as many at once as ever, since one of them may
have been its cause; other batches run beside them. A line under which the server died `MAX_DEATHS` times is given up; the last of its tries
is made while no other line of any batch is in work, so that no other can be to blame.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TextIO

from octavo.errors import ConfigError
from octavo.frontend.http.batches.lines import (
    ENCODING,
    NO_BATCH,
    BatchLine,
    Post,
    batch_lines,
    encode_reply,
    failure,
    finished_ids,
    reply_to,
    succeeded,
)
from octavo.frontend.http.batches.records import Record, file_record
from octavo.frontend.http.batches.store import BatchStore
from octavo.frontend.http.sse import cancel

logger = logging.getLogger("octavo.server")

YIELD_SECONDS = 0.02
"""How often a batch that gives way looks whether it may go on."""
SAVE_SECONDS = 1.0
"""How often the counts of a running batch are written."""


MAX_DEATHS = 3
"""A line that was in work every time the server died so often is not tried again."""
DEADLY = f"The server died {MAX_DEATHS} times while this request was in work; it is not tried again."

UNANSWERED = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
}
"""What is said of the lines that a batch has no reply to, by how it ended."""
AT_ONCE = 1000
"""Lines of them that are written together."""

Answering = asyncio.Task[dict[str, Any]]
"""A line in work, named by its custom_id."""


class EngineGone(Exception):
    """There is no engine to answer. The batch waits for the next start of the server."""


class PostAs(Protocol):
    """Sends a body to a path on behalf of an owner: (status, decoded reply)."""

    def __call__(self, path: str, body: Any, *, owner: str) -> Awaitable[tuple[int, Any]]: ...


class BatchRunner:
    """Runs what is in a store. `wake` after adding or changing a batch.

    Args:
        post: sends a line's request.
        busy: whether live requests wait for the engine.
        concurrency: lines of a batch in work at once.
    """

    def __init__(self, store: BatchStore, post: PostAs, busy: Callable[[], bool], concurrency: int) -> None:
        self._store = store
        self._post = post
        self._busy = busy
        self._concurrency = concurrency
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        """Set while the running batch should look at its own status."""
        self._interrupted: dict[str, str] | None = None
        """Batches whose lines an earlier process died with, until these are done: id -> owner. None until they have been looked for."""
        self._news = asyncio.Event()
        """There may be another batch to run."""
        self._in_work: set[Answering] = set()
        """Lines of the batch that runs."""
        self._hold = False
        """None of its lines may be begun."""

    def wake(self) -> None:
        """Look for work, and let the running batch notice that it has been cancelled."""
        self._stopping.set()
        self._news.set()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Stop. Batches stay as they are, for the next start."""
        if self._task is not None:
            await cancel(self._task)

    async def _run(self) -> None:
        if self._interrupted is None:
            self._interrupted = self._store.interrupted()
        retries = asyncio.ensure_future(self._run_interrupted(self._interrupted))
        try:
            while True:
                last = retries.done()
                found = self._store.next_unfinished(without=self._interrupted)
                if found is None and last:
                    return
                if found is None:
                    await self._wait({retries}, None, self._news)
                    continue
                record, owner = found
                try:
                    await self._run_one(record, owner)
                except EngineGone:
                    _log_interruption(record["id"])
                    return
                except Exception as error:
                    logger.exception("Batch %s failed", record["id"])
                    self._fail(record, owner, "internal_error", f"The batch could not be run: {type(error).__name__}.")
        finally:
            await cancel(retries)

    async def _run_interrupted(self, batches: dict[str, str]) -> None:
        """The lines that were in work when a process died. What else there is of their batches is left to `_run`."""
        while batches:
            batch_id, owner = next(iter(batches.items()))
            try:
                await self._retry(batch_id, owner)
            except EngineGone:
                _log_interruption(batch_id)
                return
            except Exception:
                logger.exception("Lines of batch %s could not be tried again", batch_id)
            finally:
                # Whatever happened, the process lived to see it: no line is to blame.
                self._hold = False
                self._store.forget_attempts(batch_id)
            del batches[batch_id]
            self._news.set()

    async def _retry(self, batch_id: str, owner: str) -> None:
        record = self._store.batch(batch_id, owner)
        if record is None or record["status"] != "in_progress" or self._store.file(record["input_file_id"], owner) is None:
            return
        outputs = _Outputs(self._store, record, owner)
        try:
            done = outputs.resume()
            begun = self._store.attempts(batch_id)
            lines = (line for line in self._lines(record) if line.custom_id in begun and line.custom_id not in done)
            together: list[BatchLine] = []
            alone: list[BatchLine] = []
            while (line := await asyncio.to_thread(next, lines, None)) is not None:
                if begun[line.custom_id] >= MAX_DEATHS:
                    outputs.write(failure(line, "server_died", DEADLY))
                elif begun[line.custom_id] == MAX_DEATHS - 1:
                    alone.append(line)
                else:
                    together.append(line)
            groups = [together[i : i + self._concurrency] for i in range(0, len(together), self._concurrency)]
            for group in (*groups, *([line] for line in alone)):
                if not await self._try_again(group, record, owner, outputs, alone=group[0] in alone):
                    return
                self._save_counts(record, owner)
            self._save_counts(record, owner)
        except (ConfigError, OSError):
            return  # whoever goes on with the batch will meet it again, and end it
        finally:
            outputs.close()

    async def _try_again(self, lines: Sequence[BatchLine], record: Record, owner: str, outputs: _Outputs, *, alone: bool) -> bool:
        """Answer some lines at once; False if their batch has to end before that."""
        self._hold = alone
        while alone and self._in_work:
            await asyncio.sleep(YIELD_SECONDS)
        running: set[Answering] = set()
        try:
            for line in lines:
                self._store.begin_line(record["id"], line.custom_id)
                running.add(asyncio.create_task(_answer_line(line, self._post_for(owner)), name=line.custom_id))
            while running:
                if self._ending(record, owner) is not None:
                    return False
                await self._wait(running, SAVE_SECONDS)
                running = self._write_finished(running, outputs)
            return True
        finally:
            self._hold = False
            await cancel(*running)

    def _post_for(self, owner: str) -> Post:
        async def post(path: str, body: Any) -> tuple[int, Any]:
            status, reply = await self._post(path, body, owner=owner)
            if status == 503:
                raise EngineGone
            return status, reply

        return post

    async def _run_one(self, record: Record, owner: str) -> None:
        source = self._store.file(record["input_file_id"], owner)
        if source is None:
            self._fail(record, owner, "input_file_missing", "The input file is not there any more.")
            return
        outputs = _Outputs(self._store, record, owner)
        try:
            done = outputs.resume()
        except (ConfigError, OSError) as error:
            self._fail(record, owner, "output_file_broken", str(error))
            return
        if record["status"] == "validating" or record["request_counts"]["total"] == 0:
            record["request_counts"]["total"], objects = await asyncio.to_thread(self._count, record)
            if objects == 0:
                outputs.close()
                if record["request_counts"]["total"] == 0:
                    self._fail(record, owner, "empty_file", "There is no request in the input file.")
                else:
                    record["request_counts"]["total"] = 0
                    self._fail(record, owner, "invalid_file", NO_BATCH)
                return
        if record["status"] == "validating":
            record["status"], record["in_progress_at"] = "in_progress", int(self._store.clock())
            with self._store.changing(record["id"], owner) as stored:
                if stored is not None:
                    if stored["status"] == "cancelling":
                        record["status"], record["cancelling_at"] = "cancelling", stored["cancelling_at"]
                    stored.update(record)
        try:
            ending = await self._answer(record, owner, outputs, done)
        finally:
            outputs.close()
        outputs.publish()
        now = int(self._store.clock())
        record["status"] = ending
        record["finalizing_at"] = record["finalizing_at"] or now
        record[f"{ending}_at"] = now
        self._store.put_batch(record, owner)

    async def _answer(self, record: Record, owner: str, outputs: _Outputs, done: set[str]) -> str:
        """Answers what is missing. Returns how the batch ended: completed, cancelled or expired."""

        post = self._post_for(owner)
        running: set[Answering] = set()
        todo = (line for line in self._lines(record) if line.custom_id not in done)
        more, saved = True, time.monotonic()
        try:
            while more or running:
                ending = self._ending(record, owner)
                if ending is not None:
                    await cancel(*running)
                    self._write_finished(running, outputs)
                    cut = [BatchLine(0, task.get_name(), "", None) for task in running if task.cancelled()]
                    await self._give_up(itertools.chain(cut, todo), outputs, *UNANSWERED[ending])
                    return ending
                while more and not self._hold and len(running) < self._concurrency and not (running and self._busy()):
                    line = await asyncio.to_thread(next, todo, None)  # a line may be megabytes
                    more = line is not None
                    if line is None:
                        break
                    self._store.begin_line(record["id"], line.custom_id)
                    running.add(asyncio.create_task(_answer_line(line, post), name=line.custom_id))
                    self._in_work = running
                if running or self._hold:
                    await self._wait(running, SAVE_SECONDS if not more or len(running) >= self._concurrency else YIELD_SECONDS)
                    self._in_work = running = self._write_finished(running, outputs)
                if time.monotonic() - saved > SAVE_SECONDS:
                    saved = time.monotonic()
                    self._save_counts(record, owner)
            return "completed"
        finally:
            # Whatever happened, the process lived to see it: no line is to blame.
            await cancel(*running)
            self._in_work = set()
            self._store.forget_attempts(record["id"])

    async def _give_up(self, lines: Iterator[BatchLine], outputs: _Outputs, code: str, message: str) -> None:
        """Say of lines that they have no reply. There may be millions."""
        while some := await asyncio.to_thread(lambda: [*itertools.islice(lines, AT_ONCE)]):
            await asyncio.to_thread(outputs.write_failures, [failure(line, code, message) for line in some])

    async def _wait(self, running: set[Any], seconds: float | None, event: asyncio.Event | None = None) -> None:
        """Until one of them is done, `event` (by default: somebody changes a batch), or `seconds` are over."""
        event = self._stopping if event is None else event
        event.clear()
        news = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({*running, news}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(news)

    def _write_finished(self, running: set[Answering], outputs: _Outputs) -> set[Answering]:
        """Writes the replies that are there; returns what still runs."""
        for task in running:
            if task.done() and not task.cancelled():
                outputs.write(task.result())
        return {task for task in running if not task.done()}

    def _ending(self, record: Record, owner: str) -> str | None:
        """Whether the batch has to end before its last line."""
        stored = self._store.batch(record["id"], owner)
        if stored is not None and stored["status"] == "cancelling":
            record["status"], record["cancelling_at"] = "cancelling", stored["cancelling_at"]
            return "cancelled"
        return "expired" if self._store.clock() >= record["expires_at"] else None

    def _save_counts(self, record: Record, owner: str) -> None:
        with self._store.changing(record["id"], owner) as stored:
            if stored is not None:
                stored["request_counts"] = record["request_counts"]

    def _count(self, record: Record) -> tuple[int, int]:
        """Lines, and how many of them are JSON objects."""
        total = objects = 0
        for line in self._lines(record):
            total += 1
            objects += line.is_object
        return total, objects

    def _lines(self, record: Record) -> Iterator[BatchLine]:
        with self._store.path(record["input_file_id"]).open(encoding=ENCODING, errors="replace", newline="\n") as file:
            yield from batch_lines(file, (record["endpoint"],))

    def _fail(self, record: Record, owner: str, code: str, message: str) -> None:
        record["status"], record["failed_at"] = "failed", int(self._store.clock())
        record["errors"] = {"object": "list", "data": [{"code": code, "message": message, "param": None, "line": None}]}
        self._store.put_batch(record, owner)


def _log_interruption(batch_id: str) -> None:
    logger.warning("Batch %s is interrupted: the engine is gone. It goes on when the server starts again.", batch_id)


async def _answer_line(line: BatchLine, post: Post) -> dict[str, Any]:
    try:
        return await reply_to(line, post)
    except EngineGone:
        raise
    except Exception as error:
        logger.exception("Line %d of a batch failed", line.number)
        return failure(line, "internal_error", f"The request could not be run: {type(error).__name__}.")


class _Outputs:
    """The output and error files of one batch. They get records, and the batch their ids, when the batch has ended."""

    def __init__(self, store: BatchStore, record: Record, owner: str) -> None:
        self._store = store
        self._record = record
        self._owner = owner
        self._files: dict[str, TextIO] = {}

    def resume(self) -> set[str]:
        """The custom_ids that have a reply. Counts them."""
        counts = self._record["request_counts"]
        done: set[str] = set()
        for kind, count in (("output", "completed"), ("error", "failed")):
            found = finished_ids(self._store.path(self._id(kind)))
            counts[count] = len(found)
            done |= found
        return done

    def write(self, reply: dict[str, Any]) -> None:
        good = succeeded(reply)
        file = self._file("output" if good else "error")
        file.write(encode_reply(reply))
        file.flush()
        self._store.end_line(self._record["id"], reply["custom_id"])
        self._record["request_counts"]["completed" if good else "failed"] += 1

    def write_failures(self, replies: Sequence[dict[str, Any]]) -> None:
        """Of lines that nobody is at work on. May run on any thread, while this object is not used on another."""
        file = self._file("error")
        file.writelines(encode_reply(reply) for reply in replies)
        file.flush()
        self._record["request_counts"]["failed"] += len(replies)

    def _file(self, kind: str) -> TextIO:
        if kind not in self._files:
            self._files[kind] = self._store.path(self._id(kind)).open("a", encoding="utf-8")
        return self._files[kind]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def publish(self) -> None:
        for kind in ("output", "error"):
            path = self._store.path(self._id(kind))
            if path.exists():
                record = file_record(
                    self._id(kind),
                    f"{self._record['id']}_{kind}.jsonl",
                    path.stat().st_size,
                    "batch_output",
                    int(self._store.clock()),
                    (self._record.get("output_expires_after") or {}).get("seconds"),
                )
                self._store.insert_file(record, self._owner)
                self._record[f"{kind}_file_id"] = self._id(kind)

    def _id(self, kind: str) -> str:
        """Made from the batch's id, so that a restarted server finds what the last one wrote."""
        return f"file-{kind}-{self._record['id'].removeprefix('batch_')}"
