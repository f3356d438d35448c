"""`LLM`: offline inference. The engine core runs in this process; a call returns when all of its prompts are done.

Every prompt of a call is checked before any is queued, and whatever ends a call early (Ctrl-C, an error) leaves nothing queued:
the object stays usable.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import inspect
import itertools
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np

from octavo.config.args import EngineArgs
from octavo.config.types import EngineConfig
from octavo.errors import ConfigError, InvalidRequest
from octavo.frontend.beam import BeamSearch, Collector, beam_search_output
from octavo.frontend.client import InProcessClient, Progress
from octavo.frontend.launch import engine_args, log_warnings, open_tokenizer, prepare_launch
from octavo.frontend.outputs import BeamSearchOutput, RequestOutput
from octavo.frontend.pooling import (
    PoolingOutput,
    PoolingProcessor,
    PoolingRequestOutput,
    PoolingState,
    PreparedPooling,
    ScoringOutput,
    output_of,
    pairs,
    similarity,
)
from octavo.frontend.processor import InputProcessor, Prepared
from octavo.frontend.progress import GenerationProgress
from octavo.frontend.prompts import Prompt, split_prompts
from octavo.frontend.request_state import RequestState
from octavo.protocol.engine import EngineReady, EngineStats
from octavo.protocol.params import BeamSearchParams, PoolingParams, PoolingTask, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from octavo.frontend.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


def _no_progress(phase: str, done: int, total: int) -> None:
    pass


class LLM:
    """A model, loaded, for offline use.

    Args:
        model: a local folder, a .gguf file, a hub name, or empty for the bundled model.
        progress: called with (phase, done, total) while the model loads.
        settings: any field of `EngineArgs` (tokenizer, dtype, max_model_len, gpu_memory_utilization, ...).

    Raises:
        ConfigError: an unknown setting, or one that cannot work.
        OctavoError: the model cannot be found or loaded.
    """

    def __init__(self, model: str = "", *, progress: Progress | None = None, **settings: Any) -> None:
        self._client: InProcessClient | None = None
        settings.setdefault("disable_log_stats", True)
        launch = prepare_launch(engine_args(model, settings), progress, offline=True)
        if launch.config.parallel.data > 1:
            raise ConfigError("--data-parallel-size: LLM has one replica. Serve the model (octavo serve), or use AsyncLLM.")
        self.args: EngineArgs = launch.args
        self.config: EngineConfig = launch.config
        self._tokenizer = open_tokenizer(launch)
        self._client = InProcessClient(launch.config, progress or _no_progress)
        if launch.config.parallel.world > 1:
            _close_at_exit(self)
        log_warnings(self._client.ready_report, launch.config)
        self._defaults = launch.default_sampling_params
        self._processor = InputProcessor(launch.config, self._tokenizer, self._client.ready_report.max_model_len)
        self._client.vocabulary = self._processor.vocabulary
        self._ids = itertools.count()
        self._lock = threading.RLock()

    # ---- generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; results come in the order of the prompts.

        Args:
            prompts: one prompt or a sequence of them: text, token ids, or a dict with either.
            sampling_params: one for all, or one a prompt. None: the model's defaults.
            use_tqdm: progress bar on stderr. None: only when stderr is a terminal.
            priority: one a prompt, lower first, under the priority policy.

        Raises:
            InvalidRequest: some prompt or parameter is not acceptable; nothing has been generated then.
            EngineDead: a rank of this LLM ended in an earlier call. Prompts of that call end with finish_reason "error".
        """
        items = split_prompts(prompts)
        params = self._one_each(sampling_params, len(items))
        if priority is not None and not isinstance(priority, Sequence):
            raise InvalidRequest(f"priority must be a list with one integer a prompt, got {type(priority).__name__}.", param="priority")
        if priority is not None and len(priority) != len(items):
            raise InvalidRequest(f"priority has {len(priority)} entries for {len(items)} prompts.", param="priority")
        with self._lock:
            prepared = []
            for i, (prompt, sampling) in enumerate(zip(items, params, strict=True)):
                with _naming_prompt(i, len(items)):
                    prepared.append(
                        self._processor.prepare(
                            prompt,
                            sampling,
                            str(next(self._ids)),
                            priority=0 if priority is None else priority[i],
                            lora_request=lora_request,
                        )
                    )
            return self._run(prepared, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several. See `generate` for the rest."""
        tokenizer = self.get_tokenizer()
        templates = tokenizer.templates
        if chat_template_content_format is not None:
            templates = replace(templates, content_format=_content_format(chat_template_content_format))
        conversations = _split_conversations(messages)
        if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
            raise InvalidRequest(
                f"chat_template_kwargs must be a dict, got {type(chat_template_kwargs).__name__}.", param="chat_template_kwargs"
            )
        if tools is not None and not isinstance(tools, list | tuple):
            raise InvalidRequest(f"tools must be a list of dicts, got {type(tools).__name__}.", param="tools")
        prompts: list[Prompt] = []
        for i, conversation in enumerate(conversations):
            with _naming_prompt(i, len(conversations)):
                text = templates.render(
                    conversation,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template=chat_template,
                    template_kwargs={**self.args.default_chat_template_kwargs, **(chat_template_kwargs or {})},
                )
                prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode_chat(text)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool | None = None
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of every prompt, best first."""
        items = split_prompts(prompts)
        with self._lock:
            searches = []
            for i, prompt in enumerate(items):
                with _naming_prompt(i, len(items)):
                    searches.append(BeamSearch.begin(self._processor, prompt, params, str(next(self._ids))))
            self._run_beams(searches, use_tqdm)
            return [beam_search_output(search, self._tokenizer) for search in searches]

    def _one_each(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise InvalidRequest(
                f"There are {count} prompts but {len(params)} sampling_params: give one for all, or one each.", param="sampling_params"
            )
        return list(params)

    def _run(self, prepared: list[Prepared], use_tqdm: bool | None) -> list[RequestOutput]:
        client = self._open_client()
        client.check_alive()
        with GenerationProgress(len(prepared), "Generating", use_tqdm) as bar, _interruptible() as interrupted:
            states = []
            try:
                for one in prepared:
                    one.request.sampling.output_kind = RequestOutputKind.FINAL_ONLY
                    state = RequestState(one, self._tokenizer, abort_sibling=client.abort, on_finish=bar.finished)
                    states.append(state)
                    client.add(one.request, state)
                while client.num_live and not interrupted():
                    client.step()
            finally:
                client.abort_all()
        if interrupted():
            raise KeyboardInterrupt
        return [_final_output(state, told=client.dead) for state in states]

    def _run_beams(self, searches: list[BeamSearch], use_tqdm: bool | None) -> None:
        client = self._open_client()
        client.check_alive()
        # Held parents keep their blocks: more searches at once than fit would only evict each other.
        width = max((search.params.beam_width for search in searches), default=1)
        at_once = max(1, self.config.scheduler.max_num_seqs // width)
        waiting = iter(searches)
        active: list[tuple[BeamSearch, Collector]] = []

        def turn(search: BeamSearch) -> tuple[BeamSearch, Collector]:
            requests, collector = search.start_turn()
            for request in requests:
                client.add(request, collector)
            return search, collector

        with GenerationProgress(len(searches), "Beam search", use_tqdm) as bar, _interruptible() as interrupted:
            try:
                while not interrupted():
                    active += [turn(search) for search in itertools.islice(waiting, at_once - len(active))]
                    if not active:
                        break
                    client.step()
                    still_active = []
                    for search, collector in active:
                        if not collector.complete:
                            still_active.append((search, collector))
                            continue
                        client.release(search.finish_turn(collector))
                        if search.done:
                            client.release(search.held_requests())
                            bar.advance(sum(len(done.beam.tokens) for done in search.results()))
                        else:
                            still_active.append(turn(search))
                    active = still_active
            finally:
                client.abort_all()
                for search in searches:
                    client.release(search.held_requests())
        if interrupted():
            raise KeyboardInterrupt

    # ---- what there is to know

    def get_tokenizer(self) -> Tokenizer:
        """Raises InvalidRequest with skip_tokenizer_init."""
        if self._tokenizer is None:
            raise InvalidRequest("This LLM runs with skip_tokenizer_init: there is no tokenizer.")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none: the model's own defaults."""
        return SamplingParams(**self._defaults)

    @property
    def ready_report(self) -> EngineReady:
        """Memory, cache size and start-up times."""
        return self._open_client().ready_report

    def stats(self) -> EngineStats:
        return self._open_client().stats()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False when blocks in use prevented it."""
        with self._lock:
            return self._open_client().reset_prefix_cache()

    # ---- pooling

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
    ) -> list[PoolingRequestOutput]:
        """One embedding a prompt: `outputs.embedding`.

        Args:
            truncate_prompt_tokens: cut longer prompts to this many tokens; -1: to what the model takes.

        Raises:
            InvalidRequest: some prompt or parameter is not acceptable, or the model makes no embeddings.
        """
        return self._pool(prompts, pooling_params, "embed", truncate_prompt_tokens, use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
    ) -> list[PoolingRequestOutput]:
        """What the model makes of each prompt, as an array: `outputs.data`. See `embed` for the rest.

        Args:
            pooling_task: embed, token_embed (one vector a token) or classify. None: what the model is for.
        """
        return self._pool(prompts, pooling_params, pooling_task, truncate_prompt_tokens, use_tqdm, raw=True)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
    ) -> list[PoolingRequestOutput]:
        """The probability of each class: `outputs.probs`. See `embed` for the rest."""
        return self._pool(prompts, pooling_params, "classify", truncate_prompt_tokens, use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
    ) -> list[PoolingRequestOutput]:
        """How well two texts belong together: `outputs.score`. One text with each of many, or one by one.

        A model for pairs reads both at once; with one that makes embeddings the score is the cosine between them.
        """
        texts = pairs(data_1, data_2)
        with self._lock:
            processor = self._pooling_processor()
            processor.task("score")
            if not processor.labels:
                embedded = self.embed(
                    [text for pair in texts for text in pair],
                    pooling_params=pooling_params,
                    truncate_prompt_tokens=truncate_prompt_tokens,
                    use_tqdm=use_tqdm,
                )
                return [_cosine(*embedded[i : i + 2]) for i in range(0, len(embedded), 2)]
            prepared = []
            for i, (first, second) in enumerate(texts):
                with _naming_prompt(i, len(texts)):
                    prepared.append(
                        processor.prepare_pair(
                            first, second, pooling_params, str(next(self._ids)), truncate_prompt_tokens=truncate_prompt_tokens
                        )
                    )
            return [output_of(state, "score") for state in self._run_pooling(prepared, use_tqdm)]

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: PoolingTask | None,
        truncate: int | None,
        use_tqdm: bool | None,
        *,
        raw: bool = False,
    ) -> list[PoolingRequestOutput]:
        items = split_prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(items)
        if len(each) != len(items):
            raise InvalidRequest(
                f"There are {len(items)} prompts but {len(each)} pooling_params: give one for all, or one each.", param="pooling_params"
            )
        with self._lock:
            processor = self._pooling_processor()
            prepared = []
            for i, (prompt, one) in enumerate(zip(items, each, strict=True)):
                with _naming_prompt(i, len(items)):
                    prepared.append(processor.prepare(prompt, one, str(next(self._ids)), task=task, truncate_prompt_tokens=truncate))
            states = self._run_pooling(prepared, use_tqdm)
        if raw:
            return [PoolingRequestOutput(s.request_id, PoolingOutput(s.result()), s.request.prompt_token_ids) for s in states]
        return [output_of(state, task or "embed") for state in states]

    def _pooling_processor(self) -> PoolingProcessor:
        return PoolingProcessor(self.config, self._tokenizer, self._processor, self.ready_report.embedding_size)

    def _run_pooling(self, prepared: list[PreparedPooling], use_tqdm: bool | None) -> list[PoolingState]:
        client = self._open_client()
        with GenerationProgress(len(prepared), "Pooling", use_tqdm) as bar, _interruptible() as interrupted:
            states = [PoolingState(one, on_finish=bar.finished) for one in prepared]
            try:
                for state in states:
                    client.add(state.request, state)
                while client.num_live and not interrupted():
                    client.step()
            finally:
                client.abort_all()
        if interrupted():
            raise KeyboardInterrupt
        return states

    # ---- life

    def close(self) -> None:
        """Free the model's memory. Calling it again does nothing."""
        client, self._client = self._client, None
        if client is not None:
            self._processor.grammars.close()
            client.close()
            del client
            gc.collect()  # the model's tensors sit in reference cycles: without this they would linger

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing() and getattr(self, "_client", None) is not None:
            self.close()

    def _open_client(self) -> InProcessClient:
        if self._client is None:
            raise InvalidRequest("This LLM has been closed. Make a new one.")
        return self._client


def _close_at_exit(llm: LLM) -> None:
    """Ranks take leave of each other before the interpreter ends, also where a program does not close its LLM: the library that connects them
    would end the process with an abort."""
    here, found = os.getpid(), weakref.ref(llm)

    def close() -> None:
        left = found()
        if left is not None and os.getpid() == here:  # not in a copy of the process, whose ranks they are not
            left.close()

    atexit.register(close)


def _signature() -> inspect.Signature:
    """`LLM(...)`'s parameters as help() and editors should show them: the fields of EngineArgs."""
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for f in fields(EngineArgs):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if f.name == "model" else inspect.Parameter.KEYWORD_ONLY
        default = f.default_factory() if callable(f.default_factory) else f.default
        default = True if f.name == "disable_log_stats" else default
        parameters.append(inspect.Parameter(f.name, kind, default=default, annotation=f.type))
    parameters.append(inspect.Parameter("progress", inspect.Parameter.KEYWORD_ONLY, default=None))
    return inspect.Signature(parameters)


LLM.__init__.__signature__ = _signature()  # type: ignore[attr-defined]


def _cosine(first: PoolingRequestOutput, second: PoolingRequestOutput) -> PoolingRequestOutput:
    """The score of two embeddings."""
    vectors = [np.asarray(one.outputs.embedding, np.float32) for one in (first, second)]
    ids = [*first.prompt_token_ids, *second.prompt_token_ids]
    return PoolingRequestOutput(f"{first.request_id}_{second.request_id}", ScoringOutput(similarity(*vectors)), ids)


def _final_output(state: RequestState, *, told: bool) -> RequestOutput:
    """
    Args:
        told: why requests have failed was said once for all.
    """
    output = state.take()
    assert output is not None
    for completion in output.outputs:
        if completion.error is not None and not told:
            logger.error("Prompt %s, output %d failed: %s", state.request_id, completion.index, completion.error)
    return output


def _content_format(value: str) -> Literal["auto", "string", "openai"]:
    if value not in ("auto", "string", "openai"):
        raise InvalidRequest(
            f"chat_template_content_format must be auto, string or openai, got {value!r}.", param="chat_template_content_format"
        )
    return cast(Literal["auto", "string", "openai"], value)


def _split_conversations(messages: Any) -> list[Any]:
    """A list of conversations, from one or several. What is in them is checked when they are rendered."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest("messages must be a non-empty list of messages, or a list of such lists.", param="messages")
    several = isinstance(messages[0], Sequence) and not isinstance(messages[0], str)
    return list(messages) if several else [messages]


@contextlib.contextmanager
def _naming_prompt(index: int, count: int) -> Iterator[None]:
    """Errors about one prompt of several say which."""
    try:
        yield
    except InvalidRequest as e:
        if count == 1:
            raise
        raise InvalidRequest(f"Prompt {index} (of {count}): {e}", param=e.param, code=e.code) from None


@contextlib.contextmanager
def _interruptible() -> Iterator[Any]:
    """Ctrl-C while the core runs is only noted, and asked for between steps: a step is never torn apart.

    A second Ctrl-C does not wait. Yields a function that tells whether there was one.
    """
    noted: list[float] = []
    previous = signal.getsignal(signal.SIGINT)

    def note(signum: int, frame: FrameType | None) -> None:
        if noted and callable(previous):
            previous(signum, frame)
        noted.append(time.monotonic())

    ours = threading.current_thread() is threading.main_thread() and previous is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        if ours:
            signal.signal(signal.SIGINT, previous)
