"""Steps with all that a sampler can do, over the tables and the cache of a `CompiledWorker`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.attention.native_cpu import NativeCpuAttention
from octavo.attention.native_memory import NativeCacheMemory
from octavo.config.types import EngineConfig
from octavo.models.compiled import CompiledDecoder
from octavo.models.program_loader import LoadedProgram
from octavo.ops.cpu.cpu_program import CpuProgram
from octavo.ops.cpu.decoder import CpuDecoder
from octavo.protocol.step import StepPlan, StepResult
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplerState
from octavo.worker import torch_threads
from octavo.worker.diagnosis import Circumstances, Diagnosis
from octavo.worker.host_tables import HostTables
from octavo.worker.native_steps import NativeSteps, steps_of
from octavo.worker.runner import Runner, settle
from octavo.worker.slots import SlotTables


class TensorSteps:
    """Owns nothing but what it adds: from now on both it and the compiled steps write the same memory, one at a time."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedProgram,
        compiled: CpuProgram,
        memory: NativeCacheMemory,
        tables: HostTables,
        state: SamplerState,
    ) -> None:
        device = torch.device("cpu")
        model = CompiledDecoder(loaded.spec, CpuDecoder(compiled), loaded.kinds, {})
        attention = NativeCpuAttention(
            loaded.spec.layer_specs,
            memory.kinds.num_blocks,
            config.cache.block_size,
            getattr(torch, config.cache.dtype),
            device,
            config.device.threads,
            memory=memory,
        )
        slot_tables = SlotTables.over(tables, device)
        state.use_tensors(device)
        processed = config.model.logprobs_mode == "processed_logprobs"
        sampler = Sampler(state, slot_tables.tokens, processed_logprobs=processed, draw=model.draw)
        native = NativeSteps(steps_of(model, attention, slot_tables, state), slot_tables, state)
        self._runner = Runner(model, attention, slot_tables, state, sampler, native=native)
        self._diagnosis = Diagnosis(model, slot_tables, state, Circumstances.of(config))
        torch_threads.take(self, 1)  # the kernels bring threads of their own: torch's would be in their way

    def run(self, plan: StepPlan) -> StepResult:
        result = settle(self._runner.launch(plan))
        if result.errors:
            result.errors = self.explain(list(result.errors))
        return result

    def close(self) -> None:
        """No more steps will be run."""
        torch_threads.give_back(self)

    def explain(self, slots: Sequence[int]) -> dict[int, str]:
        """See `Diagnosis.explain`."""
        return self._diagnosis.explain(slots)
