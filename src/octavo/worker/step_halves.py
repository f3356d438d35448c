"""What becomes of a step that there is no memory for: two halves of it, and those again. No torch."""

from __future__ import annotations

import msgspec
import numpy as np

from octavo.config import address_space
from octavo.protocol.step import StepPlan, StepResult


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the system, or the device, gave no memory. torch has a class of its own for this on a GPU; on a CPU it has only words."""
    return type(error).__name__ == "OutOfMemoryError" or address_space.is_refusal(error)


def halves(plan: StepPlan) -> tuple[StepPlan, StepPlan]:
    """Two steps, one after the other, that do together what the rows of `plan` (of more than one token) do; its tables are set."""
    ends = np.cumsum(plan.count)
    if len(plan.slots) > 1:
        cut = min(max(1, int(np.searchsorted(ends, plan.num_tokens / 2))), len(plan.slots) - 1)
        return _rows(plan, slice(0, cut)), _rows(plan, slice(cut, None))
    count = plan.count // 2
    first = msgspec.structs.replace(_rows(plan, slice(0, 1)), count=count, sample=np.zeros(1, np.bool_), num_tokens=int(count[0]))
    first.max_context = int(plan.start[0] + count[0])
    rest = plan.count - count
    return first, msgspec.structs.replace(_rows(plan, slice(0, 1)), start=plan.start + count, count=rest, num_tokens=int(rest[0]))


def _rows(plan: StepPlan, rows: slice) -> StepPlan:
    start, count = plan.start[rows], plan.count[rows]
    return msgspec.structs.replace(
        plan,
        slots=plan.slots[rows],
        start=start,
        count=count,
        sample=plan.sample[rows],
        num_tokens=int(count.sum()),
        max_context=int((start + count).max()),
    )


def joined(first: StepResult, second: StepResult) -> StepResult:
    """The result of a step from those of its halves."""
    scored = dict(first.prompt_logprobs or {})
    for slot, rows in (second.prompt_logprobs or {}).items():
        scored[slot] = [*scored.get(slot, []), *rows]
    return StepResult(
        first.step_id,
        np.concatenate([first.slots, second.slots]),
        np.concatenate([first.tokens, second.tokens]),
        logprobs={**(first.logprobs or {}), **(second.logprobs or {})} or None,
        prompt_logprobs=scored or None,
        errors={**(second.errors or {}), **(first.errors or {})} or None,
    )
