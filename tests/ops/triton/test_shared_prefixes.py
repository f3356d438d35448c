"""The attention backend told which rows begin with the same blocks: the same result, captured or not, read together."""

from __future__ import annotations

import numpy as np
import torch

from octavo.attention.base import GraphShape, KindTables, LayerSpec, SharedPrefixes, StepBatch
from octavo.attention.triton import TritonAttention

BLOCK, SHARED, HEADS, KV_HEADS, DIM = 16, 512, 4, 1, 16
CONTEXTS = np.array([530, 300, 700, 601], np.int32)
"""Rows 0, 2 and 3 have their first blocks in common."""
TOLD = SharedPrefixes(np.array([1, 3, 0, 2], np.int32), np.array([0, 0, SHARED, SHARED], np.int32))


def backend_and_tables(device: torch.device, window: int | None = None) -> tuple[TritonAttention, torch.Tensor]:
    spec = LayerSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, sliding_window=window)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    needed = -(-CONTEXTS // BLOCK)
    attention = TritonAttention((spec,), int(needed.sum()) + 1, BLOCK, dtype, device)
    attention.cache.of(0).normal_()
    tables, used = torch.zeros(len(CONTEXTS), int(needed.max()) + 4, dtype=torch.int32), 1
    for row, blocks in enumerate(needed.tolist()):
        tables[row, :blocks] = torch.arange(used, used + blocks)
        used += blocks
    for row in (2, 3):
        tables[row, : SHARED // BLOCK] = tables[0, : SHARED // BLOCK]
    return attention, tables.to(device)


def attend(attention: TritonAttention, tables: torch.Tensor, shared: SharedPrefixes | None, *, captured: bool) -> torch.Tensor:
    device, start = tables.device, CONTEXTS - 1
    torch.manual_seed(1)
    q = torch.randn(len(CONTEXTS), HEADS, DIM, device=device).to(attention.cache.of(0).dtype)
    k, v = torch.randn(2, len(CONTEXTS), KV_HEADS, DIM, device=device).to(q.dtype)
    last = torch.from_numpy(start).to(device).long()
    slots = tables.gather(1, last[:, None] // BLOCK)[:, 0].long() * BLOCK + last % BLOCK
    if captured:
        shape = GraphShape(8, 8)
        plan = np.full(attention.graph_plan_size(shape), -7, np.int32)
        attention.graph_plan(start, np.ones_like(start), shape, plan, shared)
        padded = torch.zeros(8, tables.shape[1], dtype=torch.int32, device=device)
        padded[: len(CONTEXTS)] = tables
        return attention.graph_attend(torch.from_numpy(plan).to(device), shape, [KindTables(padded, slots)])(0, q, k, v)
    count = np.ones_like(start)
    ids = torch.zeros_like(last)
    step = StepBatch(start, count, len(start), len(start), 700, ids, last, ids, tables, slots, last.int() + 1, shared=shared)
    return attention.plan(step)(0, q, k, v)


def test_told_or_not_captured_or_not_the_result_is_the_same(device: torch.device) -> None:
    attention, tables = backend_and_tables(device)
    alone = attend(attention, tables, None, captured=False)
    for captured in (False, True):
        together = attend(attention, tables, TOLD, captured=captured)
        assert not torch.equal(together, alone), "read together, sums are rounded in another order"
        assert float((together - alone).norm() / alone.norm()) < 8e-3


def test_layers_with_a_window_do_not_read_together(device: torch.device) -> None:
    attention, tables = backend_and_tables(device, window=100)
    assert torch.equal(attend(attention, tables, TOLD, captured=True), attend(attention, tables, None, captured=True))
