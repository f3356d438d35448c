"""Steps on a CPU by compiled code. No torch.

A step whose rows want a draw, masked or not, is one call: operation by operation it would cost more in calls than a small model's forward
pass does. Rows that want more have their logits adjusted and scored in between, on the host, by NumPy.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from octavo.attention.native_memory import NativeCacheMemory
from octavo.errors import NO_MEMORY
from octavo.ops.cpu.steps import Choice, CpuSteps, Float32, SlotMemory
from octavo.protocol.engine import LogprobRow
from octavo.protocol.step import Int32, StepPlan, StepResult, TokenMasks, Trial
from octavo.sampling.host_logprobs import score_row
from octavo.sampling.keys import row_keys
from octavo.sampling.on_host import ADJUSTING, adjust, only_stops
from octavo.sampling.state import Feature, SamplerState
from octavo.worker.diagnosis import NO_TOKEN
from octavo.worker.host_tables import HostTables
from octavo.worker.step_halves import halves, joined

if TYPE_CHECKING:
    from octavo.attention.native_cpu import NativeCpuAttention
    from octavo.models.compiled import CompiledDecoder
    from octavo.worker.slots import SlotTables

logger = logging.getLogger(__name__)

SLICE_ELEMENTS = 2**22
"""Prompts are scored in slices of about this many logits, which bounds the memory that this needs."""

_DRAW = int(Feature.RANDOM | Feature.FILTERS)
"""What the draw does. Plain numbers: an array keeps its dtype beside them, which an enumeration would widen."""
_LOGPROBS, _MASKED, _RANDOM = int(Feature.LOGPROBS), int(Feature.MASKED), int(Feature.RANDOM)
_PROCESSED = 4
"""The mode of rows whose logits shall be left as they were drawn from."""
_TRIED = 8
"""The mode of rows that are drawn before their mask is known."""


class NativeSteps:
    """Runs steps. Owns nothing: the tables, the cache and the weights belong to its parts.

    Args:
        processed_logprobs: report logprobs after all stages rather than of the model's own logits.
    """

    def __init__(
        self, steps: CpuSteps, memory: NativeCacheMemory, tables: HostTables, state: SamplerState, *, processed_logprobs: bool
    ) -> None:
        self._steps = steps
        self._memory = memory
        self._tables = tables
        self._state = state
        self._processed = processed_logprobs
        self.whole = 0
        """Steps so far that were one call."""
        self._least_refused = 2**31
        """Tokens of the smallest step so far that there was no memory for: a log line each time would be one a step."""

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step: it has run when this returns. Requests that there was no memory for, even a token at a time, have an error."""
        began = time.perf_counter()
        state = self._state
        state.leave(plan.free_slots)
        state.enter(plan.init)
        self._tables.seat(plan)
        if plan.forced is not None:
            self._tables.write_known(plan.forced)
        if len(plan.copy_src):
            self._memory.copy_blocks(plan.copy_src, plan.copy_dst)
        if plan.num_tokens:
            result = self._compute(plan)
        else:
            self._tables.extend(plan)
            result = StepResult(plan.step_id, plan.slots[plan.sample], np.zeros(0, np.int32))
        if (result.tokens < 0).any():
            result.errors = {**dict.fromkeys(result.slots[result.tokens < 0].tolist(), NO_TOKEN), **(result.errors or {})}
        result.step_seconds = time.perf_counter() - began
        return result

    def _compute(self, plan: StepPlan) -> StepResult:
        """A step of requests that are seated; in two halves, and those again, if the system has no memory for it at once."""
        try:
            return self._compute_at_once(plan)
        except MemoryError:
            pass  # not in here: the exception keeps alive what the failed attempt had
        self._steps.trim()
        if plan.num_tokens == 1:
            slots = plan.slots[plan.sample]
            return StepResult(plan.step_id, slots, np.full(len(slots), -1, np.int32), errors={int(plan.slots[0]): NO_MEMORY})
        if plan.num_tokens < self._least_refused:
            self._least_refused = plan.num_tokens
            logger.warning("The system gives no memory for a step of %d tokens: it is computed in two halves.", plan.num_tokens)
        first, second = halves(plan)
        return joined(self._compute(first), self._compute(second))

    def _compute_at_once(self, plan: StepPlan) -> StepResult:
        """Raises:
        MemoryError: the system gives none for it. The step, or any other, can be tried again.
        """
        state, slots = self._state, plan.slots[plan.sample]
        result = StepResult(plan.step_id, slots, np.zeros(0, np.int32))
        if self._has_parts(plan):
            self._run_in_parts(plan, slots, result)
        else:
            self.whole += 1
            result.tokens = self._steps.run(plan, self._choice(plan, slots, state.features[slots] & _DRAW))
        return result

    def _has_parts(self, plan: StepPlan) -> bool:
        """Whether rows want more than a draw under a mask that is known."""
        state = self._state
        if plan.trial is not None or state.wants_prompt_logprobs[plan.slots].any():
            return True
        return bool((state.features[plan.slots] & ~(_DRAW | _MASKED)).any())

    def _choice(self, plan: StepPlan, slots: Int32, modes: Int32) -> Choice:
        """How the sampled rows' tokens are chosen."""
        positions = (plan.start + plan.count)[plan.sample]
        return Choice(modes, self._keys(slots, positions, modes), plan.masks, _mask_rows(plan.masks, slots))

    def _keys(self, slots: Int32, positions: Int32, modes: Int32) -> Int32 | None:
        """[rows, 2] of the random numbers; None where no row draws."""
        if not (modes & _RANDOM).any():
            return None
        state = self._state
        return row_keys(state.seeds[slots], state.indices[slots], positions).astype(np.uint32).view(np.int32)

    def _try(self, trial: Trial, logits: Float32, slots: Int32, positions: Int32, choice: Choice) -> Int32:
        """Draw all rows, those of `trial` before their masks are known; and again, with its mask, each whose token may not come.

        Args:
            logits: [rows, vocab] adjusted, see `CpuSteps.choose`.
            choice: of the rows, as if none were tried.
        """
        modes, tried = choice.modes, np.isin(slots, trial.slots)
        tokens = self._steps.choose(logits, slots, replace(choice, modes=np.where(tried, modes & ~_PROCESSED | _TRIED, modes)))
        tokens[tried & (modes & _PROCESSED != 0)] = -1  # what it is drawn from must be left in the logits: the mask has to be in them
        masks = trial.refused(slots[tried], tokens[tried])
        if masks is None:
            return tokens
        places = np.flatnonzero(np.isin(slots, masks.slots)).astype(np.int32)
        own, modes = slots[places], choice.modes[places]
        again = Choice(modes, self._keys(own, positions[places], modes), masks, _mask_rows(masks, own))
        tokens[places] = self._steps.choose(logits, own, again, places)
        return tokens

    def _run_in_parts(self, plan: StepPlan, slots: Int32, result: StepResult) -> None:
        """A step with rows that want more of the sampler than a draw, into its result."""
        state = self._state
        scored = bool(state.wants_prompt_logprobs[plan.slots].any())
        logits, hidden = self._steps.run_to_logits(plan, len(slots), all_hidden=scored)
        if hidden is not None:
            self._score_prompts(plan, hidden, result)
        if not len(slots):
            return
        features, positions = state.features[slots], (plan.start + plan.count)[plan.sample]
        scoring: list[int] = np.flatnonzero(features & _LOGPROBS).tolist()
        raw = {} if self._processed else {row: logits[row].copy() for row in scoring}
        modes = features & _DRAW
        if self._processed:
            modes[scoring] |= _PROCESSED
        choice = self._choice(plan, slots, modes)
        words = {} if plan.masks is None else dict(zip(plan.masks.slots.tolist(), plan.masks.words, strict=True))
        for row in np.flatnonzero(features & ADJUSTING).tolist():
            slot = int(slots[row])
            record, stops = state.records[slot], state.records[slot].stop_ids
            must_end = slot in words and stops is not None and only_stops(words[slot], stops)
            tokens = self._tables.tokens[slot, : positions[row]]
            numbers, prompt = state.host_numbers[slot], int(state.prompt_lens[slot])
            adjust(logits[row], int(features[row]), record, numbers, tokens, prompt, must_end=must_end)
        if plan.trial is None:
            result.tokens = self._steps.choose(logits, slots, choice)
        else:
            result.tokens = self._try(plan.trial, logits, slots, positions, choice)
        self._tables.tokens[slots, positions] = np.maximum(result.tokens, 0)
        rows = [(row, int(slots[row]), int(result.tokens[row])) for row in scoring]
        scored_rows = {slot: [self._score(raw.get(row, logits[row]), slot, token)] for row, slot, token in rows if token >= 0}
        result.logprobs = scored_rows or None

    def _score(self, logits: Float32, slot: int, token: int) -> LogprobRow:
        record = self._state.records[slot]
        return score_row(logits, token, record.logprobs, record.logprob_token_ids)

    def _score_prompts(self, plan: StepPlan, hidden: Float32, result: StepResult) -> None:
        """Score prompt tokens for the rows that asked, a slice of positions at a time: logits are large."""
        state, found = self._state, dict[int, list[LogprobRow]]()
        begins = np.cumsum(plan.count) - plan.count
        for row in np.flatnonzero(state.wants_prompt_logprobs[plan.slots]):
            slot, start, begin = int(plan.slots[row]), int(plan.start[row]), int(begins[row])
            scorable = min(int(plan.count[row]), int(state.prompt_lens[slot]) - 1 - start)
            top = state.records[slot].prompt_logprobs or 0
            targets = self._tables.tokens[slot, start + 1 : start + 1 + max(0, scorable)].tolist()
            size, rows = max(1, SLICE_ELEMENTS // self._steps.vocab), list[LogprobRow]()
            for i in range(0, scorable, size):
                part = self._steps.logits(hidden[begin + i : begin + min(i + size, scorable)])
                rows += [score_row(logits, token, top) for logits, token in zip(part, targets[i : i + size], strict=True)]
            if rows:
                found[slot] = rows
            if any(np.isnan(one.logprob) for one in rows):
                result.errors = {**(result.errors or {}), slot: NO_TOKEN}
        result.prompt_logprobs = found or None


def _mask_rows(masks: TokenMasks | None, slots: Int32) -> Int32 | None:
    """[sampled rows] which of the masks holds for each, -1 for none."""
    if masks is None:
        return None
    places = {slot: i for i, slot in enumerate(masks.slots.tolist())}
    return np.asarray([places.get(slot, -1) for slot in slots.tolist()], np.int32)


def steps_over(
    model: CompiledDecoder, attention: NativeCpuAttention, tables: SlotTables, state: SamplerState, *, processed_logprobs: bool = False
) -> NativeSteps:
    """Steps over tables of tensors, which must outlive them as `attention` must."""
    host = HostTables(tables.tokens.numpy(), tables.blocks.numpy(), tables.first_column if len(tables.kinds) > 1 else 0)
    memory = SlotMemory(host.tokens, host.blocks, state.host_numbers, tables.block_size, host.sliding_column)
    return NativeSteps(model.steps(attention.caches, memory), attention.memory, host, state, processed_logprobs=processed_logprobs)
