"""Two kinds of cache under the scheduler: the first decides who runs, and what a window leaves behind goes a few blocks at a time."""

from __future__ import annotations

import pytest

from octavo.core.loop import EngineCore
from octavo.core.settle import PUBLISH_BLOCKS
from octavo.core.simulate import EOS_TOKEN, InstantExecutor, simulation_config
from octavo.protocol.engine import NewRequest
from octavo.protocol.params import SamplingParams

RUNNING = 24


def core_of(**windows: int) -> EngineCore:
    """As many long requests as there are slots, and a first kind that has room for all of them to their ends."""
    config = simulation_config(max_num_seqs=RUNNING, max_model_len=2048, max_num_batched_tokens=1024, inflight=1)
    core = EngineCore(config, InstantExecutor(config, RUNNING * 2048 // 16 + 1, **windows))
    for i in range(RUNNING):
        prompt = [3 + i, *range(100, 199)]
        core.add(NewRequest(str(i), prompt, SamplingParams(max_tokens=1900, ignore_eos=True, seed=i), 0.0, [EOS_TOKEN]))
    return core


def test_what_requests_need_in_the_end_is_asked_of_the_first_kind_alone() -> None:
    """The second has room for the windows of all, which is far less than their ends."""
    core = core_of(sliding_window=64)
    first, second = core.kv.kinds
    assert second.capacity < first.capacity / 2
    for _ in range(400):
        core.step()
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.preemptions) == (RUNNING, 0, 0)


@pytest.mark.parametrize(("window", "most"), [(32, 1), (128, 2), (1024, PUBLISH_BLOCKS)])
@pytest.mark.parametrize("kind", ["window", "sliding_window"])
def test_a_window_leaves_behind_no_more_than_a_share_of_itself(window: int, most: int, kind: str) -> None:
    core = core_of(**{kind: window})
    held = []
    for step in range(1600):
        core.step()
        if step > 1300:
            tables = core.kv.kinds[-1]
            held.append(int((tables.lengths - tables.first)[:RUNNING].max()))
    needed = window // 16 + 1  # it begins and ends inside a block
    assert needed < max(held) <= needed + 1 + most
    assert core.stats().preemptions == 0
