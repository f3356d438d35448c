"""A decoder described as data, for a device that runs a whole forward pass in one call.

Where `Ops.decoder` is there, a model hands it one `DecoderProgram` after loading and calls what comes back once a step, instead
of calling one operation after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from octavo.config.types import CpuActivations
from octavo.ops.packed import EncodedRows, Panels, PanelWeight

if TYPE_CHECKING:
    import torch

    from octavo.ops.cpu.steps import CpuSteps, SlotMemory
    from octavo.ops.registry import Activation, Draw

Float32 = npt.NDArray[np.float32]


class AttendLayer(Protocol):
    """`attention.Attend`, as far as layers need it."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        """q [tokens, heads, head_dim], k, v [tokens, kv_heads, head_dim] -> [tokens, heads, head_dim]"""


@dataclass(frozen=True)
class LayerProgram:
    """One layer. A norm that is None is not there; biases and norms are float32."""

    qkv: PanelWeight
    out: PanelWeight
    gate_up: PanelWeight
    down: PanelWeight
    qkv_bias: Float32 | None
    out_bias: Float32 | None
    gate_up_bias: Float32 | None
    down_bias: Float32 | None
    attention_norm: Float32 | None
    attention_post_norm: Float32 | None
    mlp_norm: Float32 | None
    mlp_post_norm: Float32 | None
    q_norm: Float32 | None
    k_norm: Float32 | None
    cos_sin: Float32
    """[longest sequence, rotary_dim] float32; as wide in every layer"""


@dataclass(frozen=True)
class DecoderProgram:
    """A decoder with its weights; `models.spec.ModelSpec` says what each number means."""

    layers: tuple[LayerProgram, ...]
    embed: PanelWeight
    head: PanelWeight
    final_norm: Float32
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    activation: Activation
    norm_eps: float
    embedding_scale: float
    residual_multiplier: float
    logit_scale: float
    logit_soft_cap: float | None


class CompiledDecoder(Protocol):
    """A program that is ready to run."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: AttendLayer, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[tokens] int64, [tokens] int64 -> [tokens, hidden] float32, after the final norm; or [wanted, hidden] for the tokens asked for.

        Attention of the same device is fused into the pass, and brings the token ids and positions of its step itself.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] float32."""

    @property
    def draw(self) -> Draw:
        """The last stages of the sampler, on the same threads."""

    def steps(self, caches: Any, memory: SlotMemory) -> CpuSteps:
        """Whole steps over the KV cache of the same device's attention.

        Args:
            caches: what that attention describes its cache with; kept alive by the caller.
        """


class CompileDecoder(Protocol):
    def __call__(self, program: DecoderProgram, *, threads: int, activations: CpuActivations) -> CompiledDecoder:
        """
        Args:
            activations: how inputs of layers with 4- and 8-bit weights are rounded.
        """


@dataclass(frozen=True)
class DecoderKernels:
    """What a device that runs whole forward passes brings."""

    pack_rows: Callable[[EncodedRows], Panels]
    """Checkpoint rows -> panels; of every encoding in `encodings`."""
    encodings: Mapping[str, float]
    """Encoding -> bits that a weight takes as panels."""
    compile: CompileDecoder
    shared_rows: Callable[[Path, str, int], AbstractContextManager[Callable[[EncodedRows], Panels]]] | None = None
    """(folder, checkpoint, bytes of its header) -> a `pack_rows` whose panels are kept in a file there, shared by all processes."""
