"""What a worker reports once it can take steps. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from octavo.config.types import EngineConfig
from octavo.protocol.engine import EngineReady, Phase
from octavo.protocol.step import CacheShape
from octavo.worker.memory import Budget


def ready_report(
    config: EngineConfig,
    budget: Budget,
    shape: CacheShape,
    *,
    vocab_size: int,
    max_model_len: int,
    weights_kinds: Mapping[str, int],
    cache_bytes: int,
    attention: str,
    phases: list[Phase],
    warnings: list[str],
    sums: str = "",
) -> EngineReady:
    """See `EngineReady` for what the values are."""
    return EngineReady(
        pid=os.getpid(),
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        weights_bytes=budget.weights,
        weights_kinds=dict(weights_kinds),
        cache_bytes=cache_bytes,
        window=shape.window,
        activation_bytes=budget.activations,
        total_bytes=budget.total,
        other_bytes=budget.other,
        device=config.device.name,
        dtype=config.model.dtype,
        kv_dtype=config.cache.dtype,
        attention=attention,
        sums=sums,
        phases=phases,
        warnings=warnings,
    )
