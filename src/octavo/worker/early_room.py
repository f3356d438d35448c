"""Whether there can be a cache for the longest request, asked when the weights are there and before anything as long as that request is made.

Tables of positions grow with the length, a second and gigabytes for millions. For a length for which there is no cache they are made for
nothing, or end the process. What is left to measure then only makes the cache smaller: who is refused here would be refused there.
"""

from __future__ import annotations

import torch

from octavo.attention.base import LayerSpec
from octavo.attention.select import block_bytes, layout_of
from octavo.config.types import EngineConfig
from octavo.errors import ConfigError
from octavo.models.loader import CheckRoom
from octavo.models.spec import ModelSpec
from octavo.worker.memory import (
    Budget,
    CudaMemory,
    GraphMemory,
    activation_bound,
    cache_bytes,
    cannot_allocate,
    cpu_budget,
    cuda_budget,
    shape_of,
    size_kinds,
)


def early_room(config: EngineConfig, device: torch.device) -> CheckRoom:
    """What raises ConfigError where the longest request does not fit."""

    def check(spec: ModelSpec, layers: tuple[LayerSpec, ...], weights: int) -> None:
        bytes_of = block_bytes(config, layers)
        budget, layout = _at_most(config, device, spec, weights), layout_of(config, layers, spec.layer_specs)
        size = size_kinds(config, budget, layout, bytes_of)
        # A size that was asked for, and is not there: on a GPU no more memory will come.
        if device.type == "cuda" and config.cache.sized:
            shape = shape_of(size, layout, bytes_of, config.cache.block_size, 0)
            if (asked := cache_bytes(shape)) > CudaMemory.now(device).free:
                raise ConfigError(cannot_allocate(config, budget, size.num_blocks, asked))

    return check


def _at_most(config: EngineConfig, device: torch.device, spec: ModelSpec, weights: int) -> Budget:
    """What will be measured, or more: on a GPU the worst step has not run yet."""
    if device.type == "cpu":
        return cpu_budget(config, weights, activation_bound(spec, config, getattr(torch, config.model.dtype).itemsize))
    return cuda_budget(config, weights, weights, GraphMemory(0, 0), CudaMemory.now(device))
