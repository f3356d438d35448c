"""`CompiledWorker`: one rank of a model that compiled code runs from the first layer to the draw. Without torch, whatever requests want."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from octavo.attention.kinds import CacheKinds, CacheLayout, SlidingBlocks, cache_layout
from octavo.attention.native_memory import NativeCacheMemory
from octavo.config import address_space
from octavo.config.types import EngineConfig
from octavo.errors import NO_MEMORY, ConfigError
from octavo.models.program_loader import LoadedProgram, load_program
from octavo.models.spec import ModelSpec
from octavo.ops.cpu import decoder_kernels
from octavo.ops.cpu.cpu_program import CpuProgram
from octavo.ops.cpu.steps import SlotMemory
from octavo.protocol.engine import EngineReady, Phase
from octavo.protocol.step import CacheShape, Int32, StepPlan, StepResult
from octavo.sampling.state import SamplerState
from octavo.worker import native_look
from octavo.worker.diagnosis import NO_TOKEN, Circumstances, Diagnosis
from octavo.worker.host_tables import HostTables
from octavo.worker.memory import (
    BlockBytes,
    Budget,
    CacheSize,
    cache_bytes,
    cannot_allocate,
    compiled_bound,
    cpu_budget,
    shape_of,
    size_kinds,
)
from octavo.worker.native_steps import NativeSteps
from octavo.worker.report import ready_report
from octavo.worker.warmup import all_slots, first_steps

_ITEM_BYTES = {"float16": 2, "float32": 4}


def compiled_worker(config: EngineConfig, progress: Callable[[str, int, int], None]) -> CompiledWorker | None:
    """The worker of `config`; None where the model needs `Worker`, which says also what is wrong with it.

    Raises:
        CheckpointError, UnsupportedModel: the model cannot be loaded.
        ConfigError: it does not fit into memory as configured.
    """
    if not config.device.native_kernels:
        return None
    began = time.perf_counter()

    def check_room(spec: ModelSpec, kinds: dict[str, int]) -> None:
        _size(config, spec, kinds)

    loaded = load_program(config, decoder_kernels(), progress, check_room)
    return None if loaded is None else CompiledWorker(config, loaded, time.perf_counter() - began)


def _layout(config: EngineConfig, spec: ModelSpec) -> CacheLayout:
    return cache_layout(spec.layer_specs, config.model.max_model_len, 0, two_kinds=True)


def _block_bytes(config: EngineConfig, spec: ModelSpec) -> BlockBytes:
    layers, item_bytes = spec.layer_specs, _ITEM_BYTES[config.cache.dtype]
    return lambda members: NativeCacheMemory.bytes_per_block(tuple(layers[i] for i in members), config.cache.block_size, item_bytes)


def _size(config: EngineConfig, spec: ModelSpec, kinds: Mapping[str, int]) -> tuple[Budget, CacheSize]:
    """What there is, once the weights are loaded, and how large the cache is therefore.

    Raises:
        ConfigError: there is no room for a request of the longest length.
    """
    budget = cpu_budget(config, sum(kinds.values()), compiled_bound(spec, config))
    return budget, size_kinds(config, budget, _layout(config, spec), _block_bytes(config, spec))


class CompiledWorker:
    """Implements what an executor needs of a rank.

    Args:
        seconds: that loading took.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedProgram, seconds: float) -> None:
        self._phases = [Phase("load", seconds)]
        self._results: deque[StepResult] = deque()
        spec, scheduler, block_size = loaded.spec, config.scheduler, config.cache.block_size
        layers = spec.layer_specs
        layout = _layout(config, spec)
        compiled = CpuProgram(loaded.program, threads=config.device.threads, activations=config.device.activations)
        with self._phase("tables"):
            tables = HostTables.empty(scheduler.max_num_seqs, config.model.max_model_len, block_size, two_kinds=bool(layout.sliding))
            state = SamplerState(scheduler.max_num_seqs)
        with self._phase("memory"):
            budget, size = _size(config, spec, loaded.kinds)
            self._shape = shape_of(size, layout, _block_bytes(config, spec), block_size, tables.sliding_column)
        with self._phase("cache"):
            second = SlidingBlocks(frozenset(layout.sliding), size.sliding_blocks) if layout.sliding else None
            try:
                memory = NativeCacheMemory(layers, CacheKinds(size.num_blocks, second), block_size, config.cache.dtype)
            except MemoryError:
                raise ConfigError(cannot_allocate(config, budget, size.num_blocks, cache_bytes(self._shape))) from None
        slots = SlotMemory(tables.tokens, tables.blocks, state.host_numbers, block_size, tables.sliding_column)
        processed = config.model.logprobs_mode == "processed_logprobs"
        self._steps = NativeSteps(compiled.steps(memory.caches, slots), memory, tables, state, processed_logprobs=processed)

        def prompt(slot: int, count: int) -> Int32:
            return tables.tokens[slot, :count]

        self._diagnosis = Diagnosis(native_look.look_into(compiled, layers), prompt, state, Circumstances.of(config))
        with self._phase("warm-up"):
            for plan in first_steps(config):
                if NO_MEMORY in (self._steps.run(plan).errors or {}).values():
                    raise ConfigError(address_space.told(f"to compute with {config.model.name}, now that its KV cache is allocated"))
            state.leave(all_slots(config))
        self._report = ready_report(
            config,
            budget,
            self._shape,
            vocab_size=spec.vocab_size,
            max_model_len=size.max_model_len,
            weights_kinds=loaded.kinds,
            cache_bytes=cache_bytes(self._shape),
            attention="native-cpu",
            phases=self._phases,
            warnings=list(size.warnings),
        )

    @property
    def cache_shape(self) -> CacheShape:
        return self._shape

    @property
    def ready_report(self) -> EngineReady:
        return self._report

    @property
    def tries(self) -> bool:
        return True

    def submit(self, plan: StepPlan) -> None:
        """Run a step: it has run when this returns. Requests that it could not do have an error in its result."""
        result = self._steps.run(plan)
        if result.errors:
            result.errors |= self._diagnosis.explain([slot for slot, why in result.errors.items() if why == NO_TOKEN])
        self._results.append(result)

    def collect(self) -> StepResult:
        """The result of the oldest step not collected yet."""
        return self._results.popleft()

    def prepare(self, *, idle: bool) -> bool:
        """Nothing is left to prepare."""
        return False

    def shutdown(self) -> None:
        """Release the model, the cache and the tables. The worker cannot be used any more."""
        self._results.clear()
        for name in ("_steps", "_diagnosis"):
            if hasattr(self, name):
                delattr(self, name)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._phases.append(Phase(name, time.perf_counter() - began))
