"""From the tokens of one request to what its user sees: text, stop strings, logprobs, one `RequestOutput` at a time.

A `RequestState` is the sink of its request. It takes deltas as they come, whoever is or is not reading, so that a stop string
ends the generation even when the consumer is slow; `take` hands out everything that was not handed out yet.

Invariants: a sibling's text never shrinks and never shows part of a stop string that is still being matched; joined DELTA texts
equal the FINAL_ONLY text; every state calls `on_finish` exactly once.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.errors import InvalidRequest, OctavoError, RequestFailed
from octavo.frontend.outputs import CompletionOutput, FinishedRequest, Logprob, PositionLogprobs, RequestOutput
from octavo.frontend.processor import Prepared
from octavo.frontend.text.detokenizer import IncrementalDetokenizer
from octavo.frontend.text.logprobs import token_label
from octavo.frontend.text.stops import StopStrings
from octavo.protocol.engine import FinishReason, LogprobRow, PromptProgress, RequestTimes, TokenDelta
from octavo.protocol.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from octavo.frontend.text.tokenizer import Tokenizer

PROMPT_TAIL = 16
"""Prompt tokens that the detokenizer sees, so that the first output token joins them as it would in the whole text."""


class SequenceState:
    """One sibling: its tokens and text so far, and how much of them has been handed out."""

    def __init__(self, index: int, prompt_token_ids: list[int], sampling: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[PositionLogprobs] | None = [] if sampling.logprobs is not None or sampling.logprob_token_ids else None
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.error_param: str | None = None
        """The field of the request that is to blame."""
        self.last_token_time = 0.0
        self.times = RequestTimes()
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._detokenizer: IncrementalDetokenizer | None = None
        self._stops: StopStrings | None = None
        if tokenizer is not None and sampling.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                prompt_token_ids[-PROMPT_TAIL:],
                skip_special_tokens=sampling.skip_special_tokens,
                spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            )
            if sampling.stops:
                self._stops = StopStrings(sampling.stops, sampling.include_stop_str_in_output, sampling.min_tokens)
        self._given_tokens = 0
        self._given_text = 0
        self._given_end = False

    def push(self, delta: TokenDelta) -> bool:
        """Take a delta. True: a stop string ended the sequence before the engine knew."""
        ids = delta.token_ids
        finish = delta.finish_reason
        # The token that ended it (EOS, a stop token) is one of the tokens, but not part of the text.
        hidden = 1 if finish is FinishReason.STOP and ids and not self._sampling.include_stop_str_in_output else 0
        taken = len(ids)
        if self._detokenizer is not None:
            shown = ids[: len(ids) - hidden]
            if self._stops is None:
                if shown:
                    self.text += self._detokenizer.push(shown)
            else:
                taken = self._match(shown) + (0 if self.stop_reason is not None else hidden)
        self.token_ids += ids[:taken]
        if self.logprobs is not None and delta.logprobs is not None:
            self._score(delta.logprobs[:taken])
        stopped = self.stop_reason is not None
        if finish is not None and not stopped:
            self._end_text()
            stopped = self.stop_reason is not None
        if stopped:
            self.finish_reason = FinishReason.STOP
        elif finish is not None:
            self.finish_reason, self.stop_reason, self.error = finish, delta.stop_reason, delta.error
            self.error_param = delta.error_param
        return stopped and finish is None

    def abort(self) -> None:
        """End it here; text held back for a possible stop string is given out."""
        if self.finish_reason is None:
            self._end_text()
            self.finish_reason = FinishReason.ABORT if self.stop_reason is None else FinishReason.STOP

    def _match(self, shown: list[int]) -> int:
        """Detokenize token by token up to a stop string; returns the tokens taken."""
        assert self._detokenizer is not None
        assert self._stops is not None
        for taken, token_id in enumerate(shown, start=1):
            update = self._stops.push(self._detokenizer.push([token_id]))
            self.text += update.text
            if update.stop is not None:
                self.stop_reason = update.stop
                return taken
        return len(shown)

    def _end_text(self) -> None:
        if self._detokenizer is None:
            return
        tail = self._detokenizer.flush()
        if self._stops is None:
            self.text += tail
            return
        update = self._stops.push(tail, num_tokens=0)
        self.text += update.text
        if update.stop is not None:
            self.stop_reason = update.stop
        else:
            self.text += self._stops.flush()

    def _score(self, rows: list[LogprobRow]) -> None:
        assert self.logprobs is not None
        for row in rows:
            self.cumulative_logprob += row.logprob
            self.logprobs.append(position_logprobs(row, self._tokenizer))

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def has_news(self, interval: int) -> bool:
        """Whether there is something to hand out, if outputs come every `interval` tokens (the first and last always come)."""
        if self.finish_reason is not None:
            return not self._given_end
        fresh = len(self.token_ids) - self._given_tokens
        return fresh >= interval or (fresh > 0 and self._given_tokens == 0)

    def output(self, *, delta: bool) -> CompletionOutput:
        """Everything so far, or (`delta`) what `output` did not return before."""
        first_token, first_char = (self._given_tokens, self._given_text) if delta else (0, 0)
        self._given_tokens, self._given_text = len(self.token_ids), len(self.text)
        self._given_end = self.finish_reason is not None
        return CompletionOutput(
            index=self.index,
            text=self.text[first_char:],
            token_ids=self.token_ids[first_token:],
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[first_token:],
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
            error=self.error,
        )


class RequestState:
    """See the module. A `Sink`.

    Args:
        sampling: what the user asked for (output kind, n, ...), resolved.
        abort_sibling: tells the engine that a stop string ended sibling `index`.
        wake: called whenever there may be something new to take.
        on_finish: called once, when the last sibling has ended.
    """

    def __init__(
        self,
        prepared: Prepared,
        tokenizer: Tokenizer | None,
        *,
        abort_sibling: Callable[[str, int], None],
        wake: Callable[[], None] = lambda: None,
        on_finish: Callable[[FinishedRequest], None] = lambda finished: None,
    ) -> None:
        request = prepared.request
        self.request_id = prepared.request_id
        self.engine_id = request.request_id
        self.prompt = prepared.prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.sampling = request.sampling
        self.error: OctavoError | None = None
        self.num_cached_tokens: int | None = None
        self.times = RequestTimes()
        self.sequences = [SequenceState(i, request.prompt_token_ids, request.sampling, tokenizer) for i in range(request.sampling.n)]
        self._arrival_time = request.arrival_time
        self._tokenizer = tokenizer
        self._abort_sibling = abort_sibling
        self._wake = wake
        self._on_finish = on_finish
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._prompt_given = False
        self._progress: PromptProgress | None = None
        """The last that was not handed out yet."""
        self._running = len(self.sequences)
        self._end_given = False
        self._token_gaps: list[float] = []
        self._first_token_time = 0.0

    # ---- what the engine says

    def on_delta(self, delta: TokenDelta) -> None:
        sequence = self.sequences[delta.index]
        if sequence.finished:
            return
        if delta.prompt_progress is not None:
            self._progress = delta.prompt_progress
            if self.num_cached_tokens is None:
                self.num_cached_tokens = delta.prompt_progress.cache
            self._wake()
            return
        if delta.num_cached_tokens >= 0 and self.num_cached_tokens is None:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = [None if row is None else position_logprobs(row, self._tokenizer) for row in delta.prompt_logprobs]
        if delta.token_ids:
            self._clock(sequence)
        if delta.times is not None:
            sequence.times = _merged(sequence.times, delta.times, preemptions=max)
        if sequence.push(delta):
            self._abort_sibling(self.engine_id, delta.index)
        if sequence.finished:
            self._end_of_sibling()
        self._wake()

    def on_error(self, error: OctavoError) -> None:
        if self._running == 0:
            return
        self.error = error
        for sequence in self.sequences:
            if not sequence.finished:
                sequence.finish_reason, sequence.error = FinishReason.ERROR, str(error)
        self._finish()
        self._wake()

    def abort(self) -> None:
        """The user (or a closed connection) ends it; the caller tells the engine."""
        if self._running == 0:
            return
        for sequence in self.sequences:
            sequence.abort()
        self._finish()
        self._wake()

    # ---- what the user gets

    @property
    def finished(self) -> bool:
        return self._running == 0

    def failure(self) -> OctavoError | None:
        """Why the request as a whole failed, if it did: the engine is gone, or a sibling could not go on."""
        if self.error is None:
            failed = next((s for s in self.sequences if s.finish_reason is FinishReason.ERROR and s.error is not None), None)
            if failed is not None:
                message, param = str(failed.error), failed.error_param
                self.error = RequestFailed(message) if param is None else InvalidRequest(message, param=param)
        return self.error

    def take(self) -> RequestOutput | None:
        """What is new since the last call, in the shape that `output_kind` asks for; None when there is nothing to say yet."""
        kind = self.sampling.output_kind
        if self._end_given or (kind is RequestOutputKind.FINAL_ONLY and not self.finished):
            return None
        interval = self.sampling.stream_interval or 1
        if kind is RequestOutputKind.DELTA:
            outputs = [s.output(delta=True) for s in self.sequences if s.has_news(interval)]
        elif self.finished or any(s.has_news(interval) for s in self.sequences):
            outputs = [s.output(delta=False) for s in self.sequences]
        else:
            outputs = []
        progress, self._progress = self._progress, None
        if not outputs and progress is None and not self.finished:
            return None
        self._end_given = self.finished
        # In a stream of deltas the prompt's logprobs come once, with the first.
        scored = self._prompt_logprobs if kind is not RequestOutputKind.DELTA or not self._prompt_given else None
        self._prompt_given = True
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=scored,
            outputs=outputs,
            finished=self.finished,
            metrics=self.times if self.finished else None,
            num_cached_tokens=self.num_cached_tokens,
            prompt_progress=progress,
        )

    # ---- bookkeeping

    def _clock(self, sequence: SequenceState) -> None:
        now = time.monotonic()
        if sequence.last_token_time:
            self._token_gaps.append(now - sequence.last_token_time)
        elif not self._first_token_time:
            self._first_token_time = now
        sequence.last_token_time = now

    def _end_of_sibling(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._finish()

    def _finish(self) -> None:
        self._running = 0
        for sequence in self.sequences:
            self.times = _merged(self.times, sequence.times, preemptions=operator.add)
        # What was seen here counts where it came earlier (an engine that was restarted knows only its own tokens), and where
        # the engine did not get to say it.
        self.times.queued = self.times.queued or self._arrival_time
        self.times.first_token = _earliest(self.times.first_token, self._first_token_time)
        self.times.last_token = self.times.last_token or max(s.last_token_time for s in self.sequences)
        self._on_finish(
            FinishedRequest(
                request_id=self.request_id,
                times=self.times,
                arrival_time=self._arrival_time,
                end_time=time.monotonic(),
                num_prompt_tokens=len(self.prompt_token_ids),
                num_cached_tokens=self.num_cached_tokens or 0,
                num_output_tokens=sum(len(s.token_ids) for s in self.sequences),
                finish_reasons=tuple(str(s.finish_reason) for s in self.sequences),
                n=len(self.sequences),
                max_tokens=self.sampling.max_tokens or 0,
                token_gaps=tuple(self._token_gaps),
                error=next((s.error for s in self.sequences if s.error is not None), None),
            )
        )


def _earliest(a: float, b: float) -> float:
    """Of two times, where 0.0 means never."""
    return min(a, b) if a and b else a or b


def _merged(a: RequestTimes, b: RequestTimes, *, preemptions: Callable[[int, int], int]) -> RequestTimes:
    return RequestTimes(
        queued=_earliest(a.queued, b.queued),
        scheduled=_earliest(a.scheduled, b.scheduled),
        first_token=_earliest(a.first_token, b.first_token),
        last_token=max(a.last_token, b.last_token),
        num_preemptions=preemptions(a.num_preemptions, b.num_preemptions),
    )


def position_logprobs(row: LogprobRow, tokenizer: Tokenizer | None) -> PositionLogprobs:
    """One position: the token that is there first, then the most likely ones. Each with its own text."""

    def text(token_id: int) -> str | None:
        return None if tokenizer is None else token_label(tokenizer, token_id)

    result = {row.token_id: Logprob(row.logprob, row.rank, text(row.token_id))}
    for rank, (token_id, logprob) in enumerate(zip(row.top_ids, row.top_logprobs, strict=True), start=1):
        if token_id not in result:
            result[token_id] = Logprob(logprob, rank, text(token_id))
    return result
