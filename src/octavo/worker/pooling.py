"""`PoolingWorker`: one rank that pools prompts. It keeps no state between batches: no slots, no sampler, no KV cache."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence

import torch

from octavo.config.types import EngineConfig
from octavo.models.pooling import PoolingModel, load_pooling_model
from octavo.ops.registry import load_ops
from octavo.parallel.group import ONE_RANK
from octavo.protocol.engine import EngineReady, Phase
from octavo.protocol.params import PoolingParams
from octavo.protocol.pooling import Pooled, PoolRow
from octavo.worker import torch_threads
from octavo.worker.step_halves import is_out_of_memory

logger = logging.getLogger(__name__)

LEAST_FILLED = 0.75
"""Prompts are computed together while the shortest has at least this part of the longest's tokens, or is short anyway."""
SHORT = 16


class PoolingWorker:
    """See the module.

    Args:
        progress: called with (phase, done, total) while it loads.

    Raises:
        CheckpointError, UnsupportedModel, ConfigError: the model cannot be loaded.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[str, int, int], None]) -> None:
        self._config = config
        device = ONE_RANK.device(config.device.kind, config.parallel)
        torch_threads.take(self, config.device.threads)
        began = time.perf_counter()
        self._model: PoolingModel = load_pooling_model(config, load_ops(config.device.kind), device, progress)
        loaded = time.perf_counter()
        self.pool([PoolRow([0] * min(8, config.model.max_model_len), 0, PoolingParams())])
        phases = [Phase("load", loaded - began), Phase("warm-up", time.perf_counter() - loaded)]
        self.ready_report = EngineReady(
            pid=os.getpid(),
            num_blocks=0,
            block_size=config.cache.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.model.max_model_len,
            vocab_size=self._model.vocab_size,
            weights_bytes=self._model.weights_bytes,
            weights_kinds=dict(self._model.weights_kinds),
            cache_bytes=0,
            activation_bytes=0,
            total_bytes=config.device.total_bytes,
            other_bytes=max(0, config.device.total_bytes - config.device.free_bytes),
            device=config.device.name,
            dtype=config.model.dtype,
            kv_dtype=config.cache.dtype,
            attention="prompt",
            phases=phases,
            embedding_size=self._model.embedding_size,
        )

    def pool(self, rows: Sequence[PoolRow]) -> list[Pooled | str]:
        """The result of each row, or why there is none."""
        out: list[Pooled | str] = [""] * len(rows)
        for group in similar([len(row.token_ids) for row in rows]):
            for index, result in zip(group, self._try([rows[i] for i in group]), strict=True):
                out[index] = result
        return out

    def _try(self, rows: list[PoolRow]) -> Sequence[Pooled | str]:
        """A group; in halves when the device has no memory for it at once."""
        try:
            return self._model.pool(rows)
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(e):
                raise
            if len(rows) == 1:
                return [f"The device has no memory for this prompt of {len(rows[0].token_ids)} tokens: {e}"]
        logger.warning("Out of device memory with %d prompts: computing them in two halves.", len(rows))
        if self._config.device.kind == "cuda":
            torch.cuda.empty_cache()
        half = len(rows) // 2
        return [*self._try(rows[:half]), *self._try(rows[half:])]

    def shutdown(self) -> None:
        """Release the model's memory. The worker cannot be used any more."""
        if hasattr(self, "_model"):
            del self._model
        torch_threads.give_back(self)
        if self._config.device.kind == "cuda":
            torch.cuda.empty_cache()


def similar(lengths: Sequence[int]) -> list[list[int]]:
    """Indices in groups of similar length, longest first, so that padding each group to its longest wastes little."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for index in order:
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (lengths[index] >= longest * LEAST_FILLED or longest <= SHORT):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
