"""A sequence of steps with everything in it that whole-step programs must get right, for whatever runs steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.protocol.params import SamplingParams
from octavo.protocol.step import StepPlan, StepResult
from octavo.worker.runner import Runner, settle
from tests.support.step_plans import Plans, Row, slot_init

BLOCK, VOCAB, SLOTS, LENGTH, BLOCKS = 4, 150, 6, 64, 40
"""What the tables and cache must have."""


Run = Callable[[StepPlan], StepResult]


def by_operations(runner: Runner) -> Run:
    """Steps of a runner, waited for."""
    return lambda plan: settle(runner.launch(plan))


def play(run: Run) -> list[dict[int, int]]:
    """Three requests (greedy, random, filtered): prompts, decodes that need new blocks, one leaves, and logprobs for a while."""
    plans, results = Plans(), list[StepResult]()

    def step(rows: list[Row], **more: Any) -> None:
        results.append(run(plans(rows, **more)))

    sampling = [
        SamplingParams(temperature=0.0, max_tokens=None),
        SamplingParams(temperature=0.9, seed=5, max_tokens=None),
        SamplingParams(temperature=1.1, top_k=40, top_p=0.9, seed=6, max_tokens=None),
        SamplingParams(temperature=0.7, seed=7, logprobs=2, max_tokens=None),
    ]
    prompts = [np.random.default_rng(i).integers(0, VOCAB, n).tolist() for i, n in enumerate((5, 9, 3, 4))]
    tables = [[1 + 8 * i + j for j in range(8)] for i in range(4)] + [[33, 34, 35]]
    init = [slot_init(i, prompts[i], tables[i][: -(-len(prompts[i]) // BLOCK)], sampling=sampling[i]) for i in range(3)]
    step([Row(i, 0, len(prompts[i]), True) for i in range(3)], init=init)
    lengths = [len(p) for p in prompts]

    def new_block(slot: int) -> list[tuple[int, int, int]]:
        return [(slot, lengths[slot] // BLOCK, tables[slot][lengths[slot] // BLOCK])] if lengths[slot] % BLOCK == 0 else []

    def decode(slots: list[int], **more: Any) -> None:
        step([Row(s, lengths[s], 1, True) for s in slots], table=[diff for s in slots for diff in new_block(s)], **more)
        for s in slots:
            lengths[s] += 1

    for _ in range(3):
        decode([0, 1, 2])
    decode([0, 2], free=[1])
    extra = slot_init(4, prompts[3], tables[3][:1], sampling=sampling[3])
    step([Row(0, lengths[0], 1, True), Row(4, 0, 4, True)], init=[extra], table=[(0, lengths[0] // BLOCK, tables[0][lengths[0] // BLOCK])])
    lengths[0] += 1
    # A prompt in two chunks, the first of which yields no token, then one that is alone with its first chunk.
    more = slot_init(3, prompts[1], tables[1][:3], sampling=sampling[0])
    step([Row(2, lengths[2], 1, True), Row(3, 0, 5, False)], init=[more], table=new_block(2))
    lengths[2] += 1
    step([Row(3, 5, 4, True)])
    alone = slot_init(5, prompts[1], tables[4], sampling=sampling[1])
    step([Row(5, 0, 6, False)], init=[alone])
    step([Row(0, lengths[0], 1, True), Row(5, 6, 3, True)], table=new_block(0))
    lengths[0] += 1
    decode([0])
    return [dict(zip(r.slots.tolist(), r.tokens.tolist(), strict=True)) for r in results]
