"""`AsyncLLM`: the engine for asyncio programs and for the HTTP server. No torch in this process.

The engine core runs in a supervised process (process_client.py). Requests are checked before anything is queued; each one is a
`RequestStream`, whose closing (or cancelling the task that reads it) aborts the request in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from octavo.config.args import EngineArgs
from octavo.config.types import EngineConfig
from octavo.errors import EngineDead, InvalidRequest, OctavoError, Overloaded, RequestFailed
from octavo.frontend.beam import BeamSearch, Collector, beam_request_output
from octavo.frontend.client import Progress, RemoteClient, State
from octavo.frontend.launch import Launch, log_warnings, open_tokenizer, prepare_launch
from octavo.frontend.outputs import FinishedRequest, RequestOutput
from octavo.frontend.pooling import PoolingProcessor, PoolingState, PreparedPooling
from octavo.frontend.processor import InputProcessor
from octavo.frontend.prompts import Prompt, parse_prompt
from octavo.frontend.replicas import make_client
from octavo.frontend.request_state import RequestState
from octavo.frontend.structured import wants_first
from octavo.grammar.check import Checked
from octavo.protocol.boot import DEFAULT_BUILDER
from octavo.protocol.engine import EngineReady, EngineStats, Vocabulary
from octavo.protocol.params import BeamSearchParams, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from octavo.checkpoint.types import Checkpoint
    from octavo.frontend.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LONG_TEXT = 4096
"""Characters from which a prompt is tokenized in a thread (tokenizers release the interpreter), so that streams go on."""

Listener = Callable[[FinishedRequest], None]


class RequestStream:
    """The outputs of one request, in order: an async iterator of `RequestOutput`.

    Iteration ends after the output with `finished=True`. Raises RequestFailed or EngineDead from `__anext__` if the request
    cannot go on. Closing it, or letting go of it, aborts the request.
    """

    def __init__(self, state: RequestState, news: asyncio.Event, abort: Callable[[], None]) -> None:
        self._state = state
        self._news = news
        self._abort = abort
        self._loop = asyncio.get_running_loop()

    @property
    def request_id(self) -> str:
        return self._state.request_id

    @property
    def prompt(self) -> str | None:
        return self._state.prompt

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._state.prompt_token_ids

    @property
    def sampling_params(self) -> SamplingParams:
        """As resolved: seed and max_tokens are set."""
        return self._state.sampling

    @property
    def finished(self) -> bool:
        return self._state.finished

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            # A take hands out all there is: until there is news again, looking would be in vain.
            if not self._news.is_set() and not self._state.finished:
                await self._news.wait()
            self._news.clear()
            if (failure := self._state.failure()) is not None:
                self._abort()
                raise failure
            if (output := self._state.take()) is not None:
                return output
            if self._state.finished:
                raise StopAsyncIteration

    async def final(self) -> RequestOutput:
        """The last output (all of the request unless output_kind is DELTA). Cancelling this aborts the request."""
        last: RequestOutput | None = None
        try:
            async for output in self:
                last = output
        finally:
            self.close()
        if last is None:
            raise EngineDead("The request ended without an output.")
        return last

    def close(self) -> None:
        """Abort the request if it still runs."""
        self._abort()

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._state.finished and not self._loop.is_closed():
            # The collector may run on any thread.
            self._loop.call_soon_threadsafe(self._abort)


class AsyncLLM:
    """An engine in its own process, and the text around it. Use from one event loop.

    Make it with `await AsyncLLM.start(args)`, or with `from_engine_args` (outside a loop too: the engine starts loading at
    once; the first use waits for it).
    """

    def __init__(self, launch: Launch, tokenizer: Tokenizer | None, client: RemoteClient) -> None:
        self.args = launch.args
        # The vocabulary is in the tokenizer: as metadata of a GGUF file it would be a second copy, of some 10 MiB.
        self.checkpoint: Checkpoint = dataclasses.replace(launch.checkpoint, gguf_metadata={})
        self.config: EngineConfig = launch.config
        self.default_sampling_params: dict[str, Any] = dict(launch.default_sampling_params)
        self._tokenizer = tokenizer
        self._client = client
        self._processor = InputProcessor(launch.config, tokenizer)
        self._client.vocabulary = self._processor.vocabulary
        self._vocabulary_task: asyncio.Future[Vocabulary] | None = None
        self._live: dict[str, RequestState | PoolingState] = {}
        self._beams: dict[str, Collector | None] = {}
        """Running beam searches, by request id, with the turn they wait for."""
        self._listeners: list[Listener] = []
        self._starting: asyncio.Task[EngineReady] | None = None
        self._to_warn = True
        self._accepting = True
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- life

    @classmethod
    def from_engine_args(
        cls, args: EngineArgs, *, progress: Progress | None = None, builder: str = DEFAULT_BUILDER, suspect_after: int = 2
    ) -> AsyncLLM:
        """Resolve the settings and begin to load; `wait_ready` (or the first request) waits for the engine.

        Raises:
            OctavoError: the model cannot be found or a setting cannot work.
        """
        launch = prepare_launch(args, progress)
        client = make_client(launch.config, builder=builder, suspect_after=suspect_after)
        client.spawn()
        try:
            tokenizer = open_tokenizer(launch)  # while the engine loads
        except BaseException:
            client.kill()
            raise
        return cls(launch, tokenizer, client)

    @classmethod
    async def start(cls, args: EngineArgs, *, progress: Progress | None = None, **options: Any) -> AsyncLLM:
        """A ready engine.

        Args:
            progress: called with (phase, done, total) while it loads.

        Raises:
            OctavoError: it cannot start; the message is for the user.
        """
        llm = cls.from_engine_args(args, progress=progress, **options)
        try:
            await llm.wait_ready(progress)
        except BaseException:
            await llm.shutdown()
            raise
        return llm

    async def wait_ready(self, progress: Progress | None = None, *, shows_warnings: bool = False) -> EngineReady:
        """Wait until the engine takes requests; at once after the first time.

        Args:
            shows_warnings: who asks first shows what the report warns of; else it is logged.
        """
        if self._starting is None:
            self._starting, self._to_warn = asyncio.create_task(self._client.start(progress)), not shows_warnings
        ready = await asyncio.shield(self._starting)  # one request that gives up must not end the start for all
        if self._to_warn:
            self._to_warn = False
            log_warnings(ready, self.config)
        if ready.max_model_len != self.config.model.max_model_len:
            # `auto` took what fits.
            self.config = dataclasses.replace(self.config, model=dataclasses.replace(self.config.model, max_model_len=ready.max_model_len))
            self._processor.max_model_len = ready.max_model_len
        return ready

    async def shutdown(self, drain: float = 0.0) -> None:
        """End the engine process. Calling it again does nothing.

        Args:
            drain: seconds that running requests get to finish; new ones are refused meanwhile.
        """
        self._accepting = False
        if drain > 0 and self.live_requests():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain)
        if self._starting is not None:
            self._starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, OctavoError):
                await self._starting
        self._processor.grammars.close()
        await self._client.close()

    async def __aenter__(self) -> Self:
        await self.wait_ready()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    # ---- requests

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] = "left",
        add_special_tokens: bool = True,
        lora_request: Any = None,
        fair_key: str = "",
        arrival_time: float | None = None,
        report_progress: bool = False,
    ) -> RequestStream:
        """Check a request and queue it. Whatever is wrong with it is raised here, before anything has been streamed.

        Args:
            sampling_params: None: the model's defaults.
            request_id: None: a fresh one. An id that is in use is refused.
            arrival_time: time.monotonic() when the request came in; default now.
            report_progress: outputs say how far the prompt is (`prompt_progress`) while it is computed.

        Raises:
            InvalidRequest, NotYet: the request cannot be served as asked.
            Overloaded: too many requests wait already.
            EngineDead: there is no engine and there will be none.
        """
        arrival = time.monotonic() if arrival_time is None else arrival_time
        await self._check_accepting()
        if sampling_params is None:
            sampling_params = SamplingParams(**self.default_sampling_params)
        if request_id is None:
            request_id = uuid.uuid4().hex
        self._check_unused(request_id)
        limit = self._processor.token_limit(truncate_prompt_tokens, truncation_side, sampling_params)
        prompt = await self._tokenize_long(
            prompt, sampling_params, add_special_tokens=add_special_tokens, limit=limit, from_end=truncation_side == "left"
        )
        grammar = await self._prepare_constraint(sampling_params, fair_key)
        if sampling_params.bad_words and self._tokenizer is not None:
            await asyncio.to_thread(self._processor.bad_words, sampling_params.bad_words)
        prepared = self._processor.prepare(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            fair_key=fair_key,
            cache_salt=cache_salt,
            truncate_prompt_tokens=truncate_prompt_tokens,
            truncation_side=truncation_side,
            add_special_tokens=add_special_tokens,
            lora_request=lora_request,
            arrival_time=arrival,
            report_progress=report_progress,
            grammar=grammar,
        )
        self._check_unused(request_id)  # somebody may have taken it while we were away
        news = asyncio.Event()
        state = RequestState(prepared, self._tokenizer, abort_sibling=self._client.abort, wake=news.set, on_finish=self._on_finish)
        self._client.add(prepared.request, state)
        self._live[request_id] = state
        self._idle.clear()
        return RequestStream(state, news, lambda: self._abort_state(state))

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one request as they come (see `submit` for the options). Closing the iterator aborts the request."""
        stream = await self.submit(prompt, sampling_params, request_id, **options)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def abort(self, request_id: str) -> None:
        """End a request: its stream gets a last output with finish_reason "abort". Unknown ids are ignored."""
        state, turn = self._live.get(request_id), self._beams.get(request_id)
        if isinstance(state, PoolingState):
            self._client.abort(state.request.request_id)
            state.on_error(RequestFailed("The request was aborted."))
        elif state is not None:
            self._abort_state(state)
        elif turn is not None:
            turn.on_error(RequestFailed("The beam search was aborted."))

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request_id: str | None = None, *, n: int | None = None, **options: Any
    ) -> RequestOutput:
        """Beam search: the best `n` (default all) continuations, best first, as siblings of one output.

        Cancelling it, or `abort`, ends it in the engine too (`abort` makes it raise RequestFailed).
        """
        await self._check_accepting()
        request_id = uuid.uuid4().hex if request_id is None else request_id
        self._check_unused(request_id)
        add_special_tokens = options.pop("add_special_tokens", True)
        prompt = await self._tokenize_long(prompt, SamplingParams(max_tokens=params.max_tokens), add_special_tokens=add_special_tokens)
        search = BeamSearch.begin(self._processor, prompt, params, request_id, add_special_tokens=add_special_tokens, **options)
        self._check_unused(request_id)
        self._beams[request_id] = None
        self._idle.clear()
        reason = "abort"
        try:
            await self._search(search)
            reason = "stop"
        except OctavoError:
            reason = "error"
            raise
        finally:
            del self._beams[request_id]
            self._on_finish(search.finished_request(reason))
        return beam_request_output(search, self._tokenizer, n)

    async def _search(self, search: BeamSearch) -> None:
        bounded = True
        try:
            while not search.done:
                turned = asyncio.Event()
                requests, collector = search.start_turn(turned.set)
                self._beams[search.request_id] = collector
                for request in requests:
                    self._client.add(request, collector, bounded=bounded)
                    bounded = False
                await turned.wait()
                self._client.release(search.finish_turn(collector))
        finally:
            for request_id in search.open_requests():
                self._client.abort(request_id)
            self._client.release(search.held_requests())

    async def pool(self, prepared: Sequence[PreparedPooling]) -> list[PoolingState]:
        """Run pooling requests that `pooling_processor` made; they are all done when this returns.

        Cancelling it, or the failure of one to be queued, ends them all.

        Raises:
            Overloaded: too many requests wait already.
            EngineDead: there is no engine and there will be none.
        """
        await self._check_accepting()
        for one in prepared:
            self._check_unused(one.request_id)
        news = asyncio.Event()
        states = [PoolingState(one, wake=news.set, on_finish=self._on_finish) for one in prepared]
        added: list[PoolingState] = []
        try:
            for state in states:
                self._client.add(state.request, state, bounded=not added)  # taken as a whole, or not at all
                added.append(state)
                self._live[state.request_id] = state
            self._idle.clear()
            for state in states:
                while not state.done:
                    news.clear()
                    await news.wait()
        finally:
            for state in added:
                if not state.done:
                    self._client.abort(state.request.request_id)
                    state.on_error(RequestFailed("The request was aborted."))
        return states

    async def pooling_processor(self) -> PoolingProcessor:
        """What makes pooling requests of prompts.

        Raises:
            InvalidRequest: the engine does not pool.
        """
        await self._check_accepting()
        return PoolingProcessor(self.config, self._tokenizer, self._processor, self.ready_report.embedding_size)

    async def _check_accepting(self) -> None:
        if not self._accepting:
            raise Overloaded("The server is shutting down.", retry_after=5.0)
        if self._client.state == "starting":
            await self.wait_ready()
        self._client.check_alive()

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._live or request_id in self._beams:
            raise InvalidRequest(f"request_id {request_id!r} is in use by a request that is still running.", param="request_id")

    async def _tokenize_long(
        self, prompt: Prompt, params: SamplingParams, *, add_special_tokens: bool, limit: int | None = None, from_end: bool = True
    ) -> Prompt:
        """Tokenize a long text in a thread, as much as is wanted; a prompt in any other form is left as it is."""
        parsed = parse_prompt(prompt)
        if parsed.token_ids is not None or self._tokenizer is None or parsed.text is None or len(parsed.text) < LONG_TEXT:
            return prompt
        if limit is None:
            self._processor.check_text_length(parsed, params)
        ids = await asyncio.to_thread(self._processor.token_ids, parsed, add_special_tokens, limit, from_end=from_end)
        return {"prompt": parsed.text, "prompt_token_ids": ids, "cache_salt": parsed.cache_salt}

    async def check_structured_outputs(self, params: StructuredOutputsParams, client: str = "") -> None:
        """Check a grammar or schema without waiting for it on the event loop; requests with it then pass at once.

        Args:
            client: who asks; where many wait, clients take turns.

        Raises:
            InvalidRequest: it cannot be used; for a schema the message has the path.
            NotYet: the grammar engine is not installed.
            Overloaded: too many wait.
        """
        await self._processor.grammars.prepare(params, client)

    async def check_tool_parameters(self, functions: Sequence[Mapping[str, Any]], client: str = "") -> None:
        """Check the "function" objects of tools; see `GrammarDoor.prepare_parameters`."""
        await self._processor.grammars.prepare_parameters(functions, client)

    async def _prepare_constraint(self, params: SamplingParams, client: str) -> Checked | None:
        """Do elsewhere what a constrained request needs and what takes long the first time. Returns what is known of its grammar."""
        wish, grammar = params.structured_outputs, None
        if wish is None and params.thinking_token_budget is None:
            return None
        if isinstance(wish, StructuredOutputsParams):
            grammar = await self._processor.grammars.prepare(wish, client, first=wants_first(params))
        if self._tokenizer is not None:
            if self._vocabulary_task is None:
                self._vocabulary_task = asyncio.ensure_future(asyncio.to_thread(self._processor.vocabulary))
            await asyncio.shield(self._vocabulary_task)
        return grammar

    def _abort_state(self, state: RequestState) -> None:
        if not state.finished:
            self._client.abort(state.engine_id)
            state.abort()

    def _on_finish(self, finished: FinishedRequest) -> None:
        self._live.pop(finished.request_id, None)
        if not self.live_requests():
            self._idle.set()
        for listener in self._listeners:
            try:
                listener(finished)
            except Exception:
                logger.exception("A listener failed on request %s", finished.request_id)

    # ---- what there is to know

    def add_listener(self, on_finished: Listener) -> None:
        """Call `on_finished` for every request that ends, however it ends."""
        self._listeners.append(on_finished)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequest with skip_tokenizer_init."""
        if self._tokenizer is None:
            raise InvalidRequest("This engine runs with skip_tokenizer_init: there is no tokenizer.")
        return self._tokenizer

    @property
    def ready_report(self) -> EngineReady:
        return self._client.ready_report

    @property
    def state(self) -> State:
        """starting, running, restarting (live requests wait and go on), dead or closed."""
        return self._client.state

    @property
    def is_alive(self) -> bool:
        """False when there is no engine and there will be none."""
        return self._client.state not in ("dead", "closed")

    @property
    def death(self) -> EngineDead | None:
        """Why there is no engine and there will be none."""
        return self._client.death

    @property
    def restarts(self) -> int:
        return self._client.restarts

    @property
    def engine_pid(self) -> int | None:
        return self._client.engine_pid

    def request_ids(self) -> list[str]:
        """Of the requests that have not ended."""
        return [*self._live, *self._beams]

    def live_requests(self) -> int:
        return len(self._live) + len(self._beams)

    def stats(self) -> EngineStats:
        """The last snapshot that the engine sent; does not wait for it."""
        return self._client.stats()

    def last_step_age(self) -> float:
        """Seconds since the engine finished a step while there is work; 0.0 when idle. The measure of liveness."""
        return self._client.last_step_age()

    def check_health(self) -> None:
        """Raises EngineDead if the engine is gone for good, or hangs."""
        self._client.check_alive()
        if self._client.state == "restarting":
            return  # it may take as long as loading the model; what is live goes on afterwards
        age, limit = self.last_step_age(), self.config.reliability.hang_timeout
        if age > limit:
            raise EngineDead(f"The engine has work but finished no step for {age:.0f} seconds (limit {limit:.0f}).")

    async def ping(self) -> EngineStats:
        """A round trip through the engine's loop."""
        return await self._client.ping()

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False when blocks in use prevented it."""
        return await self._client.reset_prefix_cache()


AsyncEngineArgs = EngineArgs
AsyncLLMEngine = AsyncLLM
