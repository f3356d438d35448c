"""A worker that returns tokens from a JSON script instead of running a model. For tests of everything around the model.

It keeps the worker's contract (slots, in-order collection, logprob rows, per-request errors), can be slow, and can fail in
every way an engine can: one request, one step, a hang, the process. It imports no torch, so a server over it starts at once.

The script (every field is optional)::

    {
      "default": [72, 105],            tokens of requests that no rule matches; then EOS
      "rules": [                       the first rule whose conditions all hold decides
        {
          "prompt_contains_ids": [5, 6],   a run of ids somewhere in the prompt
          "prompt_length": 12,             exact length of the prompt
          "index": 0,                      sibling index (n > 1)
          "tokens": [72, 105],             output i is tokens[i]; then EOS
          "cycle": false,                  start over after the last token instead of EOS
          "delay_ms": 20,                  each of its tokens takes this long
          "fail": {"at_output": 3, "how": "error"}
        }
      ],
      "step_delay_ms": 0,              every step takes this long
      "fail": {"at_step": 10, "how": "exit"}
    }

`how` is `error` (this request fails, the step goes on), `raise` (submit raises), `raise_collect` (collect raises), `hang`
(submit never returns) or `exit` (the process ends with status 13). A `once_file` in a `fail` makes it happen once: it is
skipped when that file exists, and creates it otherwise; so a restarted engine goes on.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from octavo.config.types import EngineConfig
from octavo.errors import ConfigError
from octavo.protocol.engine import EngineReady, LogprobRow, Phase
from octavo.protocol.params import SamplingParams
from octavo.protocol.step import CacheShape, Int32, SlotInit, StepPlan, StepResult, TokenMasks

EXIT_STATUS = 13
MAX_SCRIPTED_BLOCKS = 65536


class Failure(msgspec.Struct, forbid_unknown_fields=True):
    """When and how to fail. `at_output` counts a request's outputs from 0, `at_step` the worker's steps from 0."""

    how: Literal["error", "raise", "raise_collect", "hang", "exit"] = "error"
    at_output: int = 0
    at_step: int = 0
    once_file: str = ""
    message: str = "The script made this request fail."

    def due(self) -> bool:
        """Whether to fail now; a `once_file` failure is due a single time."""
        if not self.once_file:
            return True
        marker = Path(self.once_file)
        if marker.exists():
            return False
        marker.touch()
        return True


class Rule(msgspec.Struct, forbid_unknown_fields=True):
    """Which requests it is for, and what they get."""

    tokens: list[int] = []
    prompt_contains_ids: list[int] = []
    prompt_length: int | None = None
    index: int | None = None
    cycle: bool = False
    delay_ms: float = 0.0
    fail: Failure | None = None

    def matches(self, prompt: Int32, index: int) -> bool:
        if self.prompt_length is not None and self.prompt_length != len(prompt):
            return False
        if self.index is not None and self.index != index:
            return False
        run = self.prompt_contains_ids
        if not run:
            return True
        if len(prompt) < len(run):
            return False
        windows = np.lib.stride_tricks.sliding_window_view(prompt, len(run))
        return bool((windows == np.asarray(run)).all(axis=1).any())

    def token(self, output: int, eos: int) -> int:
        if output < len(self.tokens):
            return self.tokens[output]
        if self.cycle and self.tokens:
            return self.tokens[output % len(self.tokens)]
        return eos


class Script(msgspec.Struct, forbid_unknown_fields=True):
    """The whole JSON file."""

    default: list[int] = []
    rules: list[Rule] = []
    step_delay_ms: float = 0.0
    fail: Failure | None = None


def load_script(path: str) -> Script:
    """Read and check a script.

    Raises:
        ConfigError: unreadable, not JSON, or a field that does not exist.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Script)
    except OSError as e:
        raise ConfigError(f"debug_scripted_model={path!r} cannot be read: {e.strerror or e}.") from None
    except msgspec.MsgspecError as e:
        raise ConfigError(f"debug_scripted_model={path!r} is not a valid script: {e}.") from None


class _Seat(msgspec.Struct):
    """What the worker remembers of the request in a slot."""

    rule: Rule
    prompt: Int32
    sampling: SamplingParams
    eos: int


def _allowed(token: int, slot: int, masks: TokenMasks | None) -> int:
    """`token`, or the lowest token that the slot's mask allows instead."""
    rows = [] if masks is None else np.flatnonzero(masks.slots == slot).tolist()
    if masks is None or not rows:
        return token
    bits = np.unpackbits(masks.words[rows[0]].view(np.uint8), bitorder="little")
    if token < len(bits) and bits[token]:
        return token
    return int(np.flatnonzero(bits)[0]) if bits.any() else -1


class _Failed(msgspec.Struct):
    """A step whose collect raises."""

    message: str


class ScriptedWorker:
    """Same interface as `Worker`; see the module for the script."""

    def __init__(self, config: EngineConfig, progress: Callable[[str, int, int], None]) -> None:
        if config.reliability.scripted_model is None:
            raise ConfigError("The scripted worker needs debug_scripted_model: the path of its JSON script.")
        began = time.perf_counter()
        self._script = load_script(config.reliability.scripted_model)
        self._default = Rule(tokens=self._script.default)
        self._vocab_size = config.model.vocab_size
        self._seats: dict[int, _Seat] = {}
        self._results: deque[tuple[StepResult | _Failed, float]] = deque()
        self._steps = 0
        self._device_free_at = 0.0
        self._shape = self._cache_shape(config)
        progress("script", 1, 1)
        self._report = self._ready_report(config, time.perf_counter() - began)

    @property
    def cache_shape(self) -> CacheShape:
        return self._shape

    @property
    def ready_report(self) -> EngineReady:
        return self._report

    @property
    def tries(self) -> bool:
        return False

    def submit(self, plan: StepPlan) -> None:
        """Compute the step's result now; `collect` returns it when its scripted time is over."""
        step, self._steps = self._steps, self._steps + 1
        for slot in plan.free_slots.tolist():
            self._seats.pop(slot, None)
        for init in plan.init:
            self._seats[init.slot] = self._seat(init)

        result = StepResult(plan.step_id, plan.slots[plan.sample], np.zeros(int(plan.sample.sum()), np.int32))
        delay = self._script.step_delay_ms
        raise_at_collect = ""
        sampled = 0
        rows = zip(plan.slots.tolist(), plan.start.tolist(), plan.count.tolist(), plan.sample.tolist(), strict=True)
        for slot, start, count, sample in rows:
            seat = self._seats[slot]
            self._score_prompt(result, slot, seat, start, count)
            if not sample:
                continue
            output = start + count - len(seat.prompt)
            token = _allowed(seat.rule.token(output, seat.eos), slot, plan.masks)
            result.tokens[sampled] = token
            sampled += 1
            delay = max(delay, seat.rule.delay_ms)
            self._score_sampled(result, slot, seat, token)
            fail = seat.rule.fail
            if fail is not None and fail.at_output == output and fail.due():
                if fail.how == "error":
                    result.errors = (result.errors or {}) | {slot: fail.message}
                elif fail.how == "raise_collect":
                    raise_at_collect = fail.message
                else:
                    self._fail_now(fail)
        fail = self._script.fail
        if fail is not None and fail.at_step == step and fail.due():
            if fail.how in ("error", "raise_collect"):
                raise_at_collect = fail.message
            else:
                self._fail_now(fail)

        result.step_seconds = delay / 1e3
        self._device_free_at = max(self._device_free_at, time.monotonic()) + result.step_seconds
        self._results.append((_Failed(raise_at_collect) if raise_at_collect else result, self._device_free_at))

    def collect(self) -> StepResult:
        result, ready_at = self._results.popleft()
        if (wait := ready_at - time.monotonic()) > 0:
            time.sleep(wait)
        if isinstance(result, _Failed):
            raise RuntimeError(result.message)
        return result

    def prepare(self, *, idle: bool) -> bool:
        """There is nothing to prepare."""
        return False

    def shutdown(self) -> None:
        self._seats.clear()
        self._results.clear()

    def _seat(self, init: SlotInit) -> _Seat:
        prompt = init.token_ids[: init.num_prompt_tokens]
        rule = next((r for r in self._script.rules if r.matches(prompt, init.index)), self._default)
        return _Seat(rule, prompt, init.sampling, init.eos_token_ids[0] if init.eos_token_ids else 0)

    def _fail_now(self, fail: Failure) -> None:
        if fail.how == "exit":
            os._exit(EXIT_STATUS)
        while fail.how == "hang":
            time.sleep(3600)
        raise RuntimeError(fail.message)

    def _row(self, token: int, k: int, extra: list[int] | None) -> LogprobRow:
        """Made-up but consistent: the token is the most likely one, its successors in id order come next, 0.1 apart."""
        k = self._vocab_size if k == -1 else k
        top = [(token + i) % self._vocab_size for i in range(k)]
        top_logprobs = [-0.1 * (i + 1) for i in range(k)]
        for other in extra or ():
            if other not in top:
                top.append(other)
                top_logprobs.append(-0.1 * ((other - token) % self._vocab_size + 1))
        return LogprobRow(token, -0.1, 1, top, top_logprobs)

    def _score_sampled(self, result: StepResult, slot: int, seat: _Seat, token: int) -> None:
        sampling = seat.sampling
        if sampling.logprobs is None and sampling.logprob_token_ids is None:
            return
        result.logprobs = result.logprobs or {}
        result.logprobs[slot] = [self._row(token, sampling.logprobs or 0, sampling.logprob_token_ids)]

    def _score_prompt(self, result: StepResult, slot: int, seat: _Seat, start: int, count: int) -> None:
        k = seat.sampling.prompt_logprobs
        if k is None or start + 1 >= len(seat.prompt):
            return
        scored = seat.prompt[start + 1 : start + count + 1].tolist()
        result.prompt_logprobs = result.prompt_logprobs or {}
        result.prompt_logprobs[slot] = [self._row(token, k, None) for token in scored]

    @staticmethod
    def _cache_shape(config: EngineConfig) -> CacheShape:
        size = config.cache.block_size
        per_request = -(-config.model.max_model_len // size)
        blocks = config.cache.num_blocks_override
        if blocks is None:
            blocks = 1 + max(per_request, min(per_request * config.scheduler.max_num_seqs, MAX_SCRIPTED_BLOCKS))
        return CacheShape(num_blocks=blocks, block_size=size, bytes_per_block=1)

    def _ready_report(self, config: EngineConfig, seconds: float) -> EngineReady:
        return EngineReady(
            pid=os.getpid(),
            num_blocks=self._shape.num_blocks,
            block_size=self._shape.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.model.max_model_len,
            vocab_size=config.model.vocab_size,
            weights_bytes=0,
            cache_bytes=self._shape.num_blocks * self._shape.bytes_per_block,
            activation_bytes=0,
            total_bytes=config.device.total_bytes,
            other_bytes=0,
            device="scripted",
            dtype=config.model.dtype,
            kv_dtype=config.cache.dtype,
            attention="none",
            phases=[Phase("script", seconds)],
        )
