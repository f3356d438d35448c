"""How much memory there is for the KV cache: what the device has, minus what everything else needs, measured or bounded.

`size_cache` is the rule (pure); the rest finds its numbers. On a GPU the worst legal step is run and its peak read from the
allocator. On a CPU that would take seconds to find out little, so its need is bounded by arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.attention.kinds import CacheLayout
from octavo.config import address_space
from octavo.config.device import host_memory
from octavo.config.sizes import format_bytes
from octavo.config.types import EngineConfig
from octavo.errors import ConfigError
from octavo.models.spec import ModelSpec
from octavo.protocol.step import CacheKind, CacheShape, window_blocks
from octavo.worker.table_shape import table_bytes

if TYPE_CHECKING:
    import torch

CPU_CACHE_BYTES = 4 * 2**30
"""Largest default cache on a CPU: other programs live there too. Pages are only taken as blocks are first used."""
CPU_FRACTION = 0.5
"""Of the host memory still free, this much may go to the cache by default."""
ADDRESS_GROWTH = 108 * 2**20
"""Where its address space is limited: what a process on a CPU maps while it serves, besides steps. A stack for the grammar engine (64 MiB)
and what that works with (16), threads, Python's heap. The grammar engine's vocabulary comes on top."""
CONTEXT_BYTES = 2**30
"""What the driver keeps for a process is less; memory in use beyond it belongs to other processes."""
DRIVER_BYTES_A_LAYER = 32 << 10
"""What the driver keeps for a layer of a captured step. On an H200 0.8 MiB for 28 layers; were it ten times as much elsewhere, that would
still be less than `HEADROOM`."""
HEADROOM = 0.01
"""Of a GPU's memory, left free in any case: other processes may want a little more, and fragments are not worth a crash."""
LARGEST_TILES_BYTES = 192 * 2**20
"""Attention tiles and masks, and a sampler or logprobs slice with its copies (see those files for the single limits)."""


SPARE_TOKENS = 256
"""Kernels lay out a few more tokens than there are."""
SCORING_BYTES = 64 * 2**20
"""Slices of logits, and their logarithms in double precision (`sampling/host_logprobs.py`)."""


@dataclass(frozen=True)
class Budget:
    """Device memory by use, in bytes."""

    total: int
    other: int
    """In use by other processes (and by the driver)."""
    weights: int
    activations: int
    """The worst step, the tables and the captured graphs."""
    cache: int
    """What is left for the KV cache: a limit, not a size."""


@dataclass(frozen=True)
class GraphMemory:
    """What captured graphs keep, in bytes."""

    shared: int
    """The largest graphs, with the pool that all share."""
    others: int
    """All the others, beyond that."""

    @classmethod
    def of(cls, before: CudaMemory, after: CudaMemory, with_another: CudaMemory, *, layers: int, largest: int, others: int) -> GraphMemory:
        """By what this process's allocator knows. What is gone from the card would say more, but also what other processes have allocated
        and freed meanwhile.

        Args:
            before, after: the largest graphs were captured, whose pool has room for the others too.
            with_another: then, a small one; what it keeps, each of the others does.
            layers: of the model.
            largest, others: how many graphs there will be.
        """
        driver = layers * DRIVER_BYTES_A_LAYER
        pool, kept = max(0, after.reserved - before.reserved), max(0, with_another.allocated - after.allocated)
        return cls(pool + largest * driver, (kept + driver) * others)


@dataclass(frozen=True)
class CacheSize:
    num_blocks: int
    """Including the null block."""
    max_model_len: int
    warnings: tuple[str, ...] = ()
    sliding_blocks: int = 0
    """Of the second kind of cache, if there is one."""


@dataclass(frozen=True)
class SlidingKind:
    """What the size of a second kind of cache follows from."""

    window: int
    bytes_per_block: int


def size_cache(
    config: EngineConfig, budget: Budget, bytes_per_block: int, window: int | None = None, sliding: SlidingKind | None = None
) -> CacheSize:
    """How many blocks to allocate, and the longest sequence that they allow.

    A second kind gets twice what its windows can take when as many requests run as may, and never more blocks than the first.

    Args:
        bytes_per_block, window: of the first kind.

    Raises:
        ConfigError: max_model_len does not fit; says which length does, and which setting would make it fit.
    """
    cache, block_size, length = config.cache, config.cache.block_size, config.model.max_model_len
    most = 0 if sliding is None else _most_sliding_blocks(config, sliding.window)
    longest = -(-length // block_size)
    if window is not None:
        longest = min(longest, window_blocks(window, block_size))
    if cache.num_blocks_override is not None:
        num_blocks, second = cache.num_blocks_override, min(cache.num_blocks_override, most)
        room = (num_blocks - 1) * block_size
        if num_blocks - 1 >= longest:
            return CacheSize(num_blocks, length, sliding_blocks=second)
        if not config.model.auto_max_model_len:
            warning = f"The KV cache is set to {num_blocks} blocks: no request can have more than {room} tokens."
            return CacheSize(num_blocks, length, (warning,), second)
        return CacheSize(num_blocks, min(length, max(1, room)), sliding_blocks=second)

    warnings: tuple[str, ...] = ()
    available = budget.cache
    if cache.memory_bytes is not None:
        if cache.memory_bytes > budget.cache:
            warnings = (
                f"The KV cache is set to {format_bytes(cache.memory_bytes)}, but only {format_bytes(max(0, budget.cache))} are free for it.",
            )
        available = cache.memory_bytes
    num_blocks = max(0, available) // bytes_per_block
    if sliding is not None:
        num_blocks = max(0, available) // (bytes_per_block + sliding.bytes_per_block)
        if num_blocks > most:
            num_blocks = (available - most * sliding.bytes_per_block) // bytes_per_block
    if config.device.kind == "cpu" and cache.memory_bytes is None:
        # On a CPU more than all requests at their longest would only take memory from others.
        num_blocks = min(num_blocks, 1 + config.scheduler.max_num_seqs * -(-length // block_size))

    needed = 1 + longest
    if num_blocks >= needed:
        return CacheSize(num_blocks, length, warnings, min(num_blocks, most))
    fits = max(0, (num_blocks - 1) * block_size)
    if config.model.auto_max_model_len and fits > 0:
        warnings = (*warnings, f"max_model_len is {fits}: what the KV cache has room for ({length} asked).")
        return CacheSize(num_blocks, fits, warnings, min(num_blocks, most))
    if config.model.auto_max_model_len:
        needed = 2  # the null block, and one with tokens: the least that is of use
    needed_bytes = needed * bytes_per_block + (min(needed, most) * sliding.bytes_per_block if sliding is not None else 0)
    raise ConfigError(_does_not_fit(config, budget, available, needed_bytes, fits))


BlockBytes = Callable[[tuple[int, ...]], int]
"""Bytes that a block takes in these layers."""


def size_kinds(config: EngineConfig, budget: Budget, layout: CacheLayout, block_bytes: BlockBytes) -> CacheSize:
    """`size_cache` for the kinds that a model has.

    Raises:
        ConfigError: see `size_cache`.
    """
    second = SlidingKind(layout.sliding_window, block_bytes(layout.sliding)) if layout.sliding else None
    return size_cache(config, budget, block_bytes(layout.first), layout.window, second)


def shape_of(size: CacheSize, layout: CacheLayout, block_bytes: BlockBytes, block_size: int, first_column: int) -> CacheShape:
    """What the core is told of a cache of this size.

    Args:
        first_column: where in a block table the second kind's part begins.
    """
    second = None
    if layout.sliding:
        second = CacheKind(size.sliding_blocks, block_bytes(layout.sliding), layout.sliding_window, size.num_blocks, first_column)
    return CacheShape(size.num_blocks, block_size, block_bytes(layout.first), layout.window, second)


def cache_bytes(shape: CacheShape) -> int:
    """Of all blocks."""
    second = shape.sliding
    return shape.num_blocks * shape.bytes_per_block + (0 if second is None else second.num_blocks * second.bytes_per_block)


def _most_sliding_blocks(config: EngineConfig, window: int) -> int:
    """Blocks that all running requests together can need in layers with a window: theirs, and those of the steps on their way.
    And as many again for what the prefix cache keeps."""
    scheduler, block_size = config.scheduler, config.cache.block_size
    steps = (1 + scheduler.inflight) * -(-scheduler.max_num_batched_tokens // block_size)
    return 1 + 2 * scheduler.max_num_seqs * window_blocks(window, block_size) + steps


def _does_not_fit(config: EngineConfig, budget: Budget, available: int, needed: int, fits: int) -> str:
    auto, block_size = config.model.auto_max_model_len, config.cache.block_size
    asked = f"max_model_len=auto, here the length of one block ({block_size})," if auto else f"max_model_len={config.model.max_model_len}"
    text = f"{asked} needs {format_bytes(needed)} of KV cache, but there are {format_bytes(max(0, available))} for it. "
    limited = address_space.limit() if config.device.kind == "cpu" and config.cache.memory_bytes is None else None
    if limited is not None and not fits:
        steps = f"lower what a step may take ({format_bytes(budget.activations)}) with --max-num-batched-tokens and --max-num-seqs, "
        text += f"No length fits into the address space of {format_bytes(limited)} (ulimit -v): raise that limit, "
        return text + (steps if budget.activations > needed else "") + "or use a smaller model."
    text += f"Lower --max-model-len to {fits} or less (auto finds it)" if fits else "No length fits: free memory or use a smaller model"
    if config.cache.memory_bytes is not None:
        return text + f", or raise --kv-cache-memory-bytes to at least {needed}."
    if limited is not None:
        text += f", or raise the limit of the address space ({format_bytes(limited)}, ulimit -v)."
        return text + (_smaller_steps(budget) if budget.activations > needed else "")
    if config.device.kind == "cpu" and needed <= available / CPU_FRACTION:  # of what is really free
        return text + f", or set --cpu-kvcache-space to at least {needed / 2**30:.2f} (GiB)."
    if config.device.kind == "cpu":
        return text + "." + (_smaller_steps(budget) if budget.activations > needed else "")
    used = budget.weights + budget.activations
    fraction = (needed + min(budget.other, CONTEXT_BYTES) + used) / max(1, budget.total)
    enough = f"{fraction + 0.005:.2f}"
    room = budget.total - budget.other - used - int(HEADROOM * budget.total)
    if fraction < 1.0 and needed <= room and float(enough) > config.cache.memory_utilization:
        text += f", or raise --gpu-memory-utilization to {enough}"
    text += "."
    if budget.activations > 2 * needed:
        text += _smaller_steps(budget)
    if budget.other > CONTEXT_BYTES:
        text += f" Other processes hold {format_bytes(budget.other)} of the GPU's {format_bytes(budget.total)}."
    return text


def _smaller_steps(budget: Budget) -> str:
    return f" A step may take {format_bytes(budget.activations)}: --max-num-batched-tokens and --max-num-seqs lower that."


def cannot_allocate(config: EngineConfig, budget: Budget, num_blocks: int, cache_bytes: int) -> str:
    """What to tell the user whose system refused a cache of this size."""
    free = max(0, budget.cache)
    text = f"A KV cache of {format_bytes(cache_bytes)} cannot be allocated: about {format_bytes(free)} are free for it. "
    if config.cache.num_blocks_override is not None:
        return text + f"Lower --num-gpu-blocks-override to {free * num_blocks // cache_bytes} or less."
    if config.cache.memory_bytes is None:
        return text + "Free memory, or lower --gpu-memory-utilization."
    if config.device.kind == "cpu":
        return text + f"Lower --kv-cache-memory-bytes (or --cpu-kvcache-space) to {free} bytes ({free / 2**30:.2f} GiB) or less."
    return text + f"Lower --kv-cache-memory-bytes to {free} or less."


def activation_bound(spec: ModelSpec, config: EngineConfig, itemsize: int) -> int:
    """Bytes that the worst legal step may take on a CPU, from above: live tensors of a layer, gathered keys, logits, tables."""
    scheduler, length = config.scheduler, config.model.max_model_len
    qkv = max((layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim for layer in spec.layer_specs)
    per_token = 4 * spec.hidden_size + 2 * qkv + 3 * _widest_block(spec)
    gathered = 4 * length * max(layer.num_kv_heads * layer.head_dim for layer in spec.layer_specs)
    logits = 4 * 4 * min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens) * spec.vocab_size
    tables = table_bytes(scheduler.max_num_seqs, length, config.cache.block_size)
    return (scheduler.max_num_batched_tokens * per_token + gathered) * itemsize + logits + tables + LARGEST_TILES_BYTES


def compiled_bound(spec: ModelSpec, config: EngineConfig) -> int:
    """Bytes that the scratch memory of the compiled CPU kernels grows to, see native/engine.h, from above; with NumPy's part of a step
    that scores tokens, and the tables."""
    scheduler, length = config.scheduler, config.model.max_model_len
    tokens = scheduler.max_num_batched_tokens + SPARE_TOKENS
    heads = max(layer.num_heads * layer.head_dim for layer in spec.layer_specs)
    qkv = max((layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim for layer in spec.layer_specs)
    inner = spec.mlp.intermediate_size
    # Inputs of linear layers: as they are, in groups, rounded to 16 bits, and some numbers for each 32.
    per_token = 10.5 * (spec.hidden_size + heads + inner) + 4 * (3 * spec.hidden_size + qkv + heads + 2 * inner)
    # Logits: as they come, scaled, those to choose from, and a copy to score; and those of prompt tokens a slice at a time.
    logits = 4 * 4 * min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens) * spec.vocab_size
    return int(tokens * per_token) + logits + SCORING_BYTES + table_bytes(scheduler.max_num_seqs, length, config.cache.block_size)


def _widest_block(spec: ModelSpec) -> int:
    """Numbers between the matrices of a feed-forward block, for one token: of all of its experts, where it has them."""
    if spec.moe is None:
        return spec.mlp.intermediate_size
    experts = spec.moe.routing.top_k * (spec.moe.intermediate_size + spec.hidden_size)
    return max(spec.mlp.intermediate_size, experts + spec.moe.shared_size)


def cpu_budget(config: EngineConfig, weights: int, activations: int) -> Budget:
    """After the weights are loaded: half of what is still free, 4 GiB at most, in equal shares for the ranks and replicas of
    this host; and no more addresses than the process may have.
    """
    total, available = host_memory(addresses=False)
    left = available - activations
    # A size that was asked for is compared with all that is free, not with our default's share of it.
    here = config.parallel.per_node * config.parallel.data
    cache = (left if config.cache.sized else min(CPU_CACHE_BYTES * here, int(left * CPU_FRACTION))) // here
    if (most := address_space.limit()) is not None:  # of these, others use none
        growth = ADDRESS_GROWTH + address_space.BYTES_A_TOKEN * config.model.vocab_size
        total, cache = min(total, most), min(cache, most - address_space.used() - activations - growth)
    other = max(0, config.device.total_bytes - config.device.free_bytes)
    return Budget(total=total, other=other, weights=weights, activations=activations, cache=cache)


def measured_device(config: EngineConfig, device: torch.device) -> EngineConfig:
    """The config with the GPU's memory as its driver counts it: what was free before anything was loaded.

    Raises:
        ConfigError: torch cannot use the GPU.
    """
    if device.type != "cuda":
        return config
    import torch

    try:
        free, total = torch.cuda.mem_get_info(device)
    except torch.OutOfMemoryError:
        raise ConfigError(f"{config.device.name} has no memory left for another process. Free some, or use --device cpu.") from None
    except RuntimeError as e:
        raise ConfigError(f"torch {torch.__version__} cannot use {config.device.name}: {str(e).splitlines()[0]}") from None
    return dataclasses.replace(config, device=dataclasses.replace(config.device, free_bytes=free, total_bytes=total))


@dataclass(frozen=True)
class CudaMemory:
    """A GPU's memory at one moment, in bytes."""

    total: int
    free: int
    reserved: int
    """By this process's allocator."""
    allocated: int = 0
    """Of that, by tensors."""

    @staticmethod
    def now(device: torch.device) -> CudaMemory:
        import torch

        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return CudaMemory(total, free, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))


def cuda_budget(config: EngineConfig, weights: int, peak: int, graphs: GraphMemory, memory: CudaMemory) -> Budget:
    """After the worst step has run, and with nothing but weights and tables allocated any more.

    The allowed fraction of the card is for this process alone. Others may hold what is beyond it; where they hold more, there is less
    for us, down to what is really free.

    Args:
        peak: the allocator's, which counts weights, tables and the step.
    """
    other = max(0, memory.total - memory.free - memory.reserved)
    used = peak + graphs.shared + graphs.others
    share = int(memory.total * config.cache.memory_utilization) - min(other, CONTEXT_BYTES) - used
    there = memory.total - other - used - int(HEADROOM * memory.total)
    cache = there if config.cache.sized else min(share, there)
    return Budget(total=memory.total, other=other, weights=weights, activations=max(0, used - weights), cache=cache)
