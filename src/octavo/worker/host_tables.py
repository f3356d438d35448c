"""The slot tables in the host's memory, for compiled code: token ids and block tables. No torch.

`SlotTables` are the same for any device; on a CPU it can go on with the memory of these.
"""

from __future__ import annotations

import numpy as np

from octavo.protocol.step import KnownTokens, StepPlan
from octavo.worker.leading_blocks import LeadingBlocks
from octavo.worker.table_shape import SLACK_TOKENS, table_width


class HostTables:
    """Owns the token table and the block table of `num_slots` requests. Its invariant is that of `SlotTables`."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        width = max_model_len + SLACK_TOKENS
        self.tokens = np.zeros((num_slots, width), np.int32)
        """[slots, max_model_len + slack]"""
        self.blocks = np.zeros((num_slots, table_width(width, block_size)), np.int32)
        """[slots, max_blocks]; the null block 0 past the request's own."""
        self.leading = LeadingBlocks(num_slots, block_size)

    def update(self, plan: StepPlan) -> None:
        """Requests enter their slots, and running ones get further blocks."""
        for init in plan.init:
            self.tokens[init.slot, : len(init.token_ids)] = init.token_ids
            self.blocks[init.slot] = 0
            self.blocks[init.slot, : len(init.block_ids)] = init.block_ids
        if len(plan.table_slots):
            self.blocks[plan.table_slots, plan.table_index] = plan.table_blocks

    def write_known(self, known: KnownTokens) -> None:
        """Tokens that nobody sampled, where the next step reads them."""
        self.tokens[known.slots, known.positions] = known.tokens
