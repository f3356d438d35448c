"""Steps on a CPU as one call into compiled code, wherever their rows want nothing of the sampler but a draw, masked or not.

The counterpart of `worker/graphs.py`: a step operation by operation costs more in calls than a small model's forward pass does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from octavo.ops.cpu.steps import CpuSteps, SlotMemory
from octavo.protocol.params import SamplingParams
from octavo.protocol.step import Int32, StepPlan
from octavo.sampling.keys import row_keys
from octavo.sampling.state import Feature, SamplerState, features_of

if TYPE_CHECKING:
    from octavo.attention.native_cpu import NativeCpuAttention
    from octavo.models.compiled import CompiledDecoder
    from octavo.worker.slots import SlotTables

_DRAW = int(Feature.RANDOM | Feature.FILTERS)
"""What the draw does. A plain number: an array keeps its dtype beside it, which an enumeration would widen."""


class Tables(Protocol):
    """The slot tables, wherever they are."""

    def update(self, plan: StepPlan) -> None: ...


class NativeSteps:
    """Runs steps. Owns nothing: the tables, the cache and the weights belong to its parts."""

    def __init__(self, steps: CpuSteps, tables: Tables, state: SamplerState) -> None:
        self._tables = tables
        self._state = state
        self._steps = steps

    @staticmethod
    def serves(params: SamplingParams) -> bool:
        """Whether a request's steps will fit."""
        return params.prompt_logprobs is None and not features_of(params) & ~(_DRAW | Feature.MASKED)

    def fits(self, plan: StepPlan) -> bool:
        """Whether all that the rows of a plan want is a draw, of all tokens or of those that their grammars allow."""
        state, slots = self._state, plan.slots
        special = (state.features[slots] & ~(_DRAW | Feature.MASKED)).any() or state.wants_prompt_logprobs[slots].any()
        return plan.num_tokens > 0 and not special

    def launch(self, plan: StepPlan) -> Int32:
        """Run a plan that fits; it has run when this returns.

        Returns:
            [sampled rows]: the tokens, which are also in their places in the token table; -1 where logits were not usable.
        """
        if plan.init:
            self._tables.update(plan)
        state, slots = self._state, plan.slots[plan.sample]
        modes, keys = state.features[slots] & _DRAW, None
        if (modes & Feature.RANDOM).any():
            positions = (plan.start + plan.count)[plan.sample]
            keys = row_keys(state.seeds[slots], state.indices[slots], positions).astype(np.uint32).view(np.int32)
        return self._steps.run(plan, modes, keys, _mask_rows(plan, slots))


def _mask_rows(plan: StepPlan, slots: Int32) -> Int32 | None:
    """[sampled rows] which mask of the plan holds for each, -1 for none."""
    if plan.masks is None:
        return None
    places = {slot: i for i, slot in enumerate(plan.masks.slots.tolist())}
    return np.asarray([places.get(slot, -1) for slot in slots.tolist()], np.int32)


def steps_of(model: CompiledDecoder, attention: NativeCpuAttention, tables: SlotTables, state: SamplerState) -> CpuSteps:
    """Steps over a runner's tables, which must outlive them as `attention` must."""
    second = tables.first_column if len(tables.kinds) > 1 else 0
    memory = SlotMemory(tables.tokens.numpy(), tables.blocks.numpy(), state.host_numbers, tables.block_size, second)
    return model.steps(attention, memory)
