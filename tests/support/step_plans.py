"""Builds `StepPlan`s by hand, so that a worker can be driven without a core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.protocol.params import SamplingParams
from octavo.protocol.step import SlotInit, StepPlan


@dataclass
class Row:
    """Tokens `start .. start + count - 1` of the request in `slot`."""

    slot: int
    start: int
    count: int
    sample: bool


def slot_init(
    slot: int,
    tokens: Sequence[int],
    blocks: Sequence[int],
    *,
    sampling: SamplingParams | None = None,
    num_prompt: int | None = None,
    index: int = 0,
    eos: Sequence[int] = (0,),
) -> SlotInit:
    sampling = sampling or SamplingParams(temperature=0.0, max_tokens=None)
    if sampling.seed is None:
        sampling.seed = 0
    return SlotInit(
        slot=slot,
        token_ids=np.asarray(tokens, np.int32),
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        block_ids=np.asarray(blocks, np.int32),
        sampling=sampling,
        index=index,
        eos_token_ids=list(eos),
    )


@dataclass
class Plans:
    """Numbers the steps."""

    next_id: int = field(default=0)

    def __call__(
        self,
        rows: Sequence[Row],
        *,
        init: Sequence[SlotInit] = (),
        free: Sequence[int] = (),
        table: Sequence[tuple[int, int, int]] = (),
        copies: Sequence[tuple[int, int]] = (),
    ) -> StepPlan:
        """`table` holds (slot, index, block) diffs, `copies` (source, destination) blocks."""
        rows = sorted(rows, key=lambda r: r.count > 1)
        columns = np.asarray(table, np.int32).reshape(-1, 3)
        pairs = np.asarray(copies, np.int32).reshape(-1, 2)
        step_id, self.next_id = self.next_id, self.next_id + 1
        return StepPlan(
            step_id=step_id,
            init=list(init),
            free_slots=np.asarray(free, np.int32),
            slots=np.asarray([r.slot for r in rows], np.int32),
            start=np.asarray([r.start for r in rows], np.int32),
            count=np.asarray([r.count for r in rows], np.int32),
            sample=np.asarray([r.sample for r in rows], np.bool_),
            table_slots=columns[:, 0],
            table_index=columns[:, 1],
            table_blocks=columns[:, 2],
            copy_src=pairs[:, 0],
            copy_dst=pairs[:, 1],
            num_tokens=sum(r.count for r in rows),
            max_context=max((r.start + r.count for r in rows), default=0),
        )
