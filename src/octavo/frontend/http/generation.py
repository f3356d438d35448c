"""Runs one HTTP request on the engine: all its prompts, merged into one stream of results.

`start` checks and queues, so that a refusal still has a status code of its own; `close` ends whatever still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import msgspec
from fastapi import Request
from fastapi.responses import Response

from octavo.errors import Overloaded, RequestFailed
from octavo.frontend.http.context import ServerContext, json_response
from octavo.frontend.http.prompts import EncodedPrompt
from octavo.frontend.http.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from octavo.frontend.http.sse import OPENAI_STYLE, EventStream, StreamStyle, cancel, unless_gone
from octavo.frontend.http.tracking import RequestTracker
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.params import BeamSearchParams, SamplingParams

MAX_SEQUENCES_AT_ONCE = 256
"""Sequences of one request in the engine at a time (one prompt at least): a large batch goes through in order instead of
overflowing the queue."""


@dataclass(frozen=True)
class Job:
    """What one HTTP request asks of the engine."""

    request_id: str
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    fair_key: str = ""
    report_progress: bool = False
    """Tell how far the prompt is while it is computed."""
    beam: BeamSearchParams | None = None
    """Search for the `beam_width` best continuations instead of sampling them."""


class Stream(Protocol):
    """The outputs of one prompt; closing it ends it in the engine."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def aclose(self) -> None: ...


class _Finished:
    """A stream of one output that is there already."""

    def __init__(self, output: RequestOutput) -> None:
        self._outputs = [output]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._outputs:
            raise StopAsyncIteration
        return self._outputs.pop()

    async def aclose(self) -> None:
        self._outputs.clear()


class Generation:
    """One running `Job`. Iterate once over `results`, then `close`, whatever happened."""

    def __init__(self, ctx: ServerContext, job: Job, tracker: RequestTracker) -> None:
        self.job = job
        self._ctx = ctx
        self._tracker = tracker
        self._streams: dict[int, Stream] = {}
        self._error: BaseException | None = asyncio.CancelledError()  # until the last result has been read
        self._closed = False
        self._aborted = False
        self._given_back = False

    @property
    def _at_once(self) -> int:
        """Prompts in the engine at a time."""
        return min(len(self.job.prompts), max(1, MAX_SEQUENCES_AT_ONCE // self.job.params.n))

    @classmethod
    async def start(cls, ctx: ServerContext, job: Job, tracker: RequestTracker) -> Generation:
        """Queue the first prompts. A request of which one prompt found room is accepted: the others wait for theirs.

        Raises:
            OctavoError: the request is refused; nothing of it remains.
        """
        generation = cls(ctx, job, tracker)
        ctx.claim(job.request_id, generation.abort)
        try:
            await generation._open(0)
            with contextlib.suppress(Overloaded):
                for number in range(1, generation._at_once):
                    await generation._open(number)
        except BaseException as error:
            if isinstance(error, Overloaded):
                ctx.metrics.rejected()
            generation._error = error
            await generation.close()
            raise
        return generation

    async def abort(self) -> None:
        """End it in the engine: what runs gets the finish reason "abort"; prompts that wait for room fail the request."""
        self._aborted = True
        for number in list(self._streams):
            await self._ctx.llm.abort(self._engine_id(number))

    def _engine_id(self, number: int) -> str:
        return self.job.request_id if len(self.job.prompts) == 1 else f"{self.job.request_id}-{number}"

    async def _open(self, number: int) -> Stream:
        if self._aborted:
            raise RequestFailed("The request was aborted.")
        job, llm = self.job, self._ctx.llm
        prompt: dict[str, Any] = {"prompt_token_ids": job.prompts[number].token_ids}
        engine_id = self._engine_id(number)
        options: dict[str, Any] = {
            "priority": job.priority,
            "cache_salt": job.cache_salt,
            "fair_key": job.fair_key,
            "arrival_time": self._tracker.arrival,
        }
        stream: Stream
        if job.beam is not None:
            stream = _Finished(await llm.beam_search(prompt, job.beam, engine_id, **options))
        else:
            stream = await llm.submit(prompt, job.params, engine_id, report_progress=job.report_progress, **options)
        self._streams[number] = stream
        return stream

    async def _open_when_there_is_room(self, number: int) -> Stream:
        while True:
            try:
                return await self._open(number)
            except Overloaded as full:
                await asyncio.sleep(min(1.0, full.retry_after))

    async def results(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(prompt number, output) in the order they come.

        Raises:
            OctavoError: one of the prompts failed.
        """
        try:
            first = set(range(len(self.job.prompts)))
            seen, step, stats = self._tracker.seen, self._ctx.metrics.step, self._ctx.llm.stats
            if len(self.job.prompts) == 1:
                async for output in self._streams[0]:
                    seen(0, output, first=bool(first))
                    first.clear()
                    step(stats())
                    yield 0, output
            else:
                async for number, output in self._merged():
                    seen(number, output, first=number in first)
                    first.discard(number)
                    step(stats())
                    yield number, output
            self._error = None
            self._give_back()  # before the client can have read the end
        except Exception as error:
            self._error = error
            raise

    async def _merged(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        queue: asyncio.Queue[tuple[int, RequestOutput]] = asyncio.Queue(maxsize=256)
        pumping = asyncio.ensure_future(self._pump_all(queue))
        try:
            while not (pumping.done() and queue.empty()):
                getting = asyncio.ensure_future(queue.get())
                await asyncio.wait({getting, pumping}, return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    await cancel(getting)
                    pumping.result()
                    continue
                yield getting.result()
            pumping.result()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await cancel(pumping)

    async def _pump_all(self, queue: asyncio.Queue[tuple[int, RequestOutput]]) -> None:
        waiting = iter(range(len(self.job.prompts)))

        async def pump() -> None:
            for number in waiting:
                stream = self._streams.get(number) or await self._open_when_there_is_room(number)
                async for output in stream:
                    await queue.put((number, output))
                self._streams.pop(number, None)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._at_once):
                group.create_task(pump())

    async def close(self) -> None:
        """Abort what still runs, give the id back, write the log line. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams.values():
            with contextlib.suppress(Exception):
                await stream.aclose()
        self._streams.clear()
        self._give_back()
        self._tracker.close(self._error)

    def _give_back(self) -> None:
        """The id is free, once: another request may have it from here on."""
        if not self._given_back:
            self._given_back = True
            self._ctx.release(self.job.request_id)


async def answer(
    request: Request,
    ctx: ServerContext,
    job: Job,
    tracker: RequestTracker,
    writer: Writer,
    *,
    stream: bool,
    style: StreamStyle = OPENAI_STYLE,
) -> Response:
    """Runs `job` and replies with what `writer` makes of it; ends the job when the client goes.

    Raises:
        OctavoError: the job is refused, or (not streaming) fails.
        ClientGone
    """

    async def whole() -> Response:
        generation = await Generation.start(ctx, job, tracker)
        try:
            return json_response(await writer.whole(generation))
        finally:
            await generation.close()

    if not stream:
        return await unless_gone(request, whole())
    generation = await unless_gone(request, Generation.start(ctx, job, tracker))
    return EventStream(writer.stream(generation), generation.close, style=style, keep_alive=ctx.settings.sse_keep_alive)


class Writer(Protocol):
    """Turns results into a reply."""

    async def whole(self, generation: Generation) -> msgspec.Struct | dict[str, Any]: ...

    def stream(self, generation: Generation) -> AsyncIterator[bytes]: ...


class UsageCounter:
    """Adds up the tokens of a request over its prompts and choices."""

    def __init__(self, *, details: bool) -> None:
        self._details = details
        self._prompts: set[int] = set()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.reasoning_tokens: int | None = None
        """None: not counted."""

    def add(self, number: int, output: RequestOutput, *, prompt_only: bool = False) -> None:
        """`output` holds new tokens only (or everything, once)."""
        if number not in self._prompts:
            self._prompts.add(number)
            self.prompt_tokens += len(output.prompt_token_ids or ())
            self.cached_tokens += output.num_cached_tokens or 0
        if not prompt_only:
            self.completion_tokens += sum(len(o.token_ids) for o in output.outputs)

    def usage(self) -> Usage:
        usage = Usage(self.prompt_tokens, self.prompt_tokens + self.completion_tokens, self.completion_tokens)
        if self._details:
            usage.prompt_tokens_details = PromptTokensDetails(self.cached_tokens)
        if self.reasoning_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(min(self.reasoning_tokens, self.completion_tokens))
        return usage
