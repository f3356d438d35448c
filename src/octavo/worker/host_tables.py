"""The slot tables in the host's memory, for compiled code: token ids and block tables. No torch."""

from __future__ import annotations

import numpy as np

from octavo.protocol.step import Int32, KnownTokens, StepPlan
from octavo.worker.table_shape import SLACK_TOKENS, table_width


class HostTables:
    """The token table and the block table of some slots. Its invariant is that of `SlotTables`.

    Args:
        tokens: [slots, max_model_len + slack]
        blocks: [slots, max_blocks], or twice as many, of two kinds of cache; the null block 0 past the request's own.
        sliding_column: where in a row of blocks the second kind's begin; 0: there is none.
    """

    def __init__(self, tokens: Int32, blocks: Int32, sliding_column: int) -> None:
        self.tokens = tokens
        self.blocks = blocks
        self.sliding_column = sliding_column

    @classmethod
    def empty(cls, num_slots: int, max_model_len: int, block_size: int, *, two_kinds: bool) -> HostTables:
        width = max_model_len + SLACK_TOKENS
        column = table_width(width, block_size)
        blocks = np.zeros((num_slots, column * (1 + two_kinds)), np.int32)
        return cls(np.zeros((num_slots, width), np.int32), blocks, column if two_kinds else 0)

    def seat(self, plan: StepPlan) -> None:
        """Requests enter their slots."""
        for init in plan.init:
            self.tokens[init.slot, : len(init.token_ids)] = init.token_ids
            self.blocks[init.slot] = 0
            self.blocks[init.slot, : len(init.block_ids)] = init.block_ids

    def extend(self, plan: StepPlan) -> None:
        """Requests get further blocks; steps of compiled code do this themselves."""
        self.blocks[plan.table_slots, plan.table_index] = plan.table_blocks

    def write_known(self, known: KnownTokens) -> None:
        """Tokens that nobody sampled, where the next step reads them."""
        self.tokens[known.slots, known.positions] = known.tokens
