"""The core of a model that pools: batching, order, aborts, and failures that stay with their request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from octavo.config.types import EngineConfig
from octavo.core.pooling import PoolingCore
from octavo.protocol.engine import AbortRequests, FinishReason, NewRequest, TokenDelta
from octavo.protocol.params import PoolingParams, SamplingParams
from octavo.protocol.pooling import Pooled, PoolRow
from tests.support.tiny_models import config_for

HF = {"architectures": ["BertModel"], "vocab_size": 100}


class FakeRank:
    """Counts tokens. A prompt with the token 13 raises; 14 is an error of its own."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def pool(self, rows: Sequence[PoolRow]) -> list[Pooled | str]:
        self.batches.append([len(row.token_ids) for row in rows])
        if any(13 in row.token_ids for row in rows):
            raise RuntimeError("unlucky")
        return ["no" if 14 in row.token_ids else Pooled(bytes([len(row.token_ids)]), [1]) for row in rows]

    def shutdown(self) -> None:
        self.batches.clear()


def make(policy: str = "fcfs", budget: int = 10, seqs: int = 4) -> tuple[PoolingCore, FakeRank]:
    config: EngineConfig = config_for("nowhere", hf_config=HF)
    scheduler = replace(config.scheduler, max_num_batched_tokens=budget, max_num_seqs=seqs, policy=policy)  # type: ignore[arg-type]
    rank = FakeRank()
    return PoolingCore(replace(config, scheduler=scheduler), rank), rank  # type: ignore[arg-type]


def request(name: str, tokens: list[int], priority: int = 0, *, pooling: bool = True) -> NewRequest:
    params = PoolingParams() if pooling else None
    return NewRequest(name, tokens, SamplingParams(max_tokens=1, seed=0), time.monotonic(), priority=priority, pooling=params)


def drain(core: PoolingCore) -> list[TokenDelta]:
    deltas = []
    while core.has_work():
        deltas += core.step().deltas
    return deltas


def test_batches_fill_the_token_budget_in_order_of_arrival() -> None:
    core, rank = make(budget=10, seqs=3)
    for i, length in enumerate([4, 5, 3, 25, 1, 1, 1, 1]):
        core.add(request(str(i), [1] * length))
    deltas = drain(core)
    assert rank.batches == [[4, 5], [3], [25], [1, 1, 1], [1]]
    assert [d.request_id for d in deltas] == list("01234567")
    assert all(d.finish_reason is FinishReason.STOP and d.pooled is not None and d.times is not None for d in deltas)
    stats = core.stats()
    assert (stats.step, stats.prompt_tokens, stats.waiting) == (5, 41, 0)


def test_priority_goes_first_under_that_policy() -> None:
    for policy, order in (("priority", ["b", "a"]), ("fcfs", ["a", "b"])):
        core, _ = make(policy, seqs=1)
        core.add(request("a", [1], priority=2))
        core.add(request("b", [1], priority=1))
        assert [d.request_id for d in drain(core)] == order


def test_a_request_that_fails_fails_alone() -> None:
    core, _ = make()
    for name, tokens in (("a", [1]), ("bad", [13]), ("odd", [14]), ("b", [2, 2])):
        core.add(request(name, tokens))
    deltas = {d.request_id: d for d in drain(core)}
    assert "unlucky" in (deltas["bad"].error or "")
    assert deltas["odd"].error == "no"
    assert [deltas[n].pooled for n in ("a", "b")] == [Pooled(b"\x01", [1]), Pooled(b"\x02", [1])]


def test_aborted_requests_are_not_computed() -> None:
    core, rank = make()
    core.add(request("a", [1, 1, 1]))
    core.add(request("b", [1, 1]))
    core.abort(AbortRequests(["a", "unknown"]))
    deltas = {d.request_id: d.finish_reason for d in drain(core)}
    assert deltas == {"a": FinishReason.ABORT, "b": FinishReason.STOP}
    assert rank.batches == [[2]]


def test_a_request_to_generate_is_refused() -> None:
    core, rank = make()
    core.add(request("a", [1], pooling=False))
    (delta,) = drain(core)
    assert delta.finish_reason is FinishReason.ERROR
    assert "does not generate" in (delta.error or "")
    assert rank.batches == []
