"""Random paged batches: sequences with known K and V, laid out in a cache through permuted block tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.attention.base import StepBatch


def step_batch(starts: list[int], counts: list[int], tables: torch.Tensor, block_size: int) -> StepBatch:
    """The batch for rows that compute `counts` tokens from `starts`; decodes (count 1) must come first."""
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    blocks = tables[rows, positions // block_size].long()
    decodes = next((i for i, c in enumerate(counts) if c > 1), len(counts))
    return StepBatch(
        cpu_start=np.asarray(starts, np.int32),
        cpu_count=np.asarray(counts, np.int32),
        num_decodes=decodes,
        num_tokens=sum(counts),
        max_context=max(s + c for s, c in zip(starts, counts, strict=True)),
        token_ids=torch.zeros_like(positions),
        positions=positions,
        row_of_token=rows,
        block_tables=tables,
        cache_slots=blocks * block_size + positions % block_size,
        context_lens=torch.tensor([s + c for s, c in zip(starts, counts, strict=True)], dtype=torch.int32),
    )


@dataclass
class Pool:
    """Hands out physical blocks in random order; block 0 is the null block."""

    num_blocks: int
    block_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        order = torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(self.seed)) + 1
        self._free = order.tolist()

    def tables(self, contexts: list[int]) -> torch.Tensor:
        """[rows, max_blocks] int32, padded with the null block."""
        sizes = [-(-c // self.block_size) for c in contexts]
        tables = torch.zeros(len(contexts), max(sizes), dtype=torch.int32)
        for row, size in enumerate(sizes):
            tables[row, :size] = torch.tensor([self._free.pop() for _ in range(size)], dtype=torch.int32)
        return tables
