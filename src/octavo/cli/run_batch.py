"""`octavo run-batch`: files in OpenAI's batch format, against a model loaded here or a running server.

The requests go through the same application as over HTTP, so that replies and errors are those of the server. Each answer is
written as soon as it is there. Started again with the same output file, the command does only what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.cli.files import check_output
from octavo.cli.flags import add_engine_settings, engine_args, positive_int
from octavo.cli.jobs import run_jobs
from octavo.cli.parser import CommandParser, Namespace, UsageError
from octavo.cli.progress import JobProgress, LoadingProgress
from octavo.cli.sampling import add_server_flags, api_key
from octavo.errors import ConfigError

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
_RETRIES = 20
_REPLY_START = b'{"id": "batch_req_'
"""How every line that we write begins: only such a line is taken for one of ours, cut short."""

Post = Callable[[str, Any], Awaitable[tuple[int, Any]]]
"""Send a body to a path: (status, decoded reply)."""


def configure(parser: CommandParser) -> None:
    parser.usage = "octavo run-batch -i FILE -o FILE [--model MODEL] [flags]"
    parser.add_argument("-i", "--input-file", dest="input", metavar="FILE", help="Requests, one JSON object a line.")
    parser.add_argument("-o", "--output-file", dest="output", metavar="FILE", help="Replies; lines that are there are kept.")
    parser.add_argument("--concurrency", type=positive_int, metavar="N", help="Requests running at once. Default: 128.")
    add_server_flags(parser)
    add_engine_settings(parser, positional=False)


@dataclass(frozen=True)
class BatchLine:
    """One request of the input, or what is wrong with it."""

    number: int
    """1 is the first line."""
    custom_id: str
    url: str
    body: Any
    error: str = ""


def run(options: Namespace) -> int:
    if not hasattr(options, "input") or not hasattr(options, "output"):
        raise UsageError("run-batch needs an input and an output file: octavo run-batch -i requests.jsonl -o replies.jsonl.")
    lines = read_batch(Path(options.input))
    output = Path(options.output)
    check_output(output, Path(options.input))
    done = finished_ids(output)
    todo = [line for line in lines if line.custom_id not in done]
    if len(todo) < len(lines):
        print(f"{output}: {len(lines) - len(todo)} of {len(lines)} requests are done already.", flush=True)
    if not todo:
        return 0
    return asyncio.run(_run(options, todo, output))


def read_batch(path: Path) -> list[BatchLine]:
    """The requests of an input file. Lines that cannot be sent carry their error.

    Raises:
        ConfigError: no such file, or nothing in it.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror or e}.") from None
    lines: list[BatchLine] = []
    seen: set[str] = set()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        parsed = _parse_line(number, line)
        if parsed.custom_id in seen:
            # Its answer needs a name of its own, or a resumed run would take it for done.
            parsed = BatchLine(
                number, f"{parsed.custom_id}#line-{number}", "", None, f"custom_id {parsed.custom_id!r} is used by an earlier line"
            )
        seen.add(parsed.custom_id)
        lines.append(parsed)
    if not lines:
        raise ConfigError(f"{path}: there is no request in it.")
    return lines


def _parse_line(number: int, line: str) -> BatchLine:
    def bad(message: str, custom_id: str = "") -> BatchLine:
        return BatchLine(number, custom_id or f"line-{number}", "", None, message)

    try:
        entry = json.loads(line)
    except ValueError as e:
        return bad(f"line {number} is not JSON: {e}")
    if not isinstance(entry, dict):
        return bad(f"line {number} must be a JSON object")
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return bad(f"line {number} needs a custom_id (a text)")
    if entry.get("method", "POST") != "POST":
        return bad(f"method must be POST, got {entry['method']!r}", custom_id)
    url = entry.get("url")
    if url not in URLS:
        return bad(f"url must be one of {', '.join(URLS)}, got {url!r}", custom_id)
    body = entry.get("body")
    if not isinstance(body, dict):
        return bad("body must be a JSON object", custom_id)
    if body.get("stream"):
        return bad("stream has no meaning in a batch: leave it out", custom_id)
    return BatchLine(number, custom_id, url, body)


def finished_ids(output: Path) -> set[str]:
    """The custom_ids that an output file holds. A last line cut short by a crash is cut off."""
    try:
        content = output.read_bytes()
    except FileNotFoundError:
        return set()
    whole = content.rfind(b"\n") + 1
    done: set[str] = set()
    for number, line in enumerate(content[:whole].splitlines(), 1):
        try:
            done.add(json.loads(line)["custom_id"])
        except (ValueError, KeyError, TypeError):
            raise _foreign(output, number) from None
    if rest := content[whole:]:
        if not rest.startswith(_REPLY_START[: len(rest)]):
            raise _foreign(output, len(done) + 1)
        os.truncate(output, whole)
    return done


def _foreign(output: Path, line: int) -> ConfigError:
    return ConfigError(f"{output}: line {line} is not a batch reply. Name another output file, or remove this one.")


async def _run(options: Namespace, todo: list[BatchLine], output: Path) -> int:
    failed = 0
    async with _poster(options) as post:

        async def work(line: BatchLine) -> dict[str, Any]:
            return await reply_to(line, post)

        with output.open("a", encoding="utf-8") as out, JobProgress("Requests", len(todo)) as progress:
            async for reply in run_jobs(todo, work, getattr(options, "concurrency", 128)):
                response = reply["response"]
                bad = reply["error"] is not None or response["status_code"] != 200
                failed += bad
                usage = {} if bad else response["body"].get("usage") or {}
                out.write(json.dumps(reply, ensure_ascii=False) + "\n")
                out.flush()
                progress.advance(tokens=usage.get("completion_tokens", 0), failed=bad)
    return int(failed == len(todo))


async def reply_to(line: BatchLine, post: Post) -> dict[str, Any]:
    """The output object of one line. A full queue (429) is waited for."""
    reply: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": None, "error": None}
    if line.error:
        reply["error"] = {"code": "invalid_request", "message": line.error}
        return reply
    for attempt in range(_RETRIES):
        status, body = await post(line.url, line.body)
        if status != 429:
            break
        await asyncio.sleep(min(0.5 * (attempt + 1), 5))
    reply["response"] = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
    if status != 200 and isinstance(body, dict):
        reply["error"] = body.get("error", body)
    return reply


@contextlib.asynccontextmanager
async def _poster(options: Namespace) -> AsyncIterator[Post]:
    """How requests reach a model: a server, or the same application in this process."""
    if url := getattr(options, "url", None):
        from octavo.cli.http_client import HttpClient

        client = HttpClient(url, api_key=api_key(options))
        try:
            yield client.post
        finally:
            await client.close()
        return
    args = engine_args(options)
    from octavo.frontend.async_llm import AsyncLLM
    from octavo.frontend.http.app import build_app
    from octavo.frontend.http.settings import ServerSettings

    with LoadingProgress() as loading:
        llm = await AsyncLLM.start(args, progress=loading)
    async with llm:
        app = build_app(llm, ServerSettings(disable_request_summary=True), served_model_names=args.served_model_name)
        async with app.router.lifespan_context(app):
            yield lambda path, body: post_to_app(app, path, body)


async def post_to_app(app: Any, path: str, body: Any) -> tuple[int, Any]:
    """One POST to an ASGI application in this process."""
    payload = json.dumps(body).encode()
    messages: Iterator[dict[str, Any]] = iter([{"type": "http.request", "body": payload, "more_body": False}])
    status, parts = 500, []

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            await asyncio.Event().wait()  # the client never disconnects
            raise AssertionError
        return message

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())],
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 80),
        "state": {},
    }
    await app(scope, receive, send)
    from octavo.cli.http_client import decode_body

    return status, decode_body(b"".join(parts))
