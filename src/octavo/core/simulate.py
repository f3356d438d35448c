"""An executor without a model, to run the real scheduler and cache over synthetic traffic: benchmarks, capacity questions."""

from __future__ import annotations

from collections import deque
from typing import Literal

import numpy as np

from octavo.config.types import (
    CacheConfig,
    DeviceInfo,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ReliabilityConfig,
    SchedulerConfig,
)
from octavo.protocol.engine import EngineReady
from octavo.protocol.step import CacheKind, CacheShape, Int32, StepPlan, StepResult, window_blocks

EOS_TOKEN = 1
OTHER_TOKEN = 2
NEVER = np.iinfo(np.int32).max


class InstantExecutor:
    """Computes nothing. A request gets EOS as soon as it may end, so with `min_tokens` = n - 1 it has n outputs; with `ignore_eos`
    it goes on to its limit.

    Args:
        window: of every layer.
        sliding_window: of a second kind of layers, with as many blocks as a worker gives it (`worker.memory`).
    """

    def __init__(self, config: EngineConfig, num_blocks: int, *, window: int | None = None, sliding_window: int | None = None) -> None:
        self._config = config
        block_size, sliding = config.cache.block_size, None
        if sliding_window is not None:
            scheduler = config.scheduler
            steps = (1 + scheduler.inflight) * -(-scheduler.max_num_batched_tokens // block_size)
            needed = 1 + 2 * scheduler.max_num_seqs * window_blocks(sliding_window, block_size) + steps
            sliding = CacheKind(needed, 0, sliding_window, num_blocks, -(-config.model.max_model_len // block_size) + 1)
        self._shape = CacheShape(num_blocks, block_size, 0, window, sliding)
        self._ends: Int32 = np.full(config.scheduler.max_num_seqs, NEVER, np.int32)
        self._results: deque[StepResult] = deque()

    @property
    def cache_shape(self) -> CacheShape:
        return self._shape

    @property
    def tries(self) -> bool:
        return False

    @property
    def ready_report(self) -> EngineReady:
        config = self._config
        return EngineReady(
            pid=0,
            num_blocks=self._shape.num_blocks,
            block_size=self._shape.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.model.max_model_len,
            vocab_size=config.model.vocab_size,
            weights_bytes=0,
            cache_bytes=0,
            activation_bytes=0,
            total_bytes=0,
            other_bytes=0,
            device="none",
            dtype=config.model.dtype,
            kv_dtype=config.cache.dtype,
            attention="none",
            phases=[],
        )

    def submit(self, plan: StepPlan) -> None:
        for init in plan.init:
            sampling = init.sampling
            self._ends[init.slot] = NEVER if sampling.ignore_eos else init.num_prompt_tokens + sampling.min_tokens
        slots = plan.slots[plan.sample]
        ended = (plan.start + plan.count)[plan.sample] >= self._ends[slots]
        self._results.append(StepResult(plan.step_id, slots, np.where(ended, EOS_TOKEN, OTHER_TOKEN).astype(np.int32)))

    def prepare(self, *, idle: bool) -> bool:
        """There is nothing to prepare."""
        return False

    def collect(self) -> StepResult:
        return self._results.popleft()

    def shutdown(self) -> None:
        self._results.clear()


def simulation_config(
    *,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int = 8192,
    block_size: int = 16,
    prefix_caching: bool = True,
    policy: Literal["fcfs", "priority", "fair"] = "fcfs",
    inflight: int = 0,
) -> EngineConfig:
    """A configuration for the core alone: what only a model or a device needs is left empty."""
    return EngineConfig(
        model=ModelConfig(
            path="",
            name="simulation",
            hf_config={},
            architecture="none",
            dtype="float32",
            max_model_len=max_model_len,
            auto_max_model_len=False,
            vocab_size=1 << 16,
            eos_token_ids=(EOS_TOKEN,),
            load_format="dummy",
            seed=0,
            max_logprobs=0,
            logprobs_mode="raw_logprobs",
        ),
        cache=CacheConfig(block_size, 0.0, None, None, "float32", prefix_caching),
        scheduler=SchedulerConfig(max_num_seqs, max_num_batched_tokens, True, policy, None, 0, 1 << 20, inflight),
        device=DeviceInfo("cpu", "none", 0, 0, 1),
        parallel=ParallelConfig(),
        reliability=ReliabilityConfig(0, 0.0, None),
    )
