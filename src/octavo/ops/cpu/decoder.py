"""A decoder whose forward pass is one call into the compiled kernels, for callers with tensors."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from octavo.ops.cpu import abi
from octavo.ops.cpu.cpu_program import CpuProgram
from octavo.ops.cpu.paged import PagedStep
from octavo.ops.cpu.steps import CpuSteps, SlotMemory
from octavo.ops.registry import DrawRows

if TYPE_CHECKING:
    from octavo.ops.program import AttendLayer


class CpuDecoder:
    """Implements `ops.program.CompiledDecoder`. Not thread-safe: scratch memory is shared by all calls."""

    def __init__(self, compiled: CpuProgram) -> None:
        self._compiled = compiled
        self._program = compiled.program
        self._library = abi.loaded()

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
        draw_tokens(self._compiled.engine, logits, rows, numbers, out, token_table)

    def steps(self, caches: ctypes.Array[abi.Cache], memory: SlotMemory) -> CpuSteps:
        """See `CpuProgram.steps`."""
        return self._compiled.steps(caches, memory)

    def _arguments(self, *structures: Any) -> tuple[Any, ...]:
        """The engine, the decoder and what else a call takes by reference."""
        return (self._compiled.engine.handle, *(ctypes.byref(s) for s in (self._compiled.decoder, *structures)))

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


def draw_tokens(
    engine: abi.Engine,
    logits: torch.Tensor,
    rows: DrawRows,
    numbers: torch.Tensor,
    out: torch.Tensor,
    token_table: torch.Tensor | None = None,
) -> None:
    """See `ops.registry.Draw`; rows that are not filtered say so in their modes."""
    count = min(len(out), int(rows.count[0]))
    logits, keys = logits.float(), rows.keys.contiguous()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    described = abi.Draw(
        logits=logits.data_ptr(),
        stride=logits.stride(0),
        vocab=logits.shape[1],
        slots=rows.slots.data_ptr(),
        modes=rows.modes.data_ptr(),
        keys=keys.data_ptr(),
        numbers=numbers.data_ptr(),
        numbers_stride=numbers.stride(0),
        rows=count,
    )
    abi.loaded().octavo_draw(engine.handle, ctypes.byref(described), out.data_ptr())
    if token_table is not None:
        positions = rows.positions[:count].long() + rows.ahead
        token_table[rows.slots[:count].long(), positions] = out[:count].clamp(min=0).to(token_table.dtype)
