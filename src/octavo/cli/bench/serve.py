"""`octavo bench serve`: load an OpenAI-compatible server and report what its clients see.

TTFT: request sent to first token. ITL: gap between streamed chunks. TPOT: time per output token after the first. E2E: request
sent to last byte. Goodput: requests a second that met every given limit.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.cli.bench.results import add_result_flags, latency_rows, publish, summary
from octavo.cli.bench.workload import BenchRequest, add_workload_flags, describe, workload
from octavo.cli.flags import choice, positive_int
from octavo.cli.http_client import HttpClient, HttpError, error_text
from octavo.cli.parser import CommandParser, Namespace, UsageError
from octavo.cli.progress import JobProgress
from octavo.cli.sampling import api_key

_METRICS = ("ttft", "tpot", "itl", "e2el")
_CHAT = ("openai-chat", "chat")


def configure(parser: CommandParser) -> None:
    server = parser.group("server")
    server.add_argument("--base-url", "--url", dest="base_url", metavar="URL", help="Server. Default: http://localhost:8000.")
    server.add_argument("--host", metavar="HOST", help="Host, instead of --base-url.")
    server.add_argument("--port", type=positive_int, metavar="N", help="Port, with --host.")
    server.add_argument(
        "--backend", type=choice(("openai", "openai-chat", "vllm", "sglang", "octavo", "chat")), metavar="KIND",
        help="openai posts to /v1/completions, openai-chat to /v1/chat/completions. Default: openai.",
    )  # fmt: skip
    server.add_argument("--endpoint", metavar="PATH", help="Path to post to. Default: by --backend.")
    server.add_argument("--model", metavar="NAME", help="Model name in requests. Default: the first one the server lists.")
    server.add_argument("--api-key", metavar="KEY", help="Bearer token. Default: $OCTAVO_API_KEY or $OPENAI_API_KEY.")
    server.add_argument("--extra-body", metavar="JSON", help="Merged into each request's body.")
    load = parser.group("load")
    load.add_argument("--request-rate", type=float, metavar="R", help="Requests a second, Poisson arrivals. Default: all at once.")
    load.add_argument(
        "--max-concurrency",
        "--concurrency",
        dest="concurrency",
        type=positive_int,
        metavar="N",
        help="Most requests open at once. Default: no limit.",
    )
    load.add_argument("--num-warmups", type=int, metavar="N", help="Requests sent first and not counted. Default: 1.")
    load.add_argument("--ignore-eos", action="store_true", help="Generate all --output-len tokens (a field that not every server knows).")
    load.add_argument("--temperature", type=float, metavar="T", help="Default: 0.")
    load.add_argument("--goodput", nargs="+", metavar="METRIC:MS", help="Limits, e.g. ttft:300 tpot:50. Metrics: ttft, tpot, e2el.")
    add_workload_flags(parser, num_prompts=100, input_len="512", output_len="128")
    add_result_flags(parser)


@dataclass
class Sample:
    """What one request's client saw. Seconds."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    e2el: float = 0.0
    error: str = ""

    @property
    def tpot(self) -> float:
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True)
class Target:
    """Where and how requests go."""

    client: HttpClient
    path: str
    model: str
    chat: bool
    extra: dict[str, Any]

    def body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        if not self.chat:
            return body | {"prompt": request.prompt}
        text = request.prompt if isinstance(request.prompt, str) else words(request.prompt)
        return body | {"messages": [{"role": "user", "content": text}]}


_WORDS = ("time", "year", "people", "way", "day", "thing", "life", "child", "world", "school", "state", "family", "group", "hand", "part")


def words(ids: Sequence[int]) -> str:
    """A text of about as many tokens as there are ids, for servers that take no token ids."""
    return " ".join(_WORDS[i % len(_WORDS)] for i in ids)


def run(options: Namespace) -> int:
    limits = parse_goodput(getattr(options, "goodput", ()))
    requests = workload(options)
    samples, seconds = asyncio.run(_run(options, requests))
    result = report(samples, seconds, limits)
    failures = [s.error for s in samples if s.error]
    publish(options, "bench serve", table(samples, result), {"workload": describe(options), **_load(options), **result})
    for error in sorted(set(failures))[:5]:
        print(f"failed {failures.count(error)} times: {error}")
    return int(bool(failures))


def _load(options: Namespace) -> dict[str, Any]:
    return {"request_rate": getattr(options, "request_rate", None), "max_concurrency": getattr(options, "concurrency", None)}


def base_url(options: Namespace) -> str:
    if url := getattr(options, "base_url", None):
        return str(url)
    return f"http://{getattr(options, 'host', 'localhost')}:{getattr(options, 'port', 8000)}"


async def _run(options: Namespace, requests: list[BenchRequest]) -> tuple[list[Sample], float]:
    extra: dict[str, Any] = {"temperature": getattr(options, "temperature", 0.0)}
    if getattr(options, "ignore_eos", False):
        extra["ignore_eos"] = True
    try:
        extra |= json.loads(getattr(options, "extra_body", "{}"))
    except (ValueError, TypeError):
        raise UsageError(f"--extra-body {options.extra_body!r} is not a JSON object.") from None
    chat = getattr(options, "backend", "openai") in _CHAT or "chat" in getattr(options, "endpoint", "")
    path = getattr(options, "endpoint", "/v1/chat/completions" if chat else "/v1/completions")
    client = HttpClient(base_url(options), api_key=api_key(options))
    try:
        target = Target(client, path, getattr(options, "model", None) or await client.model_name(), chat, extra)
        for request in requests[:1] * getattr(options, "num_warmups", 1):
            # Another prompt of the same length: the first measured one must not find it in the server's prefix cache.
            warm = await measure(target, BenchRequest(request.prompt[::-1], request.output_len))
            if warm.error:
                raise HttpError(f"The first request failed, so none was counted. {warm.error}")
        rate = getattr(options, "request_rate", math.inf)
        return await drive(target, requests, rate, getattr(options, "concurrency", None), seed=getattr(options, "workload_seed", 0))
    finally:
        await client.close()


async def drive(
    target: Target, requests: list[BenchRequest], rate: float, concurrency: int | None, *, seed: int = 0
) -> tuple[list[Sample], float]:
    """Send every request at its time; (samples in request order, seconds from first send to last answer)."""
    gate = asyncio.Semaphore(concurrency or len(requests))
    with JobProgress("Requests", len(requests)) as progress:

        async def one(request: BenchRequest) -> Sample:
            async with gate:
                sample = await measure(target, request)
            progress.advance(tokens=sample.output_tokens, failed=bool(sample.error))
            return sample

        start = time.perf_counter()
        tasks = [asyncio.ensure_future(one(r)) async for r in _arrivals(requests, rate, seed)]
        samples = await asyncio.gather(*tasks)
        return samples, time.perf_counter() - start


async def _arrivals(requests: Sequence[BenchRequest], rate: float, seed: int) -> AsyncIterator[BenchRequest]:
    """Requests at the times of a Poisson process. Late ones are sent at once: the clock is absolute, so that load does not sag."""
    source = random.Random(seed)
    due = time.perf_counter()
    for request in requests:
        yield request
        if math.isfinite(rate):
            due += source.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


async def measure(target: Target, request: BenchRequest) -> Sample:
    """Send one request and time its stream."""
    sample = Sample(prompt_tokens=len(request.prompt) if isinstance(request.prompt, list) else 0)
    start = last = time.perf_counter()
    chunks = 0
    try:
        async for payload in target.client.stream(target.path, target.body(request)):
            now = time.perf_counter()
            event = json.loads(payload)
            if "error" in event:
                sample.error = error_text(event)
                break
            if usage := event.get("usage"):
                sample.output_tokens = usage.get("completion_tokens") or 0
                sample.prompt_tokens = usage.get("prompt_tokens") or sample.prompt_tokens
            if _has_tokens(event):
                if chunks:
                    sample.itl.append(now - last)
                else:
                    sample.ttft = now - start
                chunks += 1
                last = now
    except (HttpError, ValueError) as e:
        sample.error = str(e)
    sample.e2el = last - start
    sample.output_tokens = sample.output_tokens or chunks
    if not chunks and not sample.error:
        sample.error = (
            "the stream held no token that can be read (--extra-body '{\"return_token_ids\": true}' counts others, where a server has it)"
        )
    return sample


def _has_tokens(event: dict[str, Any]) -> bool:
    for choice_ in event.get("choices") or ():
        delta = choice_.get("delta") or {}
        if (
            choice_.get("text")
            or choice_.get("token_ids")
            or delta.get("content")
            or delta.get("reasoning")
            or delta.get("reasoning_content")
        ):
            return True
    return False


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """`ttft:300` -> {"ttft": 0.3}."""
    parsed = {}
    for limit in limits:
        name, _, value = limit.partition(":")
        try:
            parsed[name] = float(value) / 1000
        except ValueError:
            raise UsageError(f"--goodput {limit!r} is not METRIC:MILLISECONDS, such as ttft:300.") from None
        if name not in ("ttft", "tpot", "e2el"):
            raise UsageError(f"--goodput: there is no metric {name!r}. Use ttft, tpot or e2el.")
    return parsed


def report(samples: Sequence[Sample], seconds: float, limits: dict[str, float]) -> dict[str, Any]:
    """The result file's content, under the key names that such files commonly have."""
    good = [s for s in samples if not s.error]
    outputs, inputs = sum(s.output_tokens for s in good), sum(s.prompt_tokens for s in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
    }
    if limits:
        met = [s for s in good if all(getattr(s, name) <= limit for name, limit in limits.items())]
        result["request_goodput"] = len(met) / seconds
        result["goodput_limits_ms"] = {name: limit * 1000 for name, limit in limits.items()}
    for name in _METRICS:
        result |= summary(name, _values(good, name))
    return result


def _values(samples: Sequence[Sample], name: str) -> list[float]:
    if name == "itl":
        return [gap for s in samples for gap in s.itl]
    if name == "tpot":
        return [s.tpot for s in samples if s.output_tokens > 1]
    return [getattr(s, name) for s in samples]


def table(samples: Sequence[Sample], result: dict[str, Any]) -> list[tuple[str, str]]:
    good = [s for s in samples if not s.error]
    rows = [
        ("requests", f"{result['completed']} done, {result['failed']} failed, in {result['duration']:.2f} s"),
        ("tokens", f"{result['total_input_tokens']:,} in, {result['total_output_tokens']:,} out"),
        ("throughput", f"{result['request_throughput']:.2f} requests/s, {result['output_throughput']:.1f} output tokens/s"),
    ]
    if "request_goodput" in result:
        rows.append(("goodput", f"{result['request_goodput']:.2f} requests/s within the limits"))
    labels = {"ttft": "time to first token", "tpot": "time per output token", "itl": "inter-token latency", "e2el": "end to end"}
    for name in _METRICS:
        rows += latency_rows(labels[name], _values(good, name))
    return rows
