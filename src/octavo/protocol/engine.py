"""Messages between a frontend and an engine core. One way down (`NewRequest`, ...), one way up (`StepOutputs`).

The frontend owns the truth about a live request: it can send it again, with the tokens already seen, to a restarted engine,
and the stream goes on with the same tokens (sampling is a pure function of seed, sibling index and position).
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from octavo.protocol.params import PoolingParams, SamplingParams
from octavo.protocol.pooling import Pooled


class FinishReason(enum.IntEnum):
    """Why a sequence ended. Spelled `stop`, `length`, `abort`, `error` for users."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class NewRequest(msgspec.Struct, tag="new", array_like=False, omit_defaults=True):
    """Ask the core for `sampling.n` continuations of one prompt.

    Siblings get indices `index .. index + sampling.n - 1`. To resume after an engine restart the frontend sends one request a
    live sibling, with n=1, its `index` and the `output_token_ids` already delivered; the core goes on from there.

    `sampling` is fully resolved: `seed` and `max_tokens` are set, ids are inside the vocabulary, the prompt fits.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time: float
    """time.monotonic() of the frontend at arrival (same host), in seconds: TTFT and queue time count from here."""
    eos_token_ids: list[int] = []
    """Tokens that end the sequence unless ignore_eos; empty when the model has none."""
    index: int = 0
    output_token_ids: list[int] = []
    priority: int = 0
    """Lower runs first under the priority policy."""
    fair_key: str = ""
    """Whose share this request counts against under the fair policy."""
    extra_key: str = ""
    """Extra prefix-cache key material (cache salt, adapter id): requests share cache only when it is equal."""
    parent_id: str = ""
    """Fork from a held request: share its blocks copy-on-write as far as the token ids agree."""
    hold: bool = False
    """Keep this request's blocks after it ends, until `ReleaseHeld`, so that children can fork from it (beam search)."""
    pooling: PoolingParams | None = None
    """The prompt is to be pooled, by an engine that does that and nothing else; `sampling` then says nothing."""
    report_progress: bool = False
    """Say after every step how much of the prompt has been computed."""
    second_from: int = 0
    """Pooling: first token of the second text of a pair; 0: there is only one text."""


class Vocabulary(msgspec.Struct, tag="vocabulary"):
    """What tokens stand for: sent once to each engine, before the first request with a grammar."""

    tokens: list[bytes]
    """By id; empty for ids without text."""
    special: list[int]
    """Ids of control tokens: they are not text."""
    eos: list[int]
    """At least one."""
    tokenizer_json: str = ""
    """How text is split, as the `tokenizers` library writes it; empty when that is not known."""


class AbortRequests(msgspec.Struct, tag="abort"):
    """End requests (or, with `index`, one sibling of each). Unknown ids are ignored: they have ended already."""

    request_ids: list[str]
    index: int | None = None


class ReleaseHeld(msgspec.Struct, tag="release"):
    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    call_id: int = 0


class Ping(msgspec.Struct, tag="ping"):
    """Answered with `Pong` from the loop itself, so that an answer proves that the loop turns."""

    call_id: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    pass


ToEngine = NewRequest | Vocabulary | AbortRequests | ReleaseHeld | ResetPrefixCache | Ping | Shutdown


class LogprobRow(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position: the sampled (or prompt) token first, then the top-k, most likely first."""

    token_id: int
    logprob: float
    rank: int
    """1 = most likely."""
    top_ids: list[int]
    top_logprobs: list[float]


class TokenDelta(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one sequence. The last delta of a sequence carries `finish_reason`."""

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token id that ended it; None for EOS, length and stop strings (those are found by the frontend)."""
    logprobs: list[LogprobRow] | None = None
    prompt_logprobs: list[LogprobRow | None] | None = None
    """Complete, once, on the first delta: one entry a prompt token, the first None."""
    num_cached_tokens: int = -1
    """Prompt tokens served from the prefix cache; set on the first delta of a sequence, -1 on later ones."""
    error: str | None = None
    """Set with finish_reason ERROR: one sentence for the user."""
    times: RequestTimes | None = None
    """Set on the first delta, and again, complete, on the last."""
    pooled: Pooled | None = None
    """What a pooling request asked for, on its only delta."""
    prompt_progress: PromptProgress | None = None
    """On a delta without tokens, for a request that asked for it."""
    error_param: str | None = None
    """Set with `error` when a field of the request is to blame: its name."""


class PromptProgress(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """How far a prompt is. In tokens."""

    total: int
    cache: int
    """Those that the prefix cache had."""
    processed: int
    """Computed by now, those of the cache included."""
    time_ms: float
    """Since the first of them was scheduled."""


class RequestTimes(msgspec.Struct, array_like=True, gc=False):
    """Where a request's time went, monotonic seconds of the engine's host. 0.0 = never reached."""

    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    num_preemptions: int = 0


class EngineStats(msgspec.Struct):
    """A snapshot after a step; counters are totals since the engine started."""

    step: int = 0
    last_step_time: float = 0.0
    """time.monotonic() when the last step settled, for liveness."""
    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    """Blocks held by live sequences (evictable cached blocks do not count)."""
    kv_blocks_cached: int = 0
    kv_tokens_live: int = 0
    """Tokens stored in used blocks; 1 - tokens/(used*block_size) is the waste."""
    prefix_queries: int = 0
    prefix_hits: int = 0
    """Both in tokens."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    evictions: int = 0
    cow_copies: int = 0
    step_tokens: int = 0
    """Tokens in the last step."""
    rejected: int = 0
    replicas: int = 1
    """Engines that this is of, without those that are gone for good."""


class StepOutputs(msgspec.Struct, tag="outputs"):
    """Everything a core has to say after one turn of its loop."""

    deltas: list[TokenDelta]
    stats: EngineStats | None = None


class Pong(msgspec.Struct, tag="pong"):
    call_id: int
    stats: EngineStats
    result: bool = True


class Phase(msgspec.Struct):
    """One phase of start-up, for the timeline."""

    name: str
    seconds: float


class EngineReady(msgspec.Struct, tag="ready"):
    """Sent once, when the engine can take requests."""

    pid: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    weights_bytes: int
    cache_bytes: int
    activation_bytes: int
    total_bytes: int
    """Device (or host) memory in all."""
    other_bytes: int
    """In use by other processes when we started."""
    device: str
    dtype: str
    kv_dtype: str
    attention: str
    phases: list[Phase]
    warnings: list[str] = []
    weights_kinds: dict[str, int] = {}
    """Bytes of the weights by what they are stored as, in words."""
    embedding_size: int = 0
    """Numbers in an embedding; 0 for an engine that makes none."""
    sums: str = ""
    """How small sums over the GPUs of a layer go; empty where there is one, or none."""
    window: int | None = None
    """No layer sees more tokens than this, and the cache keeps no more of a request."""


class EngineFailed(msgspec.Struct, tag="failed"):
    """The engine cannot start, or has to end. `kind` is the class name of the OctavoError, "" for anything unexpected."""

    message: str
    kind: str = ""
    request_id: str = ""


class EngineProgress(msgspec.Struct, tag="progress"):
    """Loading progress, so that the process with the terminal can draw the bar."""

    phase: str
    done: int
    total: int


FromEngine = StepOutputs | Pong | EngineReady | EngineFailed | EngineProgress

Json = dict[str, Any]
