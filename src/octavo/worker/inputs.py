"""Gathers a step's inputs from the slot tables, on the device, by index arithmetic: no loop over rows, no wait."""

from __future__ import annotations

import numpy as np
import torch

from octavo.attention.base import KindTables, StepBatch
from octavo.ops.transfer import upload_many
from octavo.protocol.step import Int32, StepPlan
from octavo.worker.slots import SlotTables


def gather_inputs(plan: StepPlan, tables: SlotTables, wanted: Int32 | None = None) -> StepBatch:
    """The batch of a plan with at least one row. `tables` must have been updated with the plan.

    Args:
        wanted: see `StepBatch.cpu_wanted`.
    """
    count = plan.count
    ends = np.cumsum(count, dtype=np.int32)
    many = np.flatnonzero(count > 1)
    num_decodes = int(many[0]) if len(many) else len(count)
    slots, start, counts, begins = upload_many([plan.slots, plan.start, count, ends - count], tables.device)

    num_blocks = -(-plan.max_context // (4 * tables.block_size)) * 4  # rows of a slice stay at multiples of 16 bytes
    token = torch.arange(plan.num_tokens, device=tables.device)
    if num_decodes == len(count):
        row_of_token, positions = token, start.long()
    else:
        row_of_token = torch.repeat_interleave(counts.long(), output_size=plan.num_tokens)
        positions = token - (begins - start).long().index_select(0, row_of_token)
    kinds = []
    for columns in tables.kinds:
        block_tables = columns[:, :num_blocks].index_select(0, slots)
        blocks = block_tables[row_of_token, positions // tables.block_size].long()
        kinds.append(KindTables(block_tables, blocks * tables.block_size + positions % tables.block_size))
    return StepBatch(
        cpu_start=plan.start,
        cpu_count=count,
        num_decodes=num_decodes,
        num_tokens=plan.num_tokens,
        max_context=plan.max_context,
        token_ids=tables.tokens[slots.index_select(0, row_of_token), positions].long(),
        positions=positions,
        row_of_token=row_of_token,
        block_tables=kinds[0].block_tables,
        cache_slots=kinds[0].cache_slots,
        context_lens=start + counts,
        shared=tables.leading.shared(plan.slots[:num_decodes]),
        cpu_wanted=wanted,
        sliding=kinds[1] if len(kinds) > 1 else None,
    )
