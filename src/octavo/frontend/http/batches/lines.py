"""OpenAI's batch format, line by line: requests in, replies out, and which of them an output file has already.

Every line of an input gets exactly one reply, under a custom_id of its own, whatever is wrong with it. So a run that was
interrupted, even in the middle of writing a reply, can be started again and does only what is missing.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.frontend.json_shape import TooMuch, check_shape

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/score",
    "/v1/rerank",
)
ENCODING = "utf-8-sig"
"""Of inputs: some editors begin UTF-8 with a byte order mark, which is no part of the first line."""
NO_BATCH = "No line of this file is a JSON object, so it is no batch: send JSON lines in UTF-8, one request a line."
MAX_LINE_CHARS = 1 << 26
_RETRIES = 20
_REPLY_START = b'{"id": "batch_req_'
"""How every line that we write begins: only such a line is taken for one of ours, cut short."""

Post = Callable[[str, Any], Awaitable[tuple[int, Any]]]
"""Send a body to a path: (status, decoded reply)."""


@dataclass(frozen=True)
class BatchLine:
    """One request of the input, or what is wrong with it."""

    number: int
    """1 is the first line."""
    custom_id: str
    url: str
    body: Any
    error: str = ""
    is_object: bool = True
    """The line is a JSON object. A file without one is something else than a batch."""


def batch_lines(lines: Iterable[str], urls: Sequence[str] = URLS) -> Iterator[BatchLine]:
    """The requests in `lines`, empty ones skipped. Lines that cannot be sent carry their error.

    Args:
        lines: of a text decoded as `ENCODING`.
    """
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        parsed = _parse_line(number, line, urls)
        if parsed.custom_id in seen:
            # Its answer needs a name of its own, or a resumed run would take it for done.
            parsed = BatchLine(
                number,
                f"{parsed.custom_id}#line-{number}",
                "",
                None,
                f"custom_id {parsed.custom_id!r} is used by an earlier line",
                parsed.is_object,
            )
        seen.add(parsed.custom_id)
        yield parsed


def _parse_line(number: int, line: str, urls: Sequence[str]) -> BatchLine:
    def bad(message: str, custom_id: str = "", *, is_object: bool = True) -> BatchLine:
        return BatchLine(number, custom_id or f"line-{number}", "", None, message, is_object)

    if len(line) > MAX_LINE_CHARS:
        return bad(f"line {number} has {len(line)} characters; at most {MAX_LINE_CHARS} are read")
    try:
        check_shape(line.encode("utf-8", "replace"))
        entry = json.loads(line)
    except TooMuch as e:
        return bad(f"line {number} {e}")
    except (ValueError, RecursionError) as e:
        return bad(f"line {number} is not JSON: {e}", is_object=False)
    if not isinstance(entry, dict):
        return bad(f"line {number} must be a JSON object", is_object=False)
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return bad(f"line {number} needs a custom_id (a text)")
    if not is_text(custom_id):
        return bad(f"line {number}: the custom_id {custom_id!r} holds half of a surrogate pair, which is no character")
    if entry.get("method", "POST") != "POST":
        return bad(f"method must be POST, got {entry['method']!r}", custom_id)
    url = entry.get("url")
    if url not in urls:
        return bad(f"url must be {'one of ' if len(urls) > 1 else ''}{', '.join(urls)}, got {url!r}", custom_id)
    body = entry.get("body")
    if not isinstance(body, dict):
        return bad("body must be a JSON object", custom_id)
    if body.get("stream"):
        return bad("stream has no meaning in a batch: leave it out", custom_id)
    if url == "/v1/responses" and body.get("background"):
        return bad("background has no meaning in a batch, whose requests all run in the background: leave it out", custom_id)
    return BatchLine(number, custom_id, str(url), body)


async def reply_to(line: BatchLine, post: Post) -> dict[str, Any]:
    """The output object of one line. A full queue (429) is waited for."""
    if line.error:
        return failure(line, "invalid_request", line.error)
    reply = _reply(line)
    for attempt in range(_RETRIES):
        status, body = await post(line.url, line.body)
        if status != 429:
            break
        await asyncio.sleep(min(0.5 * (attempt + 1), 5))
    reply["response"] = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
    if status != 200 and isinstance(body, dict):
        reply["error"] = body.get("error", body)
    return reply


def failure(line: BatchLine, code: str, message: str) -> dict[str, Any]:
    """The output object of a line that was not sent."""
    return _reply(line) | {"error": {"code": code, "message": message}}


def _reply(line: BatchLine) -> dict[str, Any]:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": None, "error": None}


def succeeded(reply: dict[str, Any]) -> bool:
    return reply["error"] is None and reply["response"]["status_code"] == 200


def encode_reply(reply: dict[str, Any]) -> str:
    """One line of an output file, with its end. Half a surrogate pair, which JSON can carry and UTF-8 cannot, stays escaped."""
    line = json.dumps(reply, ensure_ascii=False) + "\n"
    return line if is_text(line) else json.dumps(reply) + "\n"


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def finished_ids(output: Path) -> set[str]:
    """The custom_ids that an output file holds. A last line cut short by a crash is cut off.

    Raises:
        ConfigError: the file holds something else.
    """
    done: set[str] = set()
    whole = 0
    try:
        with output.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if not line.startswith(_REPLY_START[: len(line)]):
                        raise _foreign(output, number)
                    break
                try:
                    done.add(json.loads(line)["custom_id"])
                except (ValueError, KeyError, TypeError):
                    raise _foreign(output, number) from None
                whole += len(line)
    except FileNotFoundError:
        return done
    if whole < output.stat().st_size:
        os.truncate(output, whole)
    return done


def _foreign(output: Path, line: int) -> ConfigError:
    return ConfigError(f"{output}: line {line} is not a batch reply. Name another output file, or remove this one.")
