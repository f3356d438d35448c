"""`CompiledWorker`: one rank of a model that compiled code runs from the first layer to the draw. Without torch, as long as it can do.

Most requests want nothing but that. The first one that wants more (penalties, logprobs, biases, lists of tokens) has a `Runner` built
over the same tables and the same cache, which takes all steps from then on: whole ones by the same compiled code.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.attention.kinds import CacheKinds, cache_layout
from octavo.attention.native_memory import NativeCacheMemory
from octavo.config.types import EngineConfig
from octavo.errors import ConfigError
from octavo.models.program_loader import LoadedProgram, load_program
from octavo.ops.cpu import decoder_kernels
from octavo.ops.cpu.cpu_program import CpuProgram
from octavo.ops.cpu.steps import SlotMemory
from octavo.protocol.engine import EngineReady, Phase
from octavo.protocol.params import SamplingParams
from octavo.protocol.step import CacheShape, StepPlan, StepResult
from octavo.sampling.state import SamplerState
from octavo.worker.host_tables import HostTables
from octavo.worker.memory import activation_bound, cannot_allocate, cpu_budget, size_cache
from octavo.worker.native_steps import NativeSteps
from octavo.worker.report import ready_report
from octavo.worker.torch_import import TorchMissing, import_beside
from octavo.worker.warmup import first_steps

if TYPE_CHECKING:
    from octavo.worker.tensor_steps import TensorSteps

logger = logging.getLogger(__name__)

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
    loaded = load_program(config, decoder_kernels(), progress)
    if loaded is None or cache_layout(loaded.spec.layer_specs, config.model.max_model_len, 0, two_kinds=True).sliding:
        return None
    return CompiledWorker(config, loaded, time.perf_counter() - began)


class CompiledWorker:
    """Implements what an executor needs of a rank.

    Args:
        seconds: that loading took.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedProgram, seconds: float) -> None:
        self._config = config
        self._loaded = loaded
        self._phases = [Phase("load", seconds)]
        self._results: deque[StepResult] = deque()
        self._tensors: TensorSteps | None = None
        self._importing: Future[None] | None = None
        spec, scheduler, block_size = loaded.spec, config.scheduler, config.cache.block_size
        weights = sum(loaded.kinds.values())
        self._compiled = CpuProgram(loaded.program, threads=config.device.threads, activations=config.device.activations)
        with self._phase("tables"):
            self._tables = HostTables(scheduler.max_num_seqs, config.model.max_model_len, block_size)
            self._state = SamplerState(scheduler.max_num_seqs, None)
        with self._phase("memory"):
            budget = cpu_budget(config, weights, activation_bound(spec, config, 4))
            layout = cache_layout(spec.layer_specs, config.model.max_model_len, 0, two_kinds=True)
            block_bytes = NativeCacheMemory.bytes_per_block(spec.layer_specs, block_size, _ITEM_BYTES[config.cache.dtype])
            size = size_cache(config, budget, block_bytes, layout.window)
            self._shape = CacheShape(size.num_blocks, block_size, block_bytes, layout.window)
        with self._phase("cache"):
            try:
                self._memory = NativeCacheMemory(spec.layer_specs, CacheKinds(size.num_blocks), block_size, config.cache.dtype)
            except MemoryError:
                raise ConfigError(cannot_allocate(config, budget, size.num_blocks, size.num_blocks * block_bytes)) from None
        memory = SlotMemory(self._tables.tokens, self._tables.blocks, self._state.host_numbers, block_size, 0)
        self._steps = NativeSteps(self._compiled.steps(self._memory.caches, memory), self._tables, self._state)
        with self._phase("warm-up"):
            for plan in first_steps(config):
                self.submit(plan)
                self._results.clear()
            self._state.leave(np.arange(scheduler.max_num_seqs, dtype=np.int32))
        self._report = ready_report(
            config,
            budget,
            self._shape,
            vocab_size=spec.vocab_size,
            max_model_len=size.max_model_len,
            weights_kinds=loaded.kinds,
            cache_bytes=size.num_blocks * block_bytes,
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
    def uses_tensors(self) -> bool:
        """A request has wanted more than compiled code does."""
        return self._tensors is not None

    def getting_ready(self, sampling: SamplingParams) -> Future[Any] | None:
        """What a request has to wait for, while the others go on; None: nothing. The first that wants more waits for torch's import.

        An import that failed is not tried again: those that need torch are told why there is none, and hold up nobody.
        """
        if self._tensors is not None or NativeSteps.serves(sampling):
            return None
        if self._importing is None:
            self._importing = import_beside("octavo.worker.tensor_steps")
        there = self._importing.done() and self._importing.exception() is None
        return None if there else self._importing

    def submit(self, plan: StepPlan) -> None:
        """Run a step: it has run when this returns.

        Raises:
            Exception: the step could not run, and the next one can.
        """
        if self._tensors is None and not all(NativeSteps.serves(init.sampling) for init in plan.init):
            self._use_tensors()
        if self._tensors is not None:
            self._results.append(self._tensors.run(plan))
            return
        began = time.perf_counter()
        self._state.leave(plan.free_slots)
        self._state.enter(plan.init)
        self._tables.leading.update(plan)
        if plan.forced is not None:
            self._tables.write_known(plan.forced)
        if len(plan.copy_src):
            self._memory.copy_blocks(0, plan.copy_src, plan.copy_dst)
        if plan.num_tokens:
            tokens = self._steps.launch(plan)
        else:
            self._tables.update(plan)
            tokens = np.zeros(0, np.int32)
        slots = plan.slots[plan.sample]
        result = StepResult(plan.step_id, slots, tokens, step_seconds=time.perf_counter() - began)
        if (tokens < 0).any():
            result.errors = self._explain(slots[tokens < 0].tolist())
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
        if (tensors := getattr(self, "_tensors", None)) is not None:
            tensors.close()
        for name in ("_tensors", "_steps", "_memory", "_compiled", "_tables", "_state", "_loaded"):
            if hasattr(self, name):
                delattr(self, name)

    def _explain(self, slots: list[int]) -> dict[int, str]:
        """Why the logits of slots are not usable, as far as can be said without torch where it cannot be imported."""
        if self._importing is None or (self._importing.done() and self._importing.exception() is None):
            try:
                return self._use_tensors().explain(slots)
            except ImportError as error:
                self._importing = Future()
                self._importing.set_exception(TorchMissing(error))
        return dict.fromkeys(slots, "The model computed NaN or infinite logits for this request.")

    def _use_tensors(self) -> TensorSteps:
        if self._tensors is None:
            from octavo.worker.tensor_steps import TensorSteps

            self._tensors = TensorSteps(self._config, self._loaded, self._compiled, self._memory, self._tables, self._state)
            logger.info("A request wants more than the compiled kernels do: torch was loaded for it.")
        return self._tensors

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._phases.append(Phase(name, time.perf_counter() - began))
