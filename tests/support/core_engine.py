"""Drives an `EngineCore` over a `FakeWorker`: collects what each sequence got, and checks the accounting after every turn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from octavo.config.types import (
    CacheConfig,
    DeviceInfo,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ReliabilityConfig,
    SchedulerConfig,
)
from octavo.core.kv.manager import KVManager
from octavo.core.kv.prefix_tree import IN_USE, NO_BLOCK, Node
from octavo.core.kv.tables import BlockTables
from octavo.core.loop import EngineCore
from octavo.core.request import RequestState
from octavo.protocol.engine import AbortRequests, FinishReason, LogprobRow, NewRequest, ReleaseHeld, RequestTimes, TokenDelta, Vocabulary
from octavo.protocol.params import SamplingParams
from tests.support.fake_worker import FakeWorker

EOS = 1


def core_config(
    *, max_num_seqs: int = 8, budget: int = 32, inflight: int = 0, policy: Any = "fcfs", prefix_caching: bool = True, max_model_len: int = 64,
    target_step_ms: float | None = None, chunked: bool = True, threshold: int = 0, stages: int = 1,
) -> EngineConfig:  # fmt: skip
    """A configuration with only what the core reads set on purpose."""
    return EngineConfig(
        model=ModelConfig("", "fake", {}, "fake", "float32", max_model_len, False, 50, (EOS,), "dummy", 0, 20, "raw_logprobs"),
        cache=CacheConfig(4, 0.9, None, None, "float32", prefix_caching),
        scheduler=SchedulerConfig(max_num_seqs, budget, chunked, policy, target_step_ms, threshold, 1024, inflight, stages),
        device=DeviceInfo("cpu", "fake", 0, 0, 1),
        parallel=ParallelConfig(),
        reliability=ReliabilityConfig(0, 0.0, None),
    )


def new_request(request_id: str, prompt: list[int], **options: Any) -> NewRequest:
    """`options` are NewRequest fields or SamplingParams fields."""
    fields = {k: options.pop(k) for k in list(options) if k in NewRequest.__struct_fields__}
    fields.setdefault("arrival_time", 0.0)
    fields.setdefault("eos_token_ids", [EOS])
    options.setdefault("seed", 7)
    options.setdefault("max_tokens", 8)
    return NewRequest(request_id, list(prompt), SamplingParams(**options), **fields)


@dataclass
class Sequence:
    """Everything the frontend would have seen of one sequence."""

    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    cached: int | None = None
    times: RequestTimes | None = None
    logprobs: list[LogprobRow] = field(default_factory=list)
    prompt_logprobs: list[LogprobRow | None] | None = None
    deltas: int = 0
    ends: int = 0

    def take(self, delta: TokenDelta) -> None:
        assert self.ends == 0, f"a delta after the end: {delta}"
        if delta.token_ids and not self.tokens:
            assert delta.num_cached_tokens >= 0
            self.cached = delta.num_cached_tokens
            self.prompt_logprobs = delta.prompt_logprobs
        else:
            assert delta.num_cached_tokens == -1
            assert delta.prompt_logprobs is None
        self.deltas += 1
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or []
        if delta.finish_reason is not None:
            self.ends += 1
            self.reason, self.stop_reason, self.error, self.times = delta.finish_reason, delta.stop_reason, delta.error, delta.times


class Engine:
    """An engine core with a fake worker."""

    def __init__(self, worker: FakeWorker | None = None, **config: Any) -> None:
        self.worker = worker or FakeWorker()
        self.worker.inflight, self.worker.stages = config.get("inflight", 0), config.get("stages", 1)
        config.setdefault("max_num_seqs", self.worker.max_num_seqs)
        config.setdefault("max_model_len", self.worker.max_model_len)
        self.core = EngineCore(core_config(**config), self.worker)
        self.core.set_vocabulary(Vocabulary([b"x"] * 64, [], [EOS]))
        self.seen: dict[tuple[str, int], Sequence] = {}

    def add(self, request_id: str, prompt: list[int], **options: Any) -> NewRequest:
        request = new_request(request_id, prompt, **options)
        self.core.add(request)
        return request

    def abort(self, *ids: str, index: int | None = None) -> None:
        self.core.abort(AbortRequests(list(ids), index))

    def release(self, *ids: str) -> None:
        self.core.release(ReleaseHeld(list(ids)))

    def step(self) -> list[TokenDelta]:
        deltas = self.core.step().deltas
        for delta in deltas:
            self.seen.setdefault((delta.request_id, delta.index), Sequence()).take(delta)
        self.check()
        return deltas

    def run(self, most_steps: int = 1000) -> None:
        """Turn until there is no work left."""
        for _ in range(most_steps):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError(f"still working after {most_steps} turns: {self.core.stats()}")

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return self.seen[request_id, index].tokens

    def check(self) -> None:
        assert not self.worker.violations, self.worker.violations
        check_core(self.core)

    def check_idle(self) -> None:
        """No request left: every block is free or cached."""
        stats = self.core.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert self.core.batch.num_seated == 0
        assert not self.core.kv.pinned
        if not self.core.life.held:
            assert stats.kv_blocks_used == 0, stats
            assert stats.kv_tokens_live == 0
        assert not self.core.life.live


def check_core(core: EngineCore) -> None:
    """The accounting is right: no reference too many or too few, no block in two states, the tree's invariants hold."""
    batch = core.batch
    for number, kind in enumerate(core.kv.kinds):
        _check_kind(core, kind, number)
        _check_exclusive_writes(core, kind)
    running = [r for r in batch.requests if r is not None and batch.running[r.slot]]
    assert all(r.state is RequestState.RUNNING for r in running)
    assert core.life.num_live == sum(len(s) for s in core.life.live.values())
    assert len(core.queue) == sum(r.queued for s in core.life.live.values() for r in s.values())


def _check_kind(core: EngineCore, kv: BlockTables, number: int) -> None:
    batch = core.batch
    refs: Counter[int] = Counter(kv.pinned)
    for slot in range(batch.max_seqs):
        length, first = int(kv.lengths[slot]), int(kv.first[slot])
        assert not kv.table[slot, length:].any()
        if batch.requests[slot] is None:
            assert length == 0
        assert length == core.kv.lengths[slot]
        blocks, chain = kv.table[slot, :length].tolist(), kv._chains[slot]
        assert kv.published[slot] == len(chain) <= length
        assert length * kv.block_size >= batch.scheduled[slot] or batch.requests[slot] is None
        refs.update(_held(kv, blocks, chain, first))
        if kv.window is None:
            assert first == 0
        else:
            assert first * kv.block_size <= max(0, batch.settled[slot] - kv.window + 1), "a block that is still read has been let go"
    for request in core.life.held:
        assert request.state is RequestState.HELD
        assert request.run is not None
        run = (request.run, *request.run.others)[number]
        refs.update(_held(kv, run.blocks, run.chain, next((i for i, b in enumerate(run.blocks) if b), len(run.blocks))))
    check_blocks(kv, refs)


def _held(kv: BlockTables, blocks: list[int], chain: list[Node], first: int) -> list[int]:
    """What a sequence holds: its blocks from `first` on, and those that stand for the same tokens in the tree."""
    assert not any(blocks[:first])
    live = blocks[first:]
    assert 0 not in live
    assert len(set(live)) == len(live)
    if chain and not kv.tree.sliding:
        assert first == 0
    return live + [node.block for node, block in zip(chain[first:], live, strict=False) if node.block != block]


def check_blocks(kv: BlockTables | KVManager, refs: Counter[int]) -> None:
    """`refs` are all references there should be."""
    pool, tree = kv.pool, kv.tree
    assert pool.repairs == 0
    evictable = 0
    for block in range(1, pool.num_blocks):
        assert pool.refs[block] == refs[block], f"block {block} has {pool.refs[block]} references, {refs[block]} holders"
        states = pool.is_free(block), refs[block] > 0, block in tree and not refs[block]
        assert sum(states) == 1, f"block {block}: free, used, cached = {states}"
        evictable += states[2]
    assert tree.num_evictable == evictable
    assert pool.num_free + kv.num_used + evictable == pool.capacity
    for node in tree:
        assert (node.released == IN_USE) == (pool.refs[node.block] > 0)
        assert 0 < node.num_tokens <= kv.block_size
        if node.num_tokens < kv.block_size:
            assert not node.children
        parent = node.parent
        assert parent is not None
        ancestor = parent
        while ancestor.block == NO_BLOCK:
            assert tree.sliding
            assert ancestor.children
            assert ancestor.parent is not None
            ancestor = ancestor.parent
        if parent.block >= 0:
            assert parent.block in tree
            if pool.refs[node.block] and not tree.sliding:
                assert pool.refs[parent.block], "a referenced node has an unreferenced parent"
        assert parent.children is not None
        assert parent.children[node.key[:4]][node.key] is node
    assert len(tree._heap) <= 2 * len(tree) + 65


def _check_exclusive_writes(core: EngineCore, kv: BlockTables) -> None:
    """The block a running request writes next is in nobody else's table."""
    batch = core.batch
    owners: Counter[int] = Counter()
    for slot in range(batch.max_seqs):
        owners.update(kv.table[slot, : kv.lengths[slot]].tolist())
    for slot in range(batch.max_seqs):
        index = int(batch.scheduled[slot]) // kv.block_size
        if batch.running[slot] and index < kv.lengths[slot]:
            assert owners[int(kv.table[slot, index])] == 1, f"slot {slot} would write a shared block"
