"""The device-side tables by slot: token ids and block tables. Fixed addresses, few transfers a step.

A request keeps its row from admission to end. The token table is the only place where the worker knows a request's tokens: the
core sends them once, sampled tokens are written there on the device, and the next step reads them there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from octavo.ops.transfer import upload_many
from octavo.protocol.step import Int32, StepPlan
from octavo.worker.leading_blocks import LeadingBlocks
from octavo.worker.table_shape import SLACK_TOKENS, table_width

Int64 = npt.NDArray[np.int64]


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
        if not plan.init:
            if len(plan.table_slots):
                row, place, block = upload_many([plan.table_slots, plan.table_index, plan.table_blocks], self.device)
                self.blocks[row, place] = block
            return
        slots = np.fromiter((init.slot for init in plan.init), np.int32, len(plan.init))
        tokens, blocks = [init.token_ids for init in plan.init], [init.block_ids for init in plan.init]
        # Where each number goes in its table, as if that were one row: half the launches of rows and columns.
        token_at = _places(slots, tokens, self.tokens.shape[1])
        block_at = _places(slots, blocks, self.blocks.shape[1])
        more_at = plan.table_slots.astype(np.int64) * self.blocks.shape[1] + plan.table_index
        whole = [np.concatenate(parts).view(np.int32) for parts in ([slots.astype(np.int64)], [token_at], [block_at, more_at])]
        rows, at_tokens, at_blocks, new_tokens, new_blocks = upload_many(
            [*whole, np.concatenate(tokens), np.concatenate([*blocks, plan.table_blocks])], self.device
        )
        self.tokens.view(-1).index_copy_(0, at_tokens.view(torch.int64), new_tokens)
        self.blocks.index_fill_(0, rows.view(torch.int64), 0)
        self.blocks.view(-1).index_copy_(0, at_blocks.view(torch.int64), new_blocks)

    def write_sampled(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Put sampled tokens where the next step reads them. All [rows], on the device."""
        self.tokens[slots, positions] = tokens.to(torch.int32)


def _places(slots: Int32, numbers: list[Int32], width: int) -> Int64:
    """Of all `numbers`, those of a slot at the beginning of its row of `width`."""
    sizes = np.fromiter(map(len, numbers), np.int64, len(numbers))
    begins = np.cumsum(sizes) - sizes
    return np.repeat(slots.astype(np.int64) * width - begins, sizes) + np.arange(int(sizes.sum()))
