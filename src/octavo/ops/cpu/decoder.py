"""A decoder whose forward pass is one call into the compiled kernels, for callers with tensors."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from octavo.ops.cpu import abi
from octavo.ops.cpu.cpu_program import CpuProgram
from octavo.ops.cpu.paged import PagedStep
from octavo.ops.cpu.steps import CpuSteps, SlotMemory
from octavo.ops.registry import DrawRows

if TYPE_CHECKING:
    from octavo.ops.program import AttendLayer, Float32


class CpuDecoder:
    """Implements `ops.program.CompiledDecoder`. Not thread-safe: scratch memory is shared by all calls."""

    def __init__(self, compiled: CpuProgram) -> None:
        self._compiled = compiled
        self._program = compiled.program

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: AttendLayer, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `ops.program.CompiledDecoder`."""
        if not isinstance(attend, PagedStep):

            def attended(layer: int, *qkv: Float32) -> Float32:
                return attend(layer, *(torch.from_numpy(part) for part in qkv)).numpy()

            every = torch.from_numpy(self._compiled.run_layers(token_ids.numpy(), positions.numpy(), attended))
            return every if wanted is None else every.index_select(0, wanted)
        step = abi.Step.from_buffer_copy(attend.step)
        if wanted is not None:
            wanted = wanted.to(torch.int32).contiguous()
            step.wanted, step.num_wanted = wanted.data_ptr(), len(wanted)
        hidden = torch.empty(token_ids.shape[0] if wanted is None else len(wanted), self._program.hidden)
        described = (ctypes.byref(s) for s in (self._compiled.decoder, attend.caches, step))
        abi.loaded().octavo_forward(self._compiled.engine.handle, *described, hidden.data_ptr())
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `ops.program.CompiledDecoder`."""
        return torch.from_numpy(self._compiled.logits(hidden.numpy()))

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
