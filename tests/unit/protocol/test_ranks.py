"""Plans survive the way to another process."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from octavo.protocol.params import SamplingParams
from octavo.protocol.ranks import PrepareNow, RankFailed, RankReady, RunStep, StopRank, decode_down, decode_up, encode
from octavo.protocol.step import KnownTokens, SlotInit, StepPlan, TokenMasks


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


PLAN = StepPlan(
    step_id=7,
    init=[SlotInit(1, array(5, 6, 7), 2, array(3), SamplingParams(seed=4, stop=["x"], logit_bias={3: 1.5}), 0, [0, 9])],
    free_slots=array(),
    slots=array(0, 1),
    start=array(12, 0),
    count=array(1, 3),
    sample=np.array([True, False]),
    table_slots=array(1),
    table_index=array(0),
    table_blocks=array(8),
    copy_src=array(2),
    copy_dst=array(4),
    num_tokens=4,
    max_context=13,
    masks=TokenMasks(array(0), np.array([[1, -2, 3]], np.int32)),
    forced=KnownTokens(array(0, 0), array(7, 8), array(40, 41)),
    told=array(11),
)


def test_a_plan_arrives_as_it_was() -> None:
    arrived = decode_down(encode(RunStep(PLAN)))
    assert isinstance(arrived, RunStep)
    same(PLAN, arrived.plan)
    arrived.plan.slots[0] = 3  # a rank's own


def same(a: object, b: object) -> None:
    if isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray)
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
        assert a.shape == b.shape
    elif isinstance(a, msgspec.Struct):
        assert type(a) is type(b)
        for name in a.__struct_fields__:
            same(getattr(a, name), getattr(b, name))
    elif isinstance(a, list):
        assert isinstance(b, list)
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other)
    else:
        assert a == b


@pytest.mark.parametrize("message", [PrepareNow(), StopRank()])
def test_the_other_messages_down(message: PrepareNow | StopRank) -> None:
    assert decode_down(encode(message)) == message


@pytest.mark.parametrize("message", [RankReady(), RankFailed("no memory", "ConfigError")])
def test_messages_up(message: RankReady | RankFailed) -> None:
    assert decode_up(encode(message)) == message
