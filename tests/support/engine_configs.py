"""Small `EngineConfig`s for tests that do not go through `resolve`."""

from __future__ import annotations

from typing import Any

from octavo.config.types import (
    CacheConfig,
    DeviceInfo,
    DTypeName,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ReliabilityConfig,
    SchedulerConfig,
)


def engine_config(
    *,
    path: str = "",
    hf_config: dict[str, Any] | None = None,
    architecture: str = "LlamaForCausalLM",
    load_format: str = "dummy",
    dtype: DTypeName = "float32",
    vocab_size: int = 64,
    max_model_len: int = 128,
    auto_max_model_len: bool = False,
    eos_token_ids: tuple[int, ...] = (0,),
    logprobs_mode: str = "raw_logprobs",
    block_size: int = 4,
    num_blocks: int | None = 96,
    memory_bytes: int | None = None,
    kv_dtype: DTypeName | None = None,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    inflight: int = 0,
    total_bytes: int = 2**34,
    free_bytes: int = 2**33,
    scripted_model: str | None = None,
) -> EngineConfig:
    """A complete configuration for a CPU with sizes that suit a test."""
    return EngineConfig(
        model=ModelConfig(
            path=path,
            name="tiny",
            hf_config=hf_config or {},
            architecture=architecture,
            dtype=dtype,
            max_model_len=max_model_len,
            auto_max_model_len=auto_max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            load_format=load_format,
            seed=0,
            max_logprobs=20,
            logprobs_mode=logprobs_mode,
        ),
        cache=CacheConfig(
            block_size=block_size,
            memory_utilization=0.9,
            memory_bytes=memory_bytes,
            num_blocks_override=num_blocks,
            dtype=kv_dtype or dtype,
            prefix_caching=True,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            chunked_prefill=True,
            policy="fcfs",
            target_step_ms=None,
            long_prefill_token_threshold=0,
            max_waiting=16,
            inflight=inflight,
        ),
        device=DeviceInfo(kind="cpu", name="test", total_bytes=total_bytes, free_bytes=free_bytes, threads=1),
        parallel=ParallelConfig(),
        reliability=ReliabilityConfig(restarts=0, hang_timeout=60.0, scripted_model=scripted_model),
    )
