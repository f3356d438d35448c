"""One step on one rank: update the tables, gather inputs, forward, sample, publish.

A step of plain decodes or of short prompts is one captured graph where the device has those (`worker/graphs.py`); any other is run
operation by operation. `launch` never waits for the device: it returns what will be the result, with the copies to the host under way. `settle` waits
for them and makes the `StepResult`. On a CPU the work is done when `launch` returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.attention.base import AttentionBackend
from octavo.models.decoder import Model
from octavo.ops.transfer import upload_many
from octavo.protocol.engine import LogprobRow
from octavo.protocol.step import Int32, StepPlan, StepResult, TokenMasks, Trial
from octavo.sampling.logprobs import LogprobTensors, score, to_rows
from octavo.sampling.sampler import SLICE_ELEMENTS, Sampled, Sampler
from octavo.sampling.state import SamplerState
from octavo.worker.diagnosis import NO_TOKEN
from octavo.worker.inputs import gather_inputs
from octavo.worker.slots import SlotTables
from octavo.worker.step_halves import halves, is_out_of_memory

if TYPE_CHECKING:
    from octavo.attention.kv_calibration import KvCalibration
    from octavo.worker.graphs import Captured, StepGraphs

logger = logging.getLogger(__name__)


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


class StepClock:
    """Times a step on its device: by events in the stream, or by the host's clock where the device is the host."""

    def __init__(self, device: torch.device) -> None:
        self._events = _event_pair() if device.type == "cuda" else None
        self._began = self._ended = 0.0
        if self._events is not None:
            self._events[0].record()
        else:
            self._began = time.perf_counter()

    def stop(self) -> None:
        if self._events is not None:
            self._events[1].record()
        else:
            self._ended = time.perf_counter()

    def wait(self) -> float:
        """Wait until the device has come past `stop`; the seconds since the clock was made."""
        if self._events is None:
            return self._ended - self._began
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


@dataclass(frozen=True)
class PromptScores:
    """Scores of consecutive prompt tokens of the request in `slot`."""

    slot: int
    scored: LogprobTensors
    top: int
    """How many alternatives the request asked for; -1 is all."""

    def rows(self) -> list[LogprobRow]:
        return to_rows(self.scored, [self.top] * len(self.scored.tokens))


@dataclass(frozen=True)
class Launched:
    """A step under way. Its tensors are on the host, and filled once `clock` has stopped."""

    step_id: int
    slots: Int32
    """[sampled rows]"""
    sampled: list[Sampled]
    """Of consecutive rows; together, all that were to be sampled."""
    prompt_scores: list[PromptScores]
    clock: StepClock


class Runner:
    """Runs steps. Owns nothing that outlives a step; the tables, the cache and the weights belong to its parts."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        tables: SlotTables,
        sampler_state: SamplerState,
        sampler: Sampler,
        graphs: StepGraphs | None = None,
        *,
        divisible: bool = True,
        calibration: KvCalibration | None = None,
    ) -> None:
        """
        Args:
            calibration: of the cache; while it runs, no step is captured.
            divisible: a step for which there is no memory may be computed in halves. Not where other ranks compute it too.
        """
        self._model = model
        self._attention = attention
        self._tables = tables
        self._state = sampler_state
        self._sampler = sampler
        self._graphs = graphs
        self._divisible = divisible
        self._calibration = calibration
        self._first_stage = model.stage is not None and not model.stage.receives

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Start a step.

        Raises:
            Exception: whatever the model raised. The tables hold what the plan said, and the next step can run.
        """
        clock = StepClock(self._tables.device)
        self._seat(plan)
        slots = plan.slots[plan.sample]
        captured = None if self._graphs is None or self._calibrates else self._graphs.fitting(plan)
        if self._graphs is not None and captured is not None:
            if plan.init:
                self._tables.update(plan)
            self._hear(plan)
            self._copy_blocks(plan)
            if self._model.makes_logits:
                sampled = self._replay(self._graphs, plan, captured, slots)
            else:
                sampled = []
                self._graphs.pass_on(plan, captured)
            clock.stop()
            return Launched(plan.step_id, slots, sampled, [], clock)
        self._tables.update(plan)
        self._hear(plan)
        self._copy_blocks(plan)
        sampled, prompt_scores = self._compute(plan) if plan.num_tokens else ([], [])
        clock.stop()
        return Launched(plan.step_id, slots, sampled, prompt_scores, clock)

    def _replay(self, graphs: StepGraphs, plan: StepPlan, captured: Captured, slots: Int32) -> list[Sampled]:
        """A step by captured graphs. The tables hold what the plan says of requests that enter.

        Args:
            slots: of the rows to be sampled.
        """
        if self._sampler.only_draws(slots):
            return [Sampled(graphs.launch(plan, captured), None, None, slots[:0], ())]
        positions = (plan.start + plan.count)[plan.sample]
        try:
            row_slots, row_positions = upload_many([slots, positions], self._tables.device)
            return [self._sample(graphs.compute(plan, captured).float(), slots, positions, row_slots, row_positions, plan.masks).to_host()]
        except RuntimeError as error:
            if not self._divisible or not is_out_of_memory(error):
                raise
        return self._compute(plan)[0]

    @property
    def _calibrates(self) -> bool:
        return self._calibration is not None and self._calibration.running

    def _seat(self, plan: StepPlan) -> None:
        self._state.leave(plan.free_slots)
        self._state.enter(plan.init)
        self._tables.leading.update(plan)
        if plan.forced is not None:
            known = plan.forced
            self._tables.write_sampled(*upload_many([known.slots, known.positions, known.tokens], self._tables.device))

    def _hear(self, plan: StepPlan) -> None:
        """Note the tokens that another stage has sampled. The last one knows them, and between the two nobody reads any."""
        if plan.told is not None and len(plan.told) and self._first_stage:
            rows = len(plan.told)
            self._tables.write_sampled(*upload_many([plan.slots[:rows], plan.start[:rows], plan.told], self._tables.device))

    def _copy_blocks(self, plan: StepPlan) -> None:
        if len(plan.copy_src):
            source, destination = upload_many([plan.copy_src, plan.copy_dst], self._tables.device)
            self._attention.copy_blocks(source, destination)

    def _compute(self, plan: StepPlan) -> tuple[list[Sampled], list[PromptScores]]:
        """Run a step whose tables are up to date; in two halves, and those again, if the device has no memory for it at once."""
        try:
            return self._compute_at_once(plan)
        except (RuntimeError, MemoryError) as error:
            if plan.num_tokens == 1 or not self._divisible or not is_out_of_memory(error):
                raise
        # Not in the handler: the exception keeps the tensors of the failed attempt alive.
        logger.warning("Out of device memory in a step of %d tokens: computing it in two halves.", plan.num_tokens)
        if self._tables.device.type == "cuda":
            torch.cuda.empty_cache()
        first, second = (self._compute(half) for half in halves(plan))
        return first[0] + second[0], first[1] + second[1]

    def _compute_at_once(self, plan: StepPlan) -> tuple[list[Sampled], list[PromptScores]]:
        slots, ends = plan.slots[plan.sample], np.cumsum(plan.count, dtype=np.int32)
        positions = (plan.start + plan.count)[plan.sample]
        last, row_slots, row_positions = upload_many([ends[plan.sample] - 1, slots, positions], self._tables.device)
        # Of a prompt, only the last token's hidden state is read, unless its tokens are to be scored.
        scored = bool(self._state.wants_prompt_logprobs[plan.slots].any())
        wanted = last if len(slots) < plan.num_tokens and not scored else None
        batch = gather_inputs(plan, self._tables, None if wanted is None else np.flatnonzero(plan.sample).astype(np.int32))
        attend = self._attention.plan(batch)
        with self._calibration.observing(plan.num_tokens) if self._calibration is not None and self._calibrates else nullcontext():
            hidden = self._model.forward(batch.token_ids, batch.positions, attend, wanted)
        if not self._model.makes_logits:
            return [], []
        prompt_scores = self._score_prompts(plan, hidden) if scored else []
        if not len(slots):
            return [], prompt_scores
        if scored:
            hidden = hidden.index_select(0, last)
        logits = self._model.compact_logits(hidden) if self._sampler.only_draws(slots) else self._model.logits(hidden)
        sampled = self._sample(logits, slots, positions, row_slots, row_positions, plan.masks, plan.trial)
        return [sampled.to_host()], prompt_scores

    def _sample(
        self,
        logits: torch.Tensor,
        slots: Int32,
        positions: Int32,
        row_slots: torch.Tensor,
        row_positions: torch.Tensor,
        masks: TokenMasks | None,
        trial: Trial | None = None,
    ) -> Sampled:
        """Sample, and write the tokens where the next step reads them.

        Args:
            logits: [sampled rows, vocab], see `Sampler.sample`.
            slots, positions: [sampled rows]; `row_slots` and `row_positions` are the same on the device.
            masks, trial: the plan's.
        """
        sampled = self._sampler.sample(logits, slots, positions, masks, trial)
        self._tables.write_sampled(row_slots, row_positions, sampled.tokens)
        return sampled

    def _score_prompts(self, plan: StepPlan, hidden: torch.Tensor) -> list[PromptScores]:
        """Score prompt tokens for the rows that asked, a slice of positions at a time: logits are large."""
        results = []
        begins = np.cumsum(plan.count) - plan.count
        size = max(1, SLICE_ELEMENTS // self._model.spec.vocab_size)
        for row in np.flatnonzero(self._state.wants_prompt_logprobs[plan.slots]):
            slot, start, begin = int(plan.slots[row]), int(plan.start[row]), int(begins[row])
            scorable = min(int(plan.count[row]), int(self._state.prompt_lens[slot]) - 1 - start)
            if scorable <= 0:
                continue
            top = self._state.records[slot].prompt_logprobs or 0
            targets = self._tables.tokens[slot, start + 1 : start + 1 + scorable].long()
            parts = [
                score(self._model.logits(hidden[begin + i : begin + min(i + size, scorable)]), targets[i : i + size], top)
                for i in range(0, scorable, size)
            ]
            results.append(PromptScores(slot, LogprobTensors.concatenate(parts).to_host(), top))
        return results


def settle(launched: Launched) -> StepResult:
    """Wait for a step and make its result."""
    seconds = launched.clock.wait()
    result = StepResult(launched.step_id, launched.slots, np.zeros(len(launched.slots), np.int32), step_seconds=seconds)
    broken: list[int] = []
    if launched.sampled:
        result.tokens = np.concatenate([part.tokens.numpy() for part in launched.sampled]).astype(np.int32)
        valid = np.concatenate([part.valid_rows() for part in launched.sampled])
        broken += launched.slots[~valid].tolist()
        scored: dict[int, list[LogprobRow]] = {}
        for part in launched.sampled:
            scored.update(part.logprob_rows() or {})
        result.logprobs = scored or None
    if launched.prompt_scores:
        result.prompt_logprobs = {}
        for scores in launched.prompt_scores:
            result.prompt_logprobs.setdefault(scores.slot, []).extend(scores.rows())
        broken += [s.slot for s in launched.prompt_scores if bool(s.scored.logprobs.isnan().any())]
    if broken:
        result.errors = dict.fromkeys(broken, NO_TOKEN)
    return result
