"""A decoder whose forward pass is one call into the compiled kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from octavo.config.types import CpuActivations
from octavo.ops.cpu import abi
from octavo.ops.cpu.paged import PagedStep
from octavo.ops.cpu.steps import CpuSteps, SlotMemory, draw_tokens
from octavo.ops.program import AttendLayer, DecoderProgram, LayerProgram
from octavo.ops.registry import DrawRows


class CpuDecoder:
    """Implements `ops.program.CompiledDecoder`. Not thread-safe: scratch memory is shared by all calls."""

    def __init__(self, program: DecoderProgram, *, threads: int, activations: CpuActivations) -> None:
        self._program = program
        self._library = abi.loaded()
        self._engine = abi.Engine(threads)
        self._layers = abi.array_of(abi.Layer, [_layer(layer) for layer in program.layers])
        self._decoder = abi.Decoder(
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

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: AttendLayer, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `ops.program.CompiledDecoder`."""
        if not isinstance(attend, PagedStep):
            hidden = torch.empty(token_ids.shape[0], self._program.hidden)
            self._layer_by_layer(token_ids.contiguous(), positions.contiguous(), attend, hidden)
            return hidden if wanted is None else hidden.index_select(0, wanted)
        step = abi.Step.from_buffer_copy(attend.step)
        if wanted is not None:
            wanted = wanted.to(torch.int32).contiguous()
            step.wanted, step.num_wanted = wanted.data_ptr(), len(wanted)
        hidden = torch.empty(token_ids.shape[0] if wanted is None else len(wanted), self._program.hidden)
        self._library.octavo_forward(*self._arguments(attend.caches, step), hidden.data_ptr())
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `ops.program.CompiledDecoder`."""
        hidden = hidden.contiguous()
        out = torch.empty(hidden.shape[0], self._program.vocab)
        self._library.octavo_logits(*self._arguments(), hidden.data_ptr(), hidden.shape[0], out.data_ptr())
        return out

    def draw(
        self,
        logits: torch.Tensor,
        rows: DrawRows,
        numbers: torch.Tensor,
        out: torch.Tensor,
        token_table: torch.Tensor | None = None,
        *,
        filters: bool = True,
    ) -> None:
        """See `ops.registry.Draw`."""
        draw_tokens(self._engine, logits, rows, numbers, out, token_table)

    def steps(self, caches: ctypes.Array[abi.Cache], memory: SlotMemory) -> CpuSteps:
        """Whole steps over a KV cache, which the caller keeps alive."""
        return CpuSteps(self._engine, self._decoder, caches, memory, self)

    def _arguments(self, *structures: Any) -> tuple[Any, ...]:
        """The engine, the decoder and what else a call takes by reference."""
        return (self._engine.handle, *(ctypes.byref(s) for s in (self._decoder, *structures)))

    def _layer_by_layer(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: AttendLayer, hidden: torch.Tensor) -> None:
        """With attention that is not ours between the kernels."""
        program, tokens = self._program, token_ids.shape[0]
        step = abi.Step(token_ids=token_ids.data_ptr(), positions=positions.data_ptr(), num_tokens=tokens)
        heads, kv_heads = program.heads, program.kv_heads
        self._library.octavo_begin(*self._arguments(step))
        for layer in range(len(program.layers)):
            qkv = torch.empty(tokens, heads + 2 * kv_heads, program.head_dim)
            self._library.octavo_layer_qkv(*self._arguments(step), layer, qkv.data_ptr())
            q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
            attended = attend(layer, q, k, v).contiguous()
            self._library.octavo_layer_rest(*self._arguments(step), layer, attended.data_ptr(), hidden.data_ptr())


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
        cos_sin=layer.cos_sin.data_ptr(),
    )
