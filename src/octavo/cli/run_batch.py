"""`octavo run-batch`: files in OpenAI's batch format, against a model loaded here or a running server.

The requests go through the same application as over HTTP, so that replies and errors are those of the server. Each answer is
written as soon as it is there. Started again with the same output file, the command does only what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from octavo.cli.files import check_output, claim_output
from octavo.cli.flags import add_engine_settings, engine_args, positive_int
from octavo.cli.jobs import run_jobs
from octavo.cli.parser import CommandParser, Namespace, UsageError
from octavo.cli.progress import JobProgress, LoadingProgress
from octavo.cli.sampling import add_server_flags, api_key
from octavo.errors import ConfigError
from octavo.frontend.http.batches.lines import BatchLine, Post, batch_lines, encode_reply, finished_ids, reply_to, succeeded


def configure(parser: CommandParser) -> None:
    parser.usage = "octavo run-batch -i FILE -o FILE [--model MODEL] [flags]"
    parser.add_argument("-i", "--input-file", dest="input", metavar="FILE", help="Requests, one JSON object a line.")
    parser.add_argument("-o", "--output-file", dest="output", metavar="FILE", help="Replies; lines that are there are kept.")
    parser.add_argument("--concurrency", type=positive_int, metavar="N", help="Requests running at once. Default: 128.")
    add_server_flags(parser)
    add_engine_settings(parser, positional=False)


def run(options: Namespace) -> int:
    if not hasattr(options, "input") or not hasattr(options, "output"):
        raise UsageError("run-batch needs an input and an output file: octavo run-batch -i requests.jsonl -o replies.jsonl.")
    lines = read_batch(Path(options.input))
    output = Path(options.output)
    check_output(output, Path(options.input))
    with claim_output(output):
        done = finished_ids(output)
        todo = [line for line in lines if line.custom_id not in done]
        if len(todo) < len(lines):
            print(f"{output}: {len(lines) - len(todo)} of {len(lines)} requests are done already.", flush=True)
        return asyncio.run(_run(options, todo, output)) if todo else 0


def read_batch(path: Path) -> list[BatchLine]:
    """The requests of an input file. Lines that cannot be sent carry their error.

    Raises:
        ConfigError: no such file, or nothing in it.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror or e}.") from None
    lines = list(batch_lines(text.split("\n")))
    if not lines:
        raise ConfigError(f"{path}: there is no request in it.")
    return lines


async def _run(options: Namespace, todo: list[BatchLine], output: Path) -> int:
    failed = 0
    async with _poster(options) as post:

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
    from octavo.frontend.http.batches.inside import post_to_app
    from octavo.frontend.http.settings import ServerSettings

    with LoadingProgress() as loading:
        llm = await AsyncLLM.start(args, progress=loading)
    async with llm:
        app = build_app(llm, ServerSettings(disable_request_summary=True), served_model_names=args.served_model_name)
        async with app.router.lifespan_context(app):
            yield lambda path, body: post_to_app(app, path, body)
