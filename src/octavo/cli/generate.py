"""`octavo generate`: a file of prompts in, JSON lines out.

Input: text (one prompt a line), or .jsonl whose lines hold "prompt" (text or token ids) or "messages", and optionally sampling
parameters of their own. Output: one JSON object a prompt, in input order, with the input's line number. A bad line gives an
"error" in its place and does not stop the others.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from octavo.cli.files import check_output, claim_output
from octavo.cli.flags import add_engine_settings, engine_args, positive_int
from octavo.cli.jobs import run_jobs
from octavo.cli.parser import CommandParser, Namespace, UsageError
from octavo.cli.progress import JobProgress, LoadingProgress
from octavo.cli.sampling import add_sampling_flags, sampling_options
from octavo.errors import ConfigError, InvalidRequest, OctavoError
from octavo.frontend.http.batches.lines import encode_reply

_INPUT_KEYS = ("prompt", "prompt_token_ids", "messages")


def configure(parser: CommandParser) -> None:
    parser.add_argument("-i", "--input", dest="input", metavar="FILE", help="Prompts: text (one a line) or .jsonl; - is stdin.")
    parser.add_argument("-o", "--output", dest="output", metavar="FILE", help="JSON lines; - or nothing is stdout.")
    parser.add_argument("--concurrency", type=positive_int, metavar="N", help="Prompts handed to the engine at once. Default: 256.")
    parser.add_argument("-n", "--num-samples", dest="n", type=positive_int, metavar="N", help="Continuations of each prompt.")
    add_sampling_flags(parser)
    add_engine_settings(parser, skip=("seed",))


@dataclass(frozen=True)
class PromptLine:
    """One line of input."""

    index: int
    prompt: Any
    """Text, token ids, or a list of messages (`chat`)."""
    chat: bool
    sampling: dict[str, Any]
    error: str = ""


def read_prompts(lines: Iterator[str], *, json_lines: bool) -> Iterator[PromptLine]:
    """The prompts of a file. Empty lines are skipped; what cannot be read becomes a line with an error."""
    for index, line in enumerate(lines):
        text = line.rstrip("\r\n")
        if text.strip():
            yield _json_prompt(index, text) if json_lines else PromptLine(index, text, False, {})


def _json_prompt(index: int, text: str) -> PromptLine:
    try:
        entry = json.loads(text)
    except ValueError as e:
        return PromptLine(index, None, False, {}, f"not JSON: {e}")
    if isinstance(entry, str):
        return PromptLine(index, entry, False, {})
    if not isinstance(entry, dict):
        return PromptLine(index, None, False, {}, "neither a text nor an object")
    given = [k for k in _INPUT_KEYS if k in entry]
    if len(given) != 1:
        return PromptLine(index, None, False, {}, f"needs exactly one of {', '.join(_INPUT_KEYS)}; it has {', '.join(given) or 'none'}")
    sampling = {k: v for k, v in entry.items() if k in _sampling_fields()}
    value = entry[given[0]]
    if given[0] == "messages":
        return PromptLine(index, value, True, sampling)
    if isinstance(value, list):
        value = {"prompt_token_ids": value}
    elif not isinstance(value, str):
        return PromptLine(index, None, False, {}, f"{given[0]} must be a text or a list of token ids")
    return PromptLine(index, value, False, sampling)


def _sampling_fields() -> tuple[str, ...]:
    from octavo.protocol.params import SamplingParams

    hidden = ("output_kind", "detokenize", "bad_words_token_ids")
    return tuple(f for f in SamplingParams.__struct_fields__ if f not in hidden)


def run(options: Namespace) -> int:
    defaults = sampling_options(options)
    if hasattr(options, "n"):
        defaults["n"] = options.n
    source = getattr(options, "input", "-")
    if source == "-" and sys.stdin.isatty():
        raise UsageError("Give a file of prompts: octavo generate -i prompts.txt -o answers.jsonl.")
    target = getattr(options, "output", "-")
    args = engine_args(options)
    with _open(source) as lines:
        first = lines.readline() if source == "-" else ""
        json_lines = source.endswith((".jsonl", ".json")) or first.lstrip().startswith(("{", '"'))
        prompts = list(read_prompts(iter([first, *lines] if first else lines), json_lines=json_lines))
    if not prompts:
        raise ConfigError(f"{source}: there is no prompt in it.")
    if target != "-":
        check_output(Path(target), Path(source))
    with nullcontext() if target == "-" else claim_output(Path(target)):
        failed = asyncio.run(_generate(args, prompts, defaults, getattr(options, "concurrency", 256), target))
    return int(failed == len(prompts))


def _open(path: str) -> Any:
    if path == "-":
        return nullcontext(sys.stdin)
    try:
        return Path(path).open(encoding="utf-8", errors="replace")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror or e}.") from None


def _create(path: str) -> AbstractContextManager[TextIO]:
    return nullcontext(sys.stdout) if path == "-" else Path(path).open("w", encoding="utf-8")


async def _generate(args: Any, prompts: list[PromptLine], defaults: dict[str, Any], concurrency: int, target: str) -> int:
    """Write a line for each prompt, in order. Returns how many failed.

    The output is opened only when the model has loaded: a model that cannot be loaded costs nobody the last run's results.
    """
    from octavo.frontend.async_llm import AsyncLLM

    failed = 0
    with LoadingProgress() as loading:
        llm = await AsyncLLM.start(args, progress=loading)
    async with llm:

        async def work(line: PromptLine) -> dict[str, Any]:
            return await answer(llm, line, defaults)

        with _create(target) as out, JobProgress("Prompts", len(prompts)) as progress:
            async for result in _in_order(run_jobs(prompts, work, concurrency), [p.index for p in prompts]):
                failed += "error" in result
                tokens = sum(len(o["token_ids"]) for o in result.get("outputs", ()))
                progress.advance(tokens=tokens, failed="error" in result)
                out.write(encode_reply(result))
                out.flush()
    return failed


async def _in_order(results: AsyncIterator[dict[str, Any]], order: list[int]) -> AsyncIterator[dict[str, Any]]:
    """Results in input order, each as soon as those before it are there."""
    early: dict[int, dict[str, Any]] = {}
    position = 0
    async for result in results:
        early[result["index"]] = result
        while position < len(order) and order[position] in early:
            yield early.pop(order[position])
            position += 1


async def answer(llm: Any, line: PromptLine, defaults: dict[str, Any]) -> dict[str, Any]:
    """The output object of one line; errors of this line become its "error"."""
    from octavo.protocol.params import RequestOutputKind, SamplingParams

    if line.error:
        return {"index": line.index, "error": f"line {line.index + 1}: {line.error}"}
    try:
        params = SamplingParams(**{"max_tokens": None, **llm.default_sampling_params, **defaults, **line.sampling})
        params.output_kind = RequestOutputKind.FINAL_ONLY
        prompt = line.prompt
        if line.chat:
            prompt = {"prompt_token_ids": llm.tokenizer.encode_chat(llm.tokenizer.apply_chat_template(prompt, add_generation_prompt=True))}
        final = None
        async for output in llm.generate(prompt, params, f"generate-{line.index}"):
            final = output
    except OctavoError as e:
        return {"index": line.index, "error": f"line {line.index + 1}: {e}"}
    except (TypeError, ValueError, KeyError) as e:
        return {"index": line.index, "error": str(InvalidRequest(f"line {line.index + 1}: {e}"))}
    if final is None:
        return {"index": line.index, "error": f"line {line.index + 1}: the engine gave no answer"}
    return {
        "index": line.index,
        "prompt": line.prompt if line.chat or isinstance(line.prompt, str) else None,
        "text": final.outputs[0].text,
        "outputs": [
            {
                "index": o.index,
                "text": o.text,
                "token_ids": list(o.token_ids),
                "finish_reason": o.finish_reason,
                "stop_reason": o.stop_reason,
            }
            for o in final.outputs
        ],
        "prompt_tokens": len(final.prompt_token_ids or ()),
        "cached_tokens": final.num_cached_tokens,
    }
