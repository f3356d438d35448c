"""`CompiledDecoder`: the same decoder as `decoder.py` where the device runs a whole forward pass in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from octavo.attention.base import Attend, KvScales
from octavo.config.types import CpuActivations
from octavo.models.decoder import Decoder, Model, Weights
from octavo.models.program import describe
from octavo.models.sharding import WHOLE_MODEL, Shard
from octavo.models.spec import ModelSpec
from octavo.ops.program import CompiledDecoder as Compiled
from octavo.ops.registry import Draw, Ops
from octavo.parallel.group import ALONE, TensorGroup
from octavo.parallel.pipeline import NO_PIPELINE, Pipeline

if TYPE_CHECKING:
    from octavo.ops.cpu.steps import CpuSteps, SlotMemory


def build_decoder(
    spec: ModelSpec,
    weights: Weights,
    ops: Ops,
    *,
    max_length: int,
    threads: int = 1,
    activations: CpuActivations = "int8",
    group: TensorGroup = ALONE,
    pipeline: Pipeline = NO_PIPELINE,
    shard: Shard = WHOLE_MODEL,
) -> Model:
    """The decoder for these weights: compiled where `ops` can, and the weights were packed for it.

    Args:
        max_length: the longest sequence served; positions are below it.
        threads, activations: see `ops.program.CompileDecoder`.
        group, pipeline, shard: see `Decoder`.
    """
    if ops.decoder is None:
        return Decoder(spec, weights, ops, max_length=max_length, group=group, pipeline=pipeline, shard=shard)
    arrays = {name: tensor.numpy() for name, tensor in weights.tensors.items()}
    program = describe(spec, arrays, weights.panels, max_length)
    compiled = ops.decoder.compile(program, threads=threads, activations=activations)
    return CompiledDecoder(spec, compiled, weights.kinds, weights.kv_scales)


class CompiledDecoder:
    """Implements `Model`. Holds weights and no state between calls."""

    capturable = False
    makes_logits = True
    stage = None

    def __init__(self, spec: ModelSpec, compiled: Compiled, kinds: Mapping[str, int], kv_scales: Mapping[int, KvScales]) -> None:
        """
        Args:
            kinds, kv_scales: see `Weights`.
        """
        self.spec = spec
        self.layer_specs = spec.layer_specs
        self.weights_bytes = sum(kinds.values())
        self.weights_kinds = kinds
        self.kv_scales = kv_scales
        self._compiled = compiled

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """See `Model.forward`."""
        return self._compiled.forward(token_ids, positions, attend, wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self._compiled.logits(hidden)

    def compact_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.compact_logits`: the kernels make float32 anyway."""
        return self._compiled.logits(hidden)

    @property
    def draw(self) -> Draw:
        """See `ops.program.CompiledDecoder`."""
        return self._compiled.draw

    def steps(self, caches: Any, memory: SlotMemory) -> CpuSteps:
        """See `ops.program.CompiledDecoder`."""
        return self._compiled.steps(caches, memory)
