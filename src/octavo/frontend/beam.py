"""Beam search over one-token requests. The algorithm only; `LLM` and `AsyncLLM` carry its requests to the engine.

Every turn asks the engine for one token of each running beam, with the log-probabilities of its most likely continuations. A
beam is a request forked from its parent, which the engine holds until then: all its KV blocks are shared, copied on write.

Semantics are those of transformers' beam search with early_stopping=False: each turn ranks all continuations of all beams by
summed log-probability. Among the best `beam_width`, those that end (EOS, max_tokens) are done, with score
logprob / generated_length**length_penalty (EOS counted); the best `beam_width` that go on are the next beams. It ends when no
running beam, at its present length, scores better than the worst of `beam_width` done ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequest, OctavoError, RequestFailed
from octavo.frontend.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    FinishedRequest,
    PositionLogprobs,
    RequestOutput,
)
from octavo.frontend.processor import InputProcessor
from octavo.frontend.prompts import Prompt
from octavo.frontend.request_state import position_logprobs
from octavo.protocol.engine import FinishReason, LogprobRow, NewRequest, RequestTimes, TokenDelta
from octavo.protocol.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from octavo.frontend.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Beam:
    """One hypothesis: generated tokens only."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    """Sum over `tokens`."""
    rows: tuple[LogprobRow, ...] = ()
    """What each position could have been, the chosen token first."""
    parent_id: str = ""
    """Engine id of the held request it forks from."""


@dataclass(frozen=True)
class DoneBeam:
    beam: Beam
    score: float
    finish_reason: str
    stop_reason: int | None


@dataclass
class Collector:
    """Sink of one turn's requests: complete when each has its row, or one failed."""

    request_id: str
    expected: int
    wake: Callable[[], None]
    rows: dict[str, LogprobRow] = field(default_factory=dict)
    failure: OctavoError | None = None

    @property
    def complete(self) -> bool:
        return self.failure is not None or len(self.rows) == self.expected

    def on_delta(self, delta: TokenDelta) -> None:
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self.failure = RequestFailed(delta.error or "The beam search was aborted.")
        elif delta.logprobs:
            self.rows[delta.request_id] = delta.logprobs[0]
        if self.complete:
            self.wake()

    def on_error(self, error: OctavoError) -> None:
        self.failure = error
        self.wake()


class BeamSearch:
    """One prompt's search. Turn: `start_turn` -> send its requests -> wait for the collector -> `finish_turn`; until `done`."""

    def __init__(
        self, processor: InputProcessor, template: NewRequest, prompt: str | None, params: BeamSearchParams, request_id: str
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = template.prompt_token_ids
        self.params = params
        self.done = False
        self._processor = processor
        self._template = template
        self._eos = frozenset() if params.ignore_eos else frozenset(template.eos_token_ids)
        self._candidates = max(2, 1 + len(self._eos)) * params.beam_width
        assert template.sampling.max_tokens is not None
        self._max_tokens = template.sampling.max_tokens
        self._beams: list[Beam] = [Beam()]
        self._done_beams: list[DoneBeam] = []
        self._turn: dict[str, Beam] = {}
        """Engine id -> beam it extends, of the turn in progress."""
        self._first_token_time = 0.0
        self._held: list[str] = []
        """Parents of the running beams."""

    @classmethod
    def begin(cls, processor: InputProcessor, prompt: Prompt, params: BeamSearchParams, request_id: str, **options: Any) -> BeamSearch:
        """Check the prompt as `InputProcessor.prepare` does (which takes `options`)."""
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"params must be BeamSearchParams, got {type(params).__name__}.", param="params")
        prepared = processor.prepare(
            prompt, SamplingParams(max_tokens=params.max_tokens, temperature=params.temperature), request_id, **options
        )
        return cls(processor, prepared.request, prepared.prompt, params, request_id)

    def start_turn(self, wake: Callable[[], None] = lambda: None) -> tuple[list[NewRequest], Collector]:
        """The turn's requests, and the sink for all of them."""
        sampling = SamplingParams(
            max_tokens=1,
            temperature=self.params.temperature,
            logprobs=min(self._candidates, self._processor.vocab_size),
            seed=self._template.sampling.seed,
            ignore_eos=True,
            detokenize=False,
        )
        requests = []
        self._turn = {}
        for beam in self._beams:
            request = NewRequest(
                request_id=self._processor.engine_id(self.request_id),
                prompt_token_ids=[*self.prompt_token_ids, *beam.tokens],
                sampling=sampling,
                arrival_time=self._template.arrival_time if not beam.tokens else time.monotonic(),
                priority=self._template.priority,
                fair_key=self._template.fair_key,
                extra_key=self._template.extra_key,
                parent_id=beam.parent_id,
                hold=True,
            )
            self._turn[request.request_id] = beam
            requests.append(request)
        return requests, Collector(self.request_id, len(requests), wake)

    def finish_turn(self, collector: Collector) -> list[str]:
        """Rank the continuations. Returns the held requests that are not needed any more.

        Raises:
            OctavoError: a beam failed in the engine.
        """
        if collector.failure is not None:
            raise collector.failure
        candidates = sorted(
            (
                Beam((*beam.tokens, token_id), beam.logprob + logprob, (*beam.rows, _choose(collector.rows[engine_id], rank)), engine_id)
                for engine_id, beam in self._turn.items()
                for rank, (token_id, logprob) in enumerate(
                    zip(collector.rows[engine_id].top_ids, collector.rows[engine_id].top_logprobs, strict=True)
                )
            ),
            key=lambda beam: -beam.logprob,
        )[: self._candidates]
        self._first_token_time = self._first_token_time or time.monotonic()
        width = self.params.beam_width
        length = len(candidates[0].tokens)
        at_limit = length >= self._max_tokens
        for beam in candidates[:width]:
            if beam.tokens[-1] in self._eos:
                self._done_beams.append(DoneBeam(beam, self._score(beam, length), "stop", beam.tokens[-1]))
            elif at_limit:
                self._done_beams.append(DoneBeam(beam, self._score(beam, length), "length", None))
        self._done_beams = sorted(self._done_beams, key=lambda done: -done.score)[:width]
        self._beams = [beam for beam in candidates if beam.tokens[-1] not in self._eos][:width]
        self.done = at_limit or not self._beams or self._hopeless(length)
        previous, self._held, self._turn = self._held, list(self._turn), {}
        return previous

    def open_requests(self) -> list[str]:
        """Engine ids of an unfinished turn, to abort."""
        return list(self._turn)

    def held_requests(self) -> list[str]:
        """Engine ids the engine may still hold, to release at the end."""
        return [*self._held, *self._turn]

    def results(self) -> list[DoneBeam]:
        """Best first."""
        return self._done_beams

    def finished_request(self, reason: str) -> FinishedRequest:
        """For metrics and logs, once the search has ended."""
        now, arrival = time.monotonic(), self._template.arrival_time
        return FinishedRequest(
            request_id=self.request_id,
            times=RequestTimes(queued=arrival, first_token=self._first_token_time, last_token=now),
            arrival_time=arrival,
            end_time=now,
            num_prompt_tokens=len(self.prompt_token_ids),
            num_cached_tokens=0,
            num_output_tokens=sum(len(done.beam.tokens) for done in self._done_beams),
            finish_reasons=tuple(done.finish_reason for done in self._done_beams) if reason == "stop" else (reason,),
            n=self.params.beam_width,
            max_tokens=self._max_tokens,
            token_gaps=(),
        )

    def _score(self, beam: Beam, length: int) -> float:
        return float(beam.logprob / length**self.params.length_penalty)

    def _hopeless(self, length: int) -> bool:
        if len(self._done_beams) < self.params.beam_width:
            return False
        return self._score(self._beams[0], length) <= self._done_beams[-1].score


def _choose(row: LogprobRow, rank: int) -> LogprobRow:
    """The same position, seen from the continuation that took its `rank`-th (from 0) token."""
    return LogprobRow(row.top_ids[rank], row.top_logprobs[rank], rank + 1, row.top_ids, row.top_logprobs)


def _visible(done: DoneBeam, params: BeamSearchParams) -> tuple[list[int], list[LogprobRow]]:
    """Tokens and rows to show: without the EOS that ended it unless asked for."""
    hide = done.finish_reason == "stop" and not params.include_stop_str_in_output
    end = len(done.beam.tokens) - (1 if hide else 0)
    return list(done.beam.tokens[:end]), list(done.beam.rows[:end])


def beam_search_output(search: BeamSearch, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """For `LLM.beam_search`: tokens and text with the prompt."""
    sequences = []
    for done in search.results():
        tokens, rows = _visible(done, search.params)
        whole = [*search.prompt_token_ids, *tokens]
        sequences.append(
            BeamSearchSequence(
                tokens=whole,
                cum_logprob=done.beam.logprob,
                text=None if tokenizer is None else tokenizer.decode(whole),
                finish_reason=done.finish_reason,
                stop_reason=done.stop_reason,
                logprobs=_logprobs(rows, tokenizer),
            )
        )
    return BeamSearchOutput(sequences)


def beam_request_output(search: BeamSearch, tokenizer: Tokenizer | None, n: int | None = None) -> RequestOutput:
    """For a server: the best `n` (default all) continuations as siblings, without the prompt."""
    outputs = []
    for index, done in enumerate(search.results()[:n]):
        tokens, rows = _visible(done, search.params)
        outputs.append(
            CompletionOutput(
                index=index,
                text="" if tokenizer is None else tokenizer.decode(tokens),
                token_ids=tokens,
                cumulative_logprob=done.beam.logprob,
                logprobs=_logprobs(rows, tokenizer),
                finish_reason=done.finish_reason,
                stop_reason=done.stop_reason,
            )
        )
    return RequestOutput(
        request_id=search.request_id,
        prompt=search.prompt,
        prompt_token_ids=search.prompt_token_ids,
        prompt_logprobs=None,
        outputs=outputs,
        finished=True,
    )


def _logprobs(rows: list[LogprobRow], tokenizer: Tokenizer | None) -> list[PositionLogprobs]:
    return [position_logprobs(row, tokenizer) for row in rows]
