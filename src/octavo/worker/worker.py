"""`Worker`: one rank. Builds its parts, sizes the KV cache, warms up, then runs steps in the order they come."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.attention.base import AttentionBackend, Calibrated, GraphAttention, GraphShape
from octavo.attention.select import block_bytes, layout_of, make_attention, wasted_windows
from octavo.checkpoint import text_part
from octavo.config.sizes import format_bytes
from octavo.config.types import EngineConfig
from octavo.errors import ConfigError
from octavo.models.compiled import CompiledDecoder
from octavo.models.decoder import Decoder, Model
from octavo.models.loader import has_low_bit, load_model
from octavo.ops.registry import Ops, load_ops
from octavo.parallel.group import ONE_RANK, Ranks
from octavo.protocol.engine import EngineReady, Phase
from octavo.protocol.step import CacheShape, Int32, StepPlan, StepResult
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplerState
from octavo.worker import torch_threads
from octavo.worker.diagnosis import NO_TOKEN, Circumstances, Diagnosis
from octavo.worker.early_room import early_room
from octavo.worker.graph_layout import CapturePlan, capture_plan
from octavo.worker.memory import (
    Budget,
    CacheSize,
    CudaMemory,
    GraphMemory,
    activation_bound,
    cache_bytes,
    cannot_allocate,
    cpu_budget,
    cuda_budget,
    measured_device,
    shape_of,
    size_kinds,
)
from octavo.worker.report import ready_report
from octavo.worker.runner import Launched, Runner, settle
from octavo.worker.slots import SlotTables
from octavo.worker.step_halves import is_out_of_memory
from octavo.worker.tensor_look import look_into
from octavo.worker.warmup import all_slots, first_steps, rehearsal_steps, worst_step

if TYPE_CHECKING:
    from octavo.attention.kv_calibration import KvCalibration
    from octavo.worker.graphs import StepGraphs
    from octavo.worker.native_steps import NativeSteps

logger = logging.getLogger(__name__)

EVEN = 0.9
"""Memory free on the poorest rank's device, of that on the richest's, from which on nothing is said."""
PROFILE_BLOCKS = 2
"""Blocks of the throw-away cache that the worst step is measured with: it only ever names the null block."""
COMPILER_THREADS = 16
"""Kernels compiled at once."""
BUSY_SHARE = 0.05
"""While there are requests, capturing what was left for later may take this share of the time."""


class Worker:
    """Implements what an executor needs of a rank.

    Args:
        progress: called with (phase, done, total) while it loads.
        defer_graphs: capture at first what every step can do with; the rest when `prepare` is called.
        ranks: who computes the model together.

    Raises:
        CheckpointError, UnsupportedModel: the model cannot be loaded.
        ConfigError: it does not fit into memory as configured.
    """

    def __init__(
        self, config: EngineConfig, progress: Callable[[str, int, int], None], *, defer_graphs: bool = False, ranks: Ranks = ONE_RANK
    ) -> None:
        self._ranks = ranks
        self._device = ranks.device(config.device.kind, config.parallel)
        if self._device.index is not None:  # one of several GPUs
            torch.cuda.set_device(self._device)
        config = self._config = measured_device(config, self._device)
        self._launched: deque[Launched | StepResult] = deque()
        self._phases: list[Phase] = []
        self._inner = 0.0
        """Seconds of the phases within the present one."""
        self._slow: frozenset[int] = frozenset()
        """See `slow_rows`."""
        self._later: deque[GraphShape] = deque()
        """Shapes to capture in gaps."""
        self._next_capture = 0.0
        """When a busy worker may capture again."""
        # Compiled kernels bring threads of their own: torch's, which spin for a while after each operation, would be in their way.
        torch_threads.take(self, 1 if config.device.native_kernels else max(1, config.device.threads // config.parallel.per_node))

        with self._phase("load"):
            kernels = "native" if config.device.native_kernels else config.device.kind
            self._ops: Ops = load_ops(kernels, batch_invariant=config.batch_invariant)
            check_room = early_room(config, self._device)
            self._model: Model = load_model(config, self._ops, self._device, progress, ranks.group, ranks.pipeline, check_room)
        layers, block_size = self._model.layer_specs, config.cache.block_size
        self._layout = layout_of(config, layers, self._model.spec.layer_specs)
        with self._phase("tables"):
            scheduler, two_kinds = config.scheduler, bool(self._layout.sliding)
            self._tables = SlotTables(scheduler.max_num_seqs, config.model.max_model_len, block_size, self._device, two_kinds=two_kinds)
            self._state = SamplerState(scheduler.max_num_seqs, self._device)
            processed = config.model.logprobs_mode == "processed_logprobs"
            self._sampler = Sampler(self._state, self._tables.tokens, processed_logprobs=processed, draw=self._ops.draw)
        with self._phase("memory"):
            budget = self._measure()
            size, self._shape = self._size_cache(budget)
        with self._phase("cache"):
            self._attention = self._allocate_cache(size, budget)
        with self._phase("graphs"):
            self._graphs = self._make_graphs(self._attention, self._to_capture.shapes)
            self._capture(progress, defer=defer_graphs)
        self._runner = Runner(
            self._model,
            self._attention,
            self._tables,
            self._state,
            self._sampler,
            self._graphs,
            divisible=config.parallel.world == 1,
            calibration=self._calibration,
        )
        self._native = self._native_steps()
        self._diagnosis = Diagnosis(look_into(self._model, self._device), self._prompt, self._state, Circumstances.of(config))
        with self._phase("warm-up"):
            for plan in first_steps(config):
                self.submit(plan)
                _settled(self._launched.popleft())
            if (calibration := self._calibration) is not None:
                with calibration.rehearsing():
                    for plan in first_steps(config):
                        settle(self._runner.launch(plan))
            self._state.leave(all_slots(config))
        self._report = self._make_report(size, budget)
        if self._device.type == "cuda":
            # What is there now stays: the collector need not look at it again while steps run.
            gc.collect()
            gc.freeze()

    @property
    def _calibration(self) -> KvCalibration | None:
        return self._attention.calibration if isinstance(self._attention, Calibrated) else None

    @property
    def cache_shape(self) -> CacheShape:
        return self._shape

    @property
    def ready_report(self) -> EngineReady:
        return self._report

    @property
    def tries(self) -> bool:
        return self._device.type == "cpu" and self._config.parallel.world == 1

    def submit(self, plan: StepPlan) -> None:
        """Launch a step; on a CPU it has run when this returns.

        Raises:
            Exception: the step could not run. Nothing is left to collect for it, and the next step can run.
        """
        if self._native is not None:
            self._launched.append(self._native.run(plan))
            return
        try:
            self._launched.append(self._runner.launch(plan))
        except RuntimeError as e:
            # Give fragments back, so that the next, smaller step has a chance.
            if self._device.type == "cuda" and is_out_of_memory(e):
                torch.cuda.empty_cache()
            raise

    def collect(self) -> StepResult:
        """The result of the oldest step not collected yet; waits for it.

        Raises:
            EngineDead: a rank did not take part in it.
        """
        result = _settled(self._launched.popleft())
        self.check_ranks()
        if result.errors:
            result.errors |= self._diagnosis.explain([slot for slot, why in result.errors.items() if why == NO_TOKEN])
        return result

    def check_ranks(self) -> None:
        """From any thread.

        Raises:
            EngineDead: the device has given up waiting for another rank.
        """
        self._ranks.check()

    def preparation_due(self, *, idle: bool) -> bool:
        """Whether `prepare` would do something."""
        return bool(self._later) and (idle or time.perf_counter() >= self._next_capture)

    @property
    def left_to_prepare(self) -> bool:
        return bool(self._later)

    def prepare(self, *, idle: bool) -> bool:
        """Do a piece of work that makes later steps quicker, if one is left: a few hundredths of a second.

        Args:
            idle: nobody waits for a step. Otherwise it is done only now and then, and waits for the steps under way.

        Returns:
            whether something is left to do.
        """
        if self._graphs is not None and self.preparation_due(idle=idle):
            began = time.perf_counter()
            shape = self._later.popleft()
            torch.cuda.synchronize(self._device)
            try:
                self._graphs.capture(shape)
            except RuntimeError as e:
                if not is_out_of_memory(e):
                    raise
                logger.warning("No memory to capture further steps (%d left): they run with larger graphs.", len(self._later) + 1)
                self._later.clear()
                torch.cuda.empty_cache()
            self._next_capture = began + (time.perf_counter() - began) / BUSY_SHARE
        return bool(self._later)

    def shutdown(self) -> None:
        """Release the model, the cache and the tables. The worker cannot be used any more."""
        self._launched.clear()
        self._close_graphs()
        torch_threads.give_back(self)
        for name in ("_runner", "_native", "_diagnosis", "_graphs", "_attention", "_sampler", "_state", "_tables", "_model", "_ops"):
            if hasattr(self, name):
                delattr(self, name)
        self._ranks.close()
        if self._device.type == "cuda":
            gc.unfreeze()
            gc.collect()  # The model's tensors sit in reference cycles, and other processes may want the memory.
            torch.cuda.empty_cache()

    def _native_steps(self) -> NativeSteps | None:
        """All steps in compiled code; None where the model is not compiled."""
        if not isinstance(self._model, CompiledDecoder):
            return None
        from octavo.attention.native_cpu import NativeCpuAttention
        from octavo.worker.native_steps import steps_over

        assert isinstance(self._attention, NativeCpuAttention)  # a layer that is compiled needs no other
        processed = self._config.model.logprobs_mode == "processed_logprobs"
        return steps_over(self._model, self._attention, self._tables, self._state, processed_logprobs=processed)

    def _prompt(self, slot: int, count: int) -> Int32:
        """The first tokens of the request in a slot."""
        return np.asarray(self._tables.tokens[slot, :count].cpu())

    def _close_graphs(self) -> None:
        """In a method of its own: a local name in `shutdown` would keep the graphs, and with them the cache, alive to its end."""
        graphs: StepGraphs | None = getattr(self, "_graphs", None)
        if graphs is not None:
            graphs.close()

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """A phase within another one counts for itself."""
        began, outer, self._inner = time.perf_counter(), self._inner, 0.0
        yield
        whole = time.perf_counter() - began
        seconds, self._inner = whole - self._inner, outer + whole
        self._phases.append(Phase(name, seconds))
        logger.info("Start: %s took %.2f s", name, seconds)

    def _size_cache(self, budget: Budget) -> tuple[CacheSize, CacheShape]:
        layout, block_size, bytes_of = self._layout, self._config.cache.block_size, block_bytes(self._config, self._model.layer_specs)
        size = size_kinds(self._config, budget, layout, bytes_of)
        everywhere = self._ranks.smallest
        free = self._config.device.free_bytes
        least, most = everywhere(free), -everywhere(-free)
        poorest = everywhere(self._ranks.number if free == least else self._config.parallel.world)
        size = dataclasses.replace(
            size,
            warnings=(*size.warnings, *uneven_ranks(poorest, least, most)),
            num_blocks=everywhere(size.num_blocks),
            sliding_blocks=everywhere(size.sliding_blocks),
            max_model_len=everywhere(size.max_model_len),
        )
        return size, shape_of(size, layout, bytes_of, block_size, self._tables.first_column)

    def _make_attention(self, num_blocks: int, sliding_blocks: int) -> AttentionBackend:
        model = self._model
        return make_attention(self._config, model.layer_specs, self._layout, num_blocks, sliding_blocks, self._device, model.kv_scales)

    def _allocate_cache(self, size: CacheSize, budget: Budget) -> AttentionBackend:
        """The attention backend with the whole cache. A size that was asked for may be more than the system gives."""
        try:
            attention: AttentionBackend = self._make_attention(size.num_blocks, size.sliding_blocks)
            return attention
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(e):
                raise
            raise ConfigError(cannot_allocate(self._config, budget, size.num_blocks, cache_bytes(self._shape))) from None

    def _make_graphs(self, attention: AttentionBackend, shapes: Sequence[GraphShape]) -> StepGraphs | None:
        """What captures steps with this cache, nothing captured yet; None where the device or the settings rule it out."""
        draw = self._ops.draw
        if not self._capturable or draw is None or not isinstance(attention, GraphAttention):
            return None
        from octavo.worker.graphs import StepGraphs

        return StepGraphs(self._model, attention, self._tables, self._state, draw, shapes, self._config.scheduler.inflight)

    @property
    def _capturable(self) -> bool:
        return self._device.type == "cuda" and not self._config.enforce_eager and self._model.capturable

    @property
    def _to_capture(self) -> CapturePlan:
        scheduler = self._config.scheduler
        return capture_plan(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, self._slow)

    def _capture(self, progress: Callable[[str, int, int], None], *, defer: bool) -> None:
        if self._graphs is None:
            return
        plan = self._to_capture
        now: tuple[GraphShape, ...] = (*plan.largest, *plan.next)
        if defer:
            self._later.extend(plan.rest)
        else:
            now = plan.shapes
        for done, shape in enumerate(now):
            progress("graphs", done, len(now))
            self._graphs.capture(shape)
        progress("graphs", len(now), len(now))
        torch.cuda.empty_cache()  # What the steps before each capture took, outside of the graphs' own pool.

    def _measure(self) -> Budget:
        """What the weights, the worst step and the graphs take, and what that leaves."""
        config, weights = self._config, self._model.weights_bytes
        if self._device.type == "cpu":
            itemsize = getattr(torch, config.model.dtype).itemsize
            return cpu_budget(config, weights, activation_bound(self._model.spec, config, itemsize))
        attention = self._make_attention(PROFILE_BLOCKS, PROFILE_BLOCKS)
        self._compile_ahead(attention)
        if self._capturable and isinstance(attention, GraphAttention):
            self._slow = self._slow_rows()
        torch.cuda.reset_peak_memory_stats(self._device)
        settle(Runner(self._model, attention, self._tables, self._state, self._sampler).launch(worst_step(config)))
        peak = torch.cuda.max_memory_allocated(self._device)
        graphs = self._measure_graphs(attention)
        del attention
        return cuda_budget(config, weights, peak, graphs, CudaMemory.now(self._device))

    def _compile_ahead(self, attention: AttentionBackend) -> None:
        """Have the kernels of all kinds of steps compiled side by side: one after the other, as steps meet them, takes many seconds.

        Only for the time it saves: a kernel that this misses is compiled when it is first launched.
        """
        plan = self._to_capture
        graphs = self._make_graphs(attention, plan.shapes)
        if graphs is None:
            return
        from octavo.ops.triton.launch import compiling_only

        runner = Runner(self._model, attention, self._tables, self._state, self._sampler)
        try:
            with self._phase("kernels"), compiling_only(COMPILER_THREADS):
                for step in rehearsal_steps(self._config):
                    runner.launch(step)
                for shape in (*plan.largest, *plan.next):
                    graphs.rehearse(shape)
        except Exception:
            logger.debug("Compiling kernels ahead failed; they are compiled as they are met.", exc_info=True)
        finally:
            torch.cuda.synchronize(self._device)
            self._state.leave(all_slots(self._config))

    def _slow_rows(self) -> frozenset[int]:
        """What all ranks leave to larger steps."""
        config, model = self._config, self._model
        # Answers must not depend on what was measured at a start; and experts' products, which are the most of a layer, are not looked at.
        if config.batch_invariant or not isinstance(model, Decoder) or model.spec.moe is not None:
            return frozenset()
        from octavo.worker.slow_rows import FEWEST_ROWS, product_seconds, slow_rows

        numbers = [shape.rows for shape in self._to_capture.shapes if not shape.chunks and shape.rows >= FEWEST_ROWS]
        if not numbers:
            return frozenset()
        found: Mapping[int, float] = {}
        try:
            with self._phase("products"):
                found = product_seconds(
                    model.products.layers, model.products.head, numbers, getattr(torch, config.model.dtype), self._device
                )
        except RuntimeError as e:
            if not is_out_of_memory(e):
                raise
            logger.debug("No memory to measure products in.", exc_info=True)
        torch.cuda.empty_cache()
        agreed = {rows: float(self._ranks.smallest(round(1e9 * found.get(rows, 1.0)))) for rows in numbers}
        slow = slow_rows(agreed)
        logger.debug("Nanoseconds of products by rows: %s. Slower than more rows: %s", agreed, sorted(slow))
        return slow

    def _measure_graphs(self, attention: AttentionBackend) -> GraphMemory:
        """Capture the largest graphs and a small one: the first take the pool that all share, the last what each takes besides."""
        plan = self._to_capture
        small = plan.next[-1:]
        graphs = self._make_graphs(attention, (*plan.largest, *small))
        if graphs is None:
            return GraphMemory(0, 0)
        moments = [CudaMemory.now(self._device)]
        for shapes in (plan.largest, small):
            for shape in shapes:
                graphs.capture(shape)
            moments.append(CudaMemory.now(self._device))
        graphs.close()
        layers, others = len(self._model.layer_specs), len(plan.next) + len(plan.rest)
        return GraphMemory.of(*moments, layers=layers, largest=len(plan.largest), others=others)

    def _model_warnings(self) -> list[str]:
        origin = self._config.model.hf_config.get(text_part.ORIGIN)
        warnings = [f"{origin}: its language model is served, for text; what it reads images with was left out."] if origin else []
        if self._config.parallel.whole_experts and self._model.spec.moe is None:
            warnings.append(f"--enable-expert-parallel has no effect: {self._config.model.architecture} has no experts.")
        return warnings

    def _cache_warnings(self) -> list[str]:
        """What the user should know about windows that save nothing, and about a float8 cache."""
        wasted = wasted_windows(self._config, self._layout)
        return [*([wasted] if wasted else []), *cache_warnings(self._config, len(self._model.layer_specs), len(self._model.kv_scales))]

    def _make_report(self, size: CacheSize, budget: Budget) -> EngineReady:
        warnings = [
            *self._model_warnings(),
            *size.warnings,
            *quantized_for_nothing(self._config, self._model.weights_kinds, stored=lambda: has_low_bit(self._config)),
            *self._cache_warnings(),
        ]
        return ready_report(
            self._config,
            budget,
            self._shape,
            vocab_size=self._model.spec.vocab_size,
            max_model_len=size.max_model_len,
            weights_kinds=self._model.weights_kinds,
            cache_bytes=cache_bytes(self._shape),
            attention=self._attention.name,
            sums=self._ranks.sums,
            phases=self._phases,
            warnings=warnings,
        )


def _settled(launched: Launched | StepResult) -> StepResult:
    """Wait for a step."""
    return launched if isinstance(launched, StepResult) else settle(launched)


def uneven_ranks(poorest: int, least: int, most: int) -> list[str]:
    """What the user should know about memory that all ranks but one have in vain.

    Args:
        poorest: the rank on whose device the least was free at the start.
        least, most: bytes free there, and where the most was.
    """
    if least >= EVEN * most:
        return []
    return [
        f"The device of rank {poorest} had {format_bytes(least)} of memory free, that of another rank {format_bytes(most)}: all keep a cache "
        "of the size that the least has room for."
    ]


def quantized_for_nothing(config: EngineConfig, kinds: Mapping[str, int], *, stored: Callable[[], bool] = lambda: True) -> list[str]:
    """What the user should know about low-bit weights none of which are kept in few bits.

    Args:
        kinds: see `Model.weights_kinds`.
        stored: whether the checkpoint has low-bit weights; asked where none are kept.
    """
    method, device = config.model.quantization, config.device
    if method is None or any(kind.startswith(("4-bit", "8-bit")) for kind in kinds):
        return []
    if not stored():
        return [
            f"config.json says that the weights are quantised with {method}, but none of them is: all are stored plainly ({', '.join(kinds)}) "
            "and kept so."
        ]
    why = "no kernel here takes them as they are stored"
    if device.kind == "cuda" and device.capability < (8, 9):
        if method in ("fp8", "modelopt"):
            return []  # said when the settings were resolved
        why += f"; float8 takes compute capability 8.9, and {device.name} has {device.capability[0]}.{device.capability[1]}"
    return [f"Weights quantised with {method} are kept dequantised ({', '.join(kinds)}): {why}. They take the memory of unquantised ones."]


def cache_warnings(config: EngineConfig, layers: int, scaled: int) -> list[str]:
    """What the user should know about a float8 cache.

    Args:
        scaled: layers for which the checkpoint has scales.
    """
    cache, device = config.cache, config.device
    if cache.dtype != "float8_e4m3fn":
        able = device.kind == "cuda" and device.capability >= (8, 9) and scaled == layers
        return ["The checkpoint has the scales of an FP8 KV cache: --kv-cache-dtype fp8 holds twice the tokens."] if able else []
    if cache.calibrate or scaled == layers:
        return []
    where = f"{layers - scaled} layers have no k_scale and v_scale" if scaled else "the checkpoint has no k_scale and v_scale"
    return [
        f"FP8 KV cache: {where}, so a scale of 1.0 is used. Compare some answers with --kv-cache-dtype auto, or have scales found while "
        "running: --calculate-kv-scales."
    ]
