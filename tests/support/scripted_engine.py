"""A stand-in for the engine core, for tests of what is around it. Runs in the engine process or in the test's own.

Its tokens are a pure function of (prompt, seed, sibling, position), like a real engine's, so that a test can tell any token
twice, missing or out of order. Magic ids in a prompt make it misbehave.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.config.types import EngineConfig
from octavo.errors import CheckpointError
from octavo.protocol.engine import (
    AbortRequests,
    EngineReady,
    EngineStats,
    FinishReason,
    LogprobRow,
    NewRequest,
    Phase,
    ReleaseHeld,
    RequestTimes,
    StepOutputs,
    TokenDelta,
)

POISON = 900
"""The engine process dies when it first computes a prompt with this id."""
POISON_AT_3 = 901
"""The same, when it is about to make output 3."""
HANG = 902
"""The engine hangs on such a prompt."""
FAIL = 903
"""Such a request fails after two tokens, alone."""
SLOW = 904
"""Steps with such a request in them take 20 ms."""
STUCK = 905
"""Such a request waits for ever (other work goes on)."""

STEP_SECONDS = 0.001


def token_at(prompt: list[int], seed: int, index: int, position: int, vocab_size: int) -> int:
    """Output `position` of sibling `index`."""
    return (sum(prompt) * 31 + (seed % 1009) * 17 + index * 7 + position * 13 + position * position) % min(vocab_size, 256)


@dataclass
class _Sequence:
    request: NewRequest
    index: int
    outputs: list[int]
    first: bool = True


@dataclass
class ScriptedCore:
    """The interface of EngineCore."""

    config: EngineConfig
    sequences: list[_Sequence] = field(default_factory=list)
    ending: deque[TokenDelta] = field(default_factory=deque)
    held: set[str] = field(default_factory=set)
    released: list[str] = field(default_factory=list)
    steps: int = 0
    last_step_time: float = 0.0
    closed: bool = False

    def add(self, request: NewRequest) -> None:
        for index in range(request.index, request.index + request.sampling.n):
            self.sequences.append(_Sequence(request, index, list(request.output_token_ids)))

    def abort(self, message: AbortRequests) -> None:
        for sequence in list(self.sequences):
            if sequence.request.request_id in message.request_ids and message.index in (None, sequence.index):
                self.sequences.remove(sequence)
                self.ending.append(TokenDelta(sequence.request.request_id, sequence.index, [], FinishReason.ABORT, times=RequestTimes()))

    def release(self, message: ReleaseHeld) -> None:
        self.released += message.request_ids
        self.held -= set(message.request_ids)

    def reset_prefix_cache(self) -> bool:
        return not self.sequences

    def prepare(self) -> bool:
        return False

    def has_work(self) -> bool:
        return bool(self.sequences or self.ending)

    def step(self) -> StepOutputs:
        deltas = list(self.ending)
        self.ending.clear()
        time.sleep(0.02 if any(SLOW in s.request.prompt_token_ids for s in self.sequences) else STEP_SECONDS)
        running = [s for s in self.sequences if STUCK not in s.request.prompt_token_ids][: self.config.scheduler.max_num_seqs]
        for sequence in running:
            deltas.append(self._advance(sequence))
        if running:
            self.steps += 1
            self.last_step_time = time.monotonic()
        return StepOutputs(deltas, self.stats())

    def stats(self) -> EngineStats:
        return EngineStats(step=self.steps, last_step_time=self.last_step_time, running=len(self.sequences))

    def shutdown(self) -> None:
        self.closed = True

    def _advance(self, sequence: _Sequence) -> TokenDelta:
        request, sampling = sequence.request, sequence.request.sampling
        prompt, position = request.prompt_token_ids, len(sequence.outputs)
        if POISON in prompt or (POISON_AT_3 in prompt and position >= 3):
            os._exit(66)
        while HANG in prompt:
            time.sleep(60)
        if FAIL in prompt and position >= 2:
            self.sequences.remove(sequence)
            return TokenDelta(request.request_id, sequence.index, [], FinishReason.ERROR, error="NaN in the logits.")
        token = token_at(prompt, sampling.seed or 0, sequence.index, position, self.config.model.vocab_size)
        sequence.outputs.append(token)
        delta = TokenDelta(request.request_id, sequence.index, [token])
        if sampling.logprobs is not None:
            delta.logprobs = [self._row(token, sampling.logprobs)]
        if sequence.first:
            sequence.first = False
            delta.num_cached_tokens = 0
            if sampling.prompt_logprobs is not None and sequence.index == 0:
                k = sampling.prompt_logprobs
                delta.prompt_logprobs = [None, *(self._row(t, k) for t in prompt[1:])]
        if len(sequence.outputs) >= (sampling.max_tokens or 0):
            delta.finish_reason = FinishReason.LENGTH
        elif token in request.eos_token_ids and not sampling.ignore_eos:
            delta.finish_reason = FinishReason.STOP
        elif token in (sampling.stop_token_ids or ()):
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, token
        if delta.finish_reason is not None:
            self.sequences.remove(sequence)
            delta.times = RequestTimes(queued=request.arrival_time, scheduled=request.arrival_time, last_token=time.monotonic())
            if request.hold:
                self.held.add(request.request_id)
        return delta

    def _row(self, token: int, k: int) -> LogprobRow:
        top = [(token + i) % self.config.model.vocab_size for i in range(k)]
        return LogprobRow(token, -0.5, 1, top, [-0.5 - 0.25 * i for i in range(k)])


def build(config: EngineConfig, progress: Callable[[str, int, int], None], *rest: object) -> tuple[ScriptedCore, EngineReady]:
    """Like `octavo.engine.build.build_engine`."""
    for done in range(3):
        progress("weights", done, 2)
    limit = config.model.max_model_len // 2 if config.model.auto_max_model_len else config.model.max_model_len
    ready = EngineReady(
        pid=os.getpid(),
        num_blocks=100,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=limit,
        vocab_size=config.model.vocab_size,
        weights_bytes=1,
        cache_bytes=1,
        activation_bytes=1,
        total_bytes=1,
        other_bytes=0,
        device="scripted",
        dtype=config.model.dtype,
        kv_dtype=config.cache.dtype,
        attention="none",
        phases=[Phase("weights", 0.0)],
    )
    return ScriptedCore(config), ready


def build_refuses(config: EngineConfig, progress: Callable[[str, int, int], None], *rest: object) -> tuple[ScriptedCore, EngineReady]:
    """Cannot start, and says why."""
    raise CheckpointError("model.safetensors is truncated: tensor lm_head.weight ends past the end of the file.")


def build_raises(config: EngineConfig, progress: Callable[[str, int, int], None], *rest: object) -> tuple[ScriptedCore, EngineReady]:
    raise RuntimeError("boom")


def build_dies(config: EngineConfig, progress: Callable[[str, int, int], None], *rest: object) -> tuple[ScriptedCore, EngineReady]:
    os._exit(77)


def build_once(config: EngineConfig, progress: Callable[[str, int, int], None], *rest: object) -> tuple[ScriptedCore, EngineReady]:
    """Starts the first time only: OCTAVO_TEST_MARKER names a file that it leaves behind."""
    _once(lambda: os._exit(78))
    return build(config, progress)


def build_once_then_refuses(
    config: EngineConfig, progress: Callable[[str, int, int], None], *rest: object
) -> tuple[ScriptedCore, EngineReady]:
    """The same, and says why not in a sentence."""
    _once(lambda: build_refuses(config, progress))
    return build(config, progress)


def _once(otherwise: Callable[[], object]) -> None:
    marker = os.environ["OCTAVO_TEST_MARKER"]
    if os.path.exists(marker):
        otherwise()
    with open(marker, "w"):
        pass
