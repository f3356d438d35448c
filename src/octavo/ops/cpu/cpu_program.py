"""A decoder with its weights, described for the compiled kernels, and the threads that compute it. No torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from octavo.config.types import CpuActivations
from octavo.ops.cpu import abi
from octavo.ops.cpu.steps import CpuSteps, SlotMemory, logits_of
from octavo.ops.program import DecoderProgram, Float32, LayerProgram

Attention = Callable[[int, Float32, Float32, Float32], Float32]
"""(layer, q [tokens, heads, head_dim], k, v [tokens, kv_heads, head_dim]) -> [tokens, heads, head_dim]"""


class CpuProgram:
    """Owns the threads and their scratch memory, which all calls share: one call at a time."""

    def __init__(self, program: DecoderProgram, *, threads: int, activations: CpuActivations) -> None:
        self.program = program
        self.engine = abi.Engine(threads)
        self._layers = abi.array_of(abi.Layer, [_layer(layer) for layer in program.layers])
        self.decoder = abi.Decoder(
            layers=ctypes.cast(self._layers, ctypes.POINTER(abi.Layer)),
            embed=abi.describe_linear(program.embed),
            head=abi.describe_linear(program.head),
            final_norm=abi.pointer(program.final_norm),
            num_layers=len(program.layers),
            hidden=program.hidden,
            heads=program.heads,
            kv_heads=program.kv_heads,
            head_dim=program.head_dim,
            rotary_dim=program.layers[0].cos_sin.shape[1],
            inner=program.inner,
            vocab=program.vocab,
            activation=abi.ACTIVATIONS[program.activation],
            activations=abi.READ_AS[activations],
            norm_eps=program.norm_eps,
            embedding_scale=program.embedding_scale,
            residual_multiplier=program.residual_multiplier,
            logit_scale=program.logit_scale,
            logit_soft_cap=program.logit_soft_cap or 0.0,
        )

    def steps(self, caches: ctypes.Array[abi.Cache], memory: SlotMemory) -> CpuSteps:
        """Whole steps over a KV cache, which the caller keeps alive."""
        return CpuSteps(self.engine, self.decoder, caches, memory, self)

    def run_layers(self, token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], attend: Attention) -> Float32:
        """[tokens, hidden] after the final norm, with attention that is not ours between the kernels.

        Args:
            token_ids, positions: [tokens]
        """
        program, tokens, library = self.program, len(token_ids), abi.loaded()
        heads, kv_heads = program.heads, program.kv_heads
        hidden = np.empty((tokens, program.hidden), np.float32)
        token_ids, positions = np.ascontiguousarray(token_ids), np.ascontiguousarray(positions)
        step = abi.Step(token_ids=abi.address(token_ids), positions=abi.address(positions), num_tokens=tokens)
        fixed = (self.engine.handle, ctypes.byref(self.decoder), ctypes.byref(step))
        library.octavo_begin(*fixed)
        for layer in range(len(program.layers)):
            qkv = np.empty((tokens, heads + 2 * kv_heads, program.head_dim), np.float32)
            library.octavo_layer_qkv(*fixed, layer, abi.address(qkv))
            attended = attend(layer, qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :])
            attended = np.ascontiguousarray(attended, np.float32)
            library.octavo_layer_rest(*fixed, layer, abi.address(attended), abi.address(hidden))
        return hidden

    def logits(self, hidden: Float32) -> Float32:
        """[rows, hidden] -> [rows, vocab]."""
        return logits_of(self.engine, self.decoder, hidden)


def _layer(layer: LayerProgram) -> abi.Layer:
    return abi.Layer(
        qkv=abi.describe_linear(layer.qkv, layer.qkv_bias),
        out=abi.describe_linear(layer.out, layer.out_bias),
        gate_up=abi.describe_linear(layer.gate_up, layer.gate_up_bias),
        down=abi.describe_linear(layer.down, layer.down_bias),
        attention_norm=abi.pointer(layer.attention_norm),
        attention_post_norm=abi.pointer(layer.attention_post_norm),
        mlp_norm=abi.pointer(layer.mlp_norm),
        mlp_post_norm=abi.pointer(layer.mlp_post_norm),
        q_norm=abi.pointer(layer.q_norm),
        k_norm=abi.pointer(layer.k_norm),
        cos_sin=abi.address(layer.cos_sin),
    )
