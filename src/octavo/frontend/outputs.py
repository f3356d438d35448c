"""What a generation returns. Field names are vLLM's, so that code written for it reads these objects as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.protocol.engine import PromptProgress, RequestTimes


@dataclass
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    rank: int | None = None
    """1 = most likely."""
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id -> logprob; the sampled (or prompt) token is always there."""


@dataclass
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    """stop, length, abort or error; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for EOS."""
    lora_request: Any = None
    routed_experts: Any = None
    kv_transfer_params: Mapping[str, Any] | None = None
    error: str | None = None
    """Why, when finish_reason is error."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """All continuations of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestTimes | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    prompt_progress: PromptProgress | None = None
    """How far the prompt is, for a request that asked for it; such an output may have nothing else."""


@dataclass
class BeamSearchSequence:
    tokens: list[int]
    """Prompt and continuation."""
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[PositionLogprobs] = field(default_factory=list)


@dataclass
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]
    """Best first."""

    def __iter__(self) -> Iterator[BeamSearchSequence]:
        return iter(self.sequences)


@dataclass(frozen=True)
class FinishedRequest:
    """One request that has ended, for metrics and the request log."""

    request_id: str
    times: RequestTimes
    """Monotonic seconds; times the engine never reached are 0.0."""
    arrival_time: float
    end_time: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    """All siblings together."""
    finish_reasons: tuple[str, ...]
    """One a sibling: stop, length, abort or error."""
    n: int
    max_tokens: int
    token_gaps: tuple[float, ...]
    """Seconds between consecutive deltas of a sequence (inter-token latency), all siblings together."""
    error: str | None = None
