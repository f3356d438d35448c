"""Pooling requests: what is checked at the door, the sink of a request, and what users get. The counterpart of `processor.py`."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.config.types import EngineConfig
from octavo.errors import InvalidRequest, OctavoError, RequestFailed
from octavo.frontend.outputs import FinishedRequest
from octavo.frontend.processor import InputProcessor
from octavo.frontend.prompts import ParsedPrompt, Prompt, parse_prompt
from octavo.protocol.engine import FinishReason, NewRequest, RequestTimes, TokenDelta
from octavo.protocol.params import PoolingParams, PoolingTask, SamplingParams
from octavo.protocol.pooling import Pooled

if TYPE_CHECKING:
    from octavo.frontend.text.tokenizer import Tokenizer

Floats = npt.NDArray[np.float32]


@dataclass
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    score: float


@dataclass
class PoolingOutput:
    data: Floats
    """[dimensions], or [tokens, dimensions] with the task token_embed."""


@dataclass
class PoolingRequestOutput:
    """The result of one prompt. Field names are vLLM's."""

    request_id: str
    outputs: Any
    """An `EmbeddingOutput`, `ClassificationOutput`, `ScoringOutput` or `PoolingOutput`, by what was asked."""
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True)
class PreparedPooling:
    """A request that passed the door."""

    request_id: str
    request: NewRequest


class PoolingState:
    """Implements `Sink`: takes the one delta of a pooling request.

    Args:
        wake: called when the result (or the error) is there.
    """

    def __init__(
        self,
        prepared: PreparedPooling,
        wake: Callable[[], None] | None = None,
        on_finish: Callable[[FinishedRequest], None] | None = None,
    ) -> None:
        self.request_id = prepared.request_id
        self.request = prepared.request
        self._wake = wake
        self._on_finish = on_finish
        self._pooled: Pooled | None = None
        self._error: OctavoError | None = None

    @property
    def done(self) -> bool:
        return self._pooled is not None or self._error is not None

    def on_delta(self, delta: TokenDelta) -> None:
        if self.done:
            return
        if delta.pooled is not None:
            self._pooled = delta.pooled
        else:
            aborted = delta.finish_reason is FinishReason.ABORT
            self._error = RequestFailed("The request was aborted." if aborted else delta.error or "The engine gave no result.")
        self._finish(delta.times, str(delta.finish_reason))

    def on_error(self, error: OctavoError) -> None:
        if not self.done:
            self._error = error
            self._finish(None, "error")

    def result(self) -> Floats:
        """The numbers.

        Raises:
            OctavoError: there are none.
        """
        if self._error is not None:
            raise self._error
        assert self._pooled is not None
        return np.frombuffer(self._pooled.data, "<f4").reshape(self._pooled.shape)

    def _finish(self, times: RequestTimes | None, reason: str) -> None:
        if self._on_finish is not None:
            self._on_finish(
                FinishedRequest(
                    request_id=self.request_id,
                    times=times or RequestTimes(queued=self.request.arrival_time),
                    arrival_time=self.request.arrival_time,
                    end_time=time.monotonic(),
                    num_prompt_tokens=len(self.request.prompt_token_ids),
                    num_cached_tokens=0,
                    num_output_tokens=0,
                    finish_reasons=(reason,),
                    n=1,
                    max_tokens=0,
                    token_gaps=(),
                    error=None if self._error is None else str(self._error),
                )
            )
        if self._wake is not None:
            self._wake()


class PoolingProcessor:
    """From prompts to requests that the core can trust.

    Args:
        processor: of the same engine; it checks what all prompts have in common.
        embedding_size: numbers in an embedding of this model.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, processor: InputProcessor, embedding_size: int) -> None:
        pooling = config.model.pooling
        if pooling is None:
            raise InvalidRequest(
                f"{config.model.shown} was started to generate text. For embeddings, classes and scores start it with --runner pooling."
            )
        self.labels = pooling.labels
        self._config = config
        self._tokenizer = tokenizer
        self._processor = processor
        self._embedding_size = embedding_size

    def task(self, asked: PoolingTask | None, given: str | None = None) -> PoolingTask:
        """What to do when `asked` is wanted; None is what the model is for.

        Args:
            given: what the user named as `task`, if anything: an error about something else is not about that field.

        Raises:
            InvalidRequest: the model is not for that.
        """
        classifies = bool(self.labels)
        task = asked or ("classify" if classifies else "embed")
        if (task in ("embed", "token_embed") and classifies) or (task == "classify" and not classifies):
            can = "classify, score" if classifies else "embed, token_embed, score"
            raise InvalidRequest(
                f"{self._config.model.shown} cannot do {task!r}. It can do: {can}.", param="task" if asked == given else None
            )
        if task == "score" and len(self.labels) > 1:
            raise InvalidRequest(
                f"Scores need a model with one class, or one that makes embeddings; {self._config.model.shown} has {len(self.labels)} classes.",
                param="task" if asked == given else None,
            )
        return task

    def prepare(
        self,
        prompt: Prompt,
        params: PoolingParams | None,
        request_id: str,
        *,
        task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        priority: int = 0,
    ) -> PreparedPooling:
        """Check and resolve one request. `params` is not changed.

        Args:
            task: what the caller is for; None: what `params` says.
            truncate_prompt_tokens: cut longer prompts to this many tokens, from the end; -1: to what the model takes.

        Raises:
            InvalidRequest: with `param` naming what is wrong.
        """
        parsed = parse_prompt(prompt)
        if truncate_prompt_tokens is None:
            self._check_text_length(parsed)
        ids = self._processor.token_ids(parsed, add_special_tokens, self._limit(truncate_prompt_tokens))
        return self._request(self._cut(ids, truncate_prompt_tokens, parsed), 0, params, request_id, task, priority)

    def prepare_pair(
        self,
        first: str,
        second: str,
        params: PoolingParams | None,
        request_id: str,
        *,
        truncate_prompt_tokens: int | None,
        priority: int = 0,
    ) -> PreparedPooling:
        """A pair of texts for a model that scores pairs. Of the second text as much is kept as `truncate_prompt_tokens` allows.

        Raises:
            InvalidRequest: see `prepare`.
        """
        if self._tokenizer is None:
            raise InvalidRequest("This engine runs with skip_tokenizer_init: pairs of texts need a tokenizer.")
        limit = self._limit(truncate_prompt_tokens)
        ids, second_from = self._tokenizer.encode_pair(parse_prompt(first).text or "", parse_prompt(second).text or "", limit)
        return self._request(ids, second_from, params, request_id, "score", priority)

    def _request(
        self, ids: list[int], second_from: int, params: PoolingParams | None, request_id: str, task: PoolingTask | None, priority: int
    ) -> PreparedPooling:
        if params is not None and not isinstance(params, PoolingParams):
            raise InvalidRequest(f"pooling_params must be PoolingParams, got {type(params).__name__}.", param="pooling_params")
        params = PoolingParams() if params is None else params
        asked: Any = task or params.task
        resolved = msgspec.structs.replace(params, task=self.task(asked, params.task))
        if resolved.dimensions is not None and resolved.dimensions > self._embedding_size:
            raise InvalidRequest(
                f"dimensions={resolved.dimensions} is more than this model has ({self._embedding_size}).", param="dimensions"
            )
        if len(ids) > self._processor.max_model_len:
            self._refuse_length(str(len(ids)))
        request = NewRequest(
            request_id=self._processor.engine_id(request_id),
            prompt_token_ids=ids,
            sampling=SamplingParams(max_tokens=1, seed=0),
            arrival_time=time.monotonic(),
            priority=priority,
            pooling=resolved,
            second_from=second_from,
        )
        return PreparedPooling(request_id, request)

    def _check_text_length(self, parsed: ParsedPrompt) -> None:
        """Refuse a text that is far too long without tokenizing it."""
        if parsed.token_ids is None and parsed.text is not None and self._tokenizer is not None:
            fewest = len(parsed.text) // max(1, self._tokenizer.longest_token)
            if fewest > self._processor.max_model_len:
                self._refuse_length(f"at least {fewest}")

    def _refuse_length(self, tokens: str) -> NoReturn:
        raise InvalidRequest(
            f"This model takes at most {self._processor.max_model_len} tokens, but the prompt has {tokens}. "
            "Shorten it, or use truncate_prompt_tokens (-1 cuts it to what fits).",
            param="prompt",
            code="context_length_exceeded",
        )

    def _limit(self, asked: int | None) -> int | None:
        if asked is None:
            return None
        if isinstance(asked, bool) or not isinstance(asked, int) or (asked < 1 and asked != -1):
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at least 1, or -1 for what fits; got {asked!r}.", param="truncate_prompt_tokens"
            )
        return self._processor.max_model_len if asked == -1 else asked

    def _cut(self, ids: list[int], asked: int | None, parsed: ParsedPrompt) -> list[int]:
        """`ids` cut to the limit; the special tokens that the tokenizer put at the end of a text stay there."""
        limit = self._limit(asked)
        if limit is None or len(ids) <= limit:
            return ids
        suffix = self._tokenizer.suffix if self._tokenizer is not None and parsed.token_ids is None else []
        keep = suffix if suffix and ids[-len(suffix) :] == suffix and len(suffix) < limit else []
        return ids[: limit - len(keep)] + keep


def output_of(state: PoolingState, task: PoolingTask) -> PoolingRequestOutput:
    """What the user of a finished request gets.

    Raises:
        OctavoError: the request failed.
    """
    values = state.result()
    outputs: Any
    match task:
        case "embed":
            outputs = EmbeddingOutput(values.tolist())
        case "classify":
            outputs = ClassificationOutput(values.tolist())
        case "score":
            outputs = ScoringOutput(float(values[0]))
        case "token_embed":
            outputs = PoolingOutput(values)
    return PoolingRequestOutput(state.request_id, outputs, state.request.prompt_token_ids)


def similarity(first: Floats, second: Floats) -> float:
    """Cosine of the angle between two embeddings; 0.0 where one of them is zero."""
    norms = float(np.linalg.norm(first)) * float(np.linalg.norm(second))
    return float(first @ second) / norms if norms else 0.0


def pairs(first: Any, second: Any) -> list[tuple[str, str]]:
    """The pairs of `score`: one with each of many, or one by one.

    Raises:
        InvalidRequest: not texts, or two lists of different lengths.
    """
    one: list[Any] = [first] if isinstance(first, str) else list(first)
    many: list[Any] = [second] if isinstance(second, str) else list(second)
    for name, texts in (("text_1", one), ("text_2", many)):
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f"{name} must be a text or a non-empty list of texts.", param=name)
    if len(one) == 1:
        one = one * len(many)
    if len(one) != len(many):
        raise InvalidRequest(f"text_1 has {len(one)} texts and text_2 has {len(many)}: give one, or equally many.", param="text_1")
    return list(zip(one, many, strict=True))


Encoding = Literal["float", "base64"]


def wire_format(values: Floats, encoding: Encoding) -> Any:
    """Numbers for a JSON reply: a list, or base64 of float32 in little-endian order."""
    if encoding == "float":
        return values.tolist()
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def ordered_by_score(scores: Sequence[float], most: int | None) -> list[int]:
    """Indices by falling score, the first `most` of them; equal scores keep their order."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:most]
