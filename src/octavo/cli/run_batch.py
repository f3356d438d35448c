"""`octavo run-batch`: files in OpenAI's batch format, against a model loaded here or a running server.

The requests go through the same application as over HTTP, so that replies and errors are those of the server. Each answer is
written as soon as it is there. Started again with the same output file, the command does only what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from octavo.cli.files import check_output, claim_output
from octavo.cli.flags import add_engine_settings, add_settings, engine_args, positive_int
from octavo.cli.jobs import run_jobs
from octavo.cli.parser import CommandParser, Namespace, UsageError
from octavo.cli.progress import JobProgress, LoadingProgress
from octavo.cli.sampling import add_server_flags, api_key
from octavo.errors import ConfigError
from octavo.frontend.http.batches.lines import (
    ENCODING,
    NO_BATCH,
    BatchLine,
    Post,
    batch_lines,
    encode_reply,
    finished_ids,
    reply_to,
    succeeded,
)
from octavo.frontend.http.settings import ServerSettings

_READING = ("tool_call_parser", "reasoning_parser", "enable_auto_tool_choice")
"""Settings of the server that decide what replies look like."""


def configure(parser: CommandParser) -> None:
    parser.usage = "octavo run-batch -i FILE -o FILE [--model MODEL] [flags]"
    parser.add_argument("-i", "--input-file", dest="input", metavar="FILE", help="Requests, one JSON object a line.")
    parser.add_argument("-o", "--output-file", dest="output", metavar="FILE", help="Replies; lines that are there are kept.")
    parser.add_argument("--concurrency", type=positive_int, metavar="N", help="Requests running at once. Default: 128.")
    add_server_flags(parser)
    # The model's replies are read here as a server would, so it has to be told how.
    add_settings(parser, ServerSettings, skip={f.name for f in dataclasses.fields(ServerSettings)} - {*_READING})
    add_engine_settings(parser, positional=False)


def reading(options: Namespace) -> ServerSettings:
    """The settings of an application that answers batches alone."""
    given = vars(options)
    return ServerSettings(disable_request_summary=True, **{name: given[name] for name in _READING if name in given})


def run(options: Namespace) -> int:
    if not hasattr(options, "input") or not hasattr(options, "output"):
        raise UsageError("run-batch needs an input and an output file: octavo run-batch -i requests.jsonl -o replies.jsonl.")
    settings = reading(options)
    output = Path(options.output)
    check_output(output, Path(options.input))
    lines = read_batch(Path(options.input))
    with claim_output(output):
        done = finished_ids(output)
        todo = [line for line in lines if line.custom_id not in done]
        if len(todo) < len(lines):
            print(f"{output}: {len(lines) - len(todo)} of {len(lines)} requests are done already.", flush=True)
        return asyncio.run(_run(options, settings, todo, output)) if todo else 0


def read_batch(path: Path) -> list[BatchLine]:
    """The requests of an input file. Lines that cannot be sent carry their error.

    Raises:
        ConfigError: no such file, nothing in it, or something else than requests.
    """
    try:
        text = path.read_text(encoding=ENCODING, errors="replace")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror or e}.") from None
    lines = list(batch_lines(text.split("\n")))
    if not lines:
        raise ConfigError(f"{path}: there is no request in it.")
    if not any(line.is_object for line in lines):
        raise ConfigError(f"{path}: {NO_BATCH}")
    return lines


async def _run(options: Namespace, settings: ServerSettings, todo: list[BatchLine], output: Path) -> int:
    failed = 0
    async with _poster(options, settings) as post:

        async def work(line: BatchLine) -> dict[str, Any]:
            return await reply_to(line, post)

        with output.open("a", encoding="utf-8") as out, JobProgress("Requests", len(todo)) as progress:
            async for reply in run_jobs(todo, work, getattr(options, "concurrency", 128)):
                bad = not succeeded(reply)
                failed += bad
                usage = {} if bad else reply["response"]["body"].get("usage") or {}
                out.write(encode_reply(reply))
                out.flush()
                progress.advance(tokens=usage.get("completion_tokens", 0), failed=bad)
    return int(failed == len(todo))


@contextlib.asynccontextmanager
async def _poster(options: Namespace, settings: ServerSettings) -> AsyncIterator[Post]:
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
    from octavo.frontend.http.batches.inside import post_to_app

    with LoadingProgress() as loading:
        llm = await AsyncLLM.start(args, progress=loading)
    async with llm:
        app = build_app(llm, settings, served_model_names=args.served_model_name)
        async with app.router.lifespan_context(app):
            yield lambda path, body: post_to_app(app, path, body)
