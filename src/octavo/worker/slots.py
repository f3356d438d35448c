"""The device-side tables by slot: token ids and block tables. Fixed addresses, few transfers a step.

A request keeps its row from admission to end. The token table is the only place where the worker knows a request's tokens: the
core sends them once, sampled tokens are written there on the device, and the next step reads them there.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.ops.transfer import upload, upload_many
from octavo.protocol.step import Int32, StepPlan
from octavo.worker.leading_blocks import LeadingBlocks
from octavo.worker.table_shape import SLACK_TOKENS, table_width


class SlotTables:
    """Owns the token table and the block table of `num_slots` requests.

    Invariant: after `update(plan)`, and the sampled tokens of all earlier steps written, every token and block that `plan` refers
    to is in its slot's row.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        *,
        two_kinds: bool = False,
    ) -> None:
        self.device = device
        self.block_size = block_size
        self.num_slots = num_slots
        width = max_model_len + SLACK_TOKENS
        self.tokens = torch.zeros(num_slots, width, dtype=torch.int32, device=device)
        """[slots, max_model_len + slack]"""
        self.first_column = table_width(width, block_size)
        """Of the second kind of cache, if there is one."""
        self.blocks = torch.zeros(num_slots, self.first_column * (1 + two_kinds), dtype=torch.int32, device=device)
        """[slots, max_blocks, or twice as many]; the null block 0 past the request's own."""
        self.kinds = tuple(self.blocks[:, i * self.first_column : (i + 1) * self.first_column] for i in range(1 + two_kinds))
        """Views of it, [slots, max_blocks]: the table of each kind of cache."""
        self.leading = LeadingBlocks(num_slots, block_size)

    def update(self, plan: StepPlan) -> None:
        """Requests enter their slots, and running ones get further blocks. One transfer for all of it."""
        rows, places, values = [plan.table_slots], [plan.table_index], [plan.table_blocks]
        if plan.init:
            self._write_tokens(plan)
            self.blocks.index_fill_(0, upload(np.fromiter((i.slot for i in plan.init), np.int64), self.device), 0)
            for init in plan.init:
                size = len(init.block_ids)
                rows.insert(0, np.full(size, init.slot, np.int32))
                places.insert(0, np.arange(size, dtype=np.int32))
                values.insert(0, init.block_ids)
        row = np.concatenate(rows)
        if len(row):
            on_device = upload_many([row, np.concatenate(places), np.concatenate(values)], self.device)
            self.blocks[on_device[0], on_device[1]] = on_device[2]

    def _write_tokens(self, plan: StepPlan) -> None:
        row = np.repeat(
            np.fromiter((init.slot for init in plan.init), np.int32), np.fromiter((len(init.token_ids) for init in plan.init), np.int64)
        )
        place: Int32 = np.concatenate([np.arange(len(init.token_ids), dtype=np.int32) for init in plan.init])
        token = np.concatenate([init.token_ids for init in plan.init])
        on_device = upload_many([row, place, token], self.device)
        self.tokens[on_device[0], on_device[1]] = on_device[2]

    def write_sampled(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Put sampled tokens where the next step reads them. All [rows], on the device."""
        self.tokens[slots, positions] = tokens.to(torch.int32)
