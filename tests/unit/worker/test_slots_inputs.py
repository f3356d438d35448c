"""Slot tables and input gathering against plain Python lists, over random histories of plans."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.worker.inputs import gather_inputs
from octavo.worker.slots import SlotTables
from octavo.worker.table_shape import table_bytes
from tests.support.step_plans import Plans, Row, slot_init

CPU = torch.device("cpu")
BLOCK, SLOTS, LENGTH = 4, 5, 40


@dataclass
class Request:
    """What a request should look like on the device."""

    tokens: list[int]
    blocks: list[int]
    done: int = 0
    prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_gathered_inputs_equal_plain_python(data: st.DataObject) -> None:
    tables, plans, live = SlotTables(SLOTS, LENGTH, BLOCK, CPU), Plans(), dict[int, Request]()
    next_block = iter(range(1, 10_000))
    for _ in range(data.draw(st.integers(1, 8))):
        free = [s for s in live if data.draw(st.integers(0, 4)) == 0]
        for slot in free:
            del live[slot]
        init, table, rows = [], [], []
        for slot in range(SLOTS):
            if slot not in live and data.draw(st.booleans()):
                tokens = data.draw(st.lists(st.integers(0, 999), min_size=1, max_size=20))
                held = data.draw(st.integers(0, -(-len(tokens) // BLOCK)))
                live[slot] = Request(tokens, [next(next_block) for _ in range(held)])
                init.append(slot_init(slot, tokens, live[slot].blocks))
        for slot, request in live.items():
            left = min(len(request.tokens), LENGTH - 1) - request.done
            if left <= 0 or data.draw(st.integers(0, 3)) == 0:
                continue
            count = data.draw(st.integers(1, left))
            while len(request.blocks) * BLOCK < request.done + count:
                request.blocks.append(next(next_block))
                table.append((slot, len(request.blocks) - 1, request.blocks[-1]))
            rows.append(Row(slot, request.done, count, request.done + count == len(request.tokens)))
        plan = plans(rows, init=init, free=free, table=table)
        tables.update(plan)
        if not rows:
            continue
        check(gather_inputs(plan, tables), plan, live)
        sampled = [(s, a + c) for s, a, c, w in zip(plan.slots, plan.start, plan.count, plan.sample, strict=True) if w]
        if sampled:
            tokens = [data.draw(st.integers(0, 999)) for _ in sampled]
            slots, positions = torch.tensor(np.asarray(sampled, np.int32).T)
            tables.write_sampled(slots, positions, torch.tensor(tokens))
            for (slot, _), token in zip(sampled, tokens, strict=True):
                live[slot].tokens.append(token)
        for row in rows:
            live[row.slot].done = row.start + row.count


def check(batch, plan, live):  # type: ignore[no-untyped-def]
    token_ids, positions, row_of_token, cache_slots = [], [], [], []
    for row, (slot, start, count) in enumerate(zip(plan.slots.tolist(), plan.start.tolist(), plan.count.tolist(), strict=True)):
        request = live[slot]
        for p in range(start, start + count):
            token_ids.append(request.tokens[p])
            positions.append(p)
            row_of_token.append(row)
            cache_slots.append(request.blocks[p // BLOCK] * BLOCK + p % BLOCK)
        expected = request.blocks + [0] * 99
        assert batch.block_tables[row].tolist() == expected[: batch.block_tables.shape[1]]
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert batch.row_of_token.tolist() == row_of_token
    assert batch.cache_slots.tolist() == cache_slots
    assert batch.context_lens.tolist() == (plan.start + plan.count).tolist()
    assert batch.block_tables.shape[1] == -(-plan.max_context // (4 * BLOCK)) * 4
    assert batch.num_decodes == sum(c == 1 for c in plan.count.tolist())
    assert {batch.token_ids.dtype, batch.positions.dtype, batch.row_of_token.dtype, batch.cache_slots.dtype} == {torch.int64}
    assert {batch.block_tables.dtype, batch.context_lens.dtype} == {torch.int32}


def test_a_slot_keeps_nothing_of_its_last_request() -> None:
    tables, plans = SlotTables(2, LENGTH, BLOCK, CPU), Plans()
    tables.update(plans([], init=[slot_init(1, range(30), range(1, 9))]))
    tables.update(plans([], init=[slot_init(1, [7, 8], [9])], free=[1]))
    assert tables.blocks[1].tolist() == [9] + [0] * (tables.blocks.shape[1] - 1)
    assert tables.tokens[1, :2].tolist() == [7, 8]


def test_tables_cost_what_they_say() -> None:
    tables = SlotTables(3, 100, 16, CPU)
    assert tables.tokens.nbytes + tables.blocks.nbytes == table_bytes(3, 100, 16)
