"""A step that the device has no memory for is computed in parts; nobody notices but the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from octavo.protocol.params import SamplingParams
from octavo.protocol.step import StepResult
from octavo.worker.step_halves import halves
from octavo.worker.worker import Worker
from tests.support.step_plans import Plans, Row, slot_init
from tests.unit.worker.test_worker import Driver, prompt_of, small_config


def short_of_memory(worker: Worker, most_tokens: int) -> list[int]:
    """Make the model's forward pass fail above `most_tokens`; the sizes that got through are written to the returned list."""
    model: Any = worker._model
    forward: Callable[..., torch.Tensor] = model.forward
    sizes: list[int] = []

    def limited(token_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        if len(token_ids) > most_tokens:
            raise torch.OutOfMemoryError("no room")
        sizes.append(len(token_ids))
        return forward(token_ids, *args)

    model.forward = limited
    return sizes


def mixed_steps(worker: Worker) -> list[StepResult]:
    """Prompts of three requests, one with prompt logprobs, then decodes beside another chunk."""
    driver = Driver(worker)
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=None),
        SamplingParams(temperature=0.9, seed=1, prompt_logprobs=2, max_tokens=None),
        SamplingParams(temperature=0.0, logprobs=1, max_tokens=None),
    ]
    prompts = [prompt_of(i, n) for i, n in enumerate((3, 21, 6))]
    init = [slot_init(i, p, driver.blocks(len(p) + 4), sampling=sampling[i]) for i, p in enumerate(prompts)]
    first = driver.step([Row(0, 0, 3, True), Row(1, 0, 13, False)], init=init[:2])
    second = driver.step([Row(0, 3, 1, True), Row(1, 13, 8, True), Row(2, 0, 6, True)], init=init[2:])
    return [first, second, driver.step([Row(i, n, 1, True) for i, n in enumerate((4, 21, 6))])]


@pytest.mark.parametrize("most_tokens", [1, 2, 5, 9])
def test_a_step_without_room_is_computed_in_parts(most_tokens: int) -> None:
    expected = mixed_steps(Worker(small_config(), lambda *_: None))
    worker = Worker(small_config(), lambda *_: None)
    sizes = short_of_memory(worker, most_tokens)
    got = mixed_steps(worker)
    assert max(sizes) <= most_tokens
    assert len(sizes) > 3
    for one, other in zip(got, expected, strict=True):
        assert one.slots.tolist() == other.slots.tolist()
        assert one.tokens.tolist() == other.tokens.tolist()
        assert not one.errors
        assert {slot: len(rows) for slot, rows in (one.prompt_logprobs or {}).items()} == {
            slot: len(rows) for slot, rows in (other.prompt_logprobs or {}).items()
        }
        for slot, rows in (other.prompt_logprobs or {}).items():
            assert [r.token_id for r in (one.prompt_logprobs or {})[slot]] == [r.token_id for r in rows]
        assert (one.logprobs or {}).keys() == (other.logprobs or {}).keys()


def test_a_step_of_one_token_without_room_is_an_error() -> None:
    worker = Worker(small_config(), lambda *_: None)
    short_of_memory(worker, 0)
    with pytest.raises(torch.OutOfMemoryError):
        mixed_steps(worker)


def test_halves_are_the_whole() -> None:
    plans = Plans()
    for rows in (
        [Row(0, 5, 9, True)],
        [Row(0, 5, 9, False)],
        [Row(1, 7, 1, True), Row(0, 0, 40, True)],
        [Row(i, 3, 1, True) for i in range(5)],
    ):
        plan = plans(rows)
        first, second = halves(plan)
        assert first.num_tokens > 0
        assert second.num_tokens > 0
        assert first.num_tokens + second.num_tokens == plan.num_tokens

        def positions(step: Any) -> list[tuple[int, int]]:
            return [(int(s), int(a) + i) for s, a, c in zip(step.slots, step.start, step.count, strict=True) for i in range(int(c))]

        assert positions(first) + positions(second) == positions(plan)
        assert np.concatenate([first.slots[first.sample], second.slots[second.sample]]).tolist() == plan.slots[plan.sample].tolist()
        assert max(first.max_context, second.max_context) == plan.max_context
