"""Which attention backend runs a model on a device."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from octavo.attention.kinds import CacheLayout, SlidingBlocks, cache_layout
from octavo.attention.torch_paged import TorchPagedAttention
from octavo.config.types import EngineConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend, KvScales, LayerSpec


def attention_class(config: EngineConfig, layers: tuple[LayerSpec, ...]) -> Any:
    """The fastest backend that supports the device, the dtypes and the layers, or the one asked for: a class.

    Raises:
        ConfigError: none can do what the settings ask for with this model on this device; says why.
    """
    plain = all(layer.value_dim is None and layer.sinks is None for layer in layers)
    if config.device.native_kernels and plain:
        from octavo.attention.native_cpu import NativeCpuAttention

        return NativeCpuAttention
    if config.attention == "flashinfer":
        from octavo.attention.flashinfer import FlashInferAttention, unsupported

        if (reason := unsupported(config, layers)) is not None:
            raise ConfigError(f"--attention-backend FLASHINFER: {reason}.")
        return FlashInferAttention
    reason = _no_triton(config, layers)
    if reason is None and config.batch_invariant:
        from octavo.attention.invariant import InvariantAttention

        return InvariantAttention
    if reason is None:
        from octavo.attention.triton import TritonAttention

        return TritonAttention
    for wanted, setting in (
        (config.device.kind == "cuda" and config.batch_invariant, "--batch-invariant"),
        (config.cache.dtype == "float8_e4m3fn", "--kv-cache-dtype fp8"),
        (config.attention == "triton", "--attention-backend TRITON_ATTN"),
    ):
        if wanted:
            raise ConfigError(f"{setting} needs Octavo's Triton kernels, but {reason}.")
    return TorchPagedAttention


def _no_triton(config: EngineConfig, layers: tuple[LayerSpec, ...]) -> str | None:
    """Why the Triton kernels cannot be used; None: they can."""
    device = config.device
    if config.attention == "torch":
        return "--attention-backend TORCH_SDPA asks for other ones"
    if device.kind != "cuda":
        return "there is no GPU"
    if device.capability < (8, 0):
        return f"{device.name} is too old for them (compute capability {device.capability[0]}.{device.capability[1]}; 8.0 is needed)"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if any(layer.value_dim is not None or layer.sinks is not None for layer in layers):
        return "they have no latent attention and no attention sinks, which this model needs"
    from octavo.attention.triton import TritonAttention

    if not TritonAttention.supports(layers, getattr(torch, config.model.dtype), getattr(torch, config.cache.dtype)):
        sizes = sorted({layer.head_dim for layer in layers})
        return (
            f"they run bfloat16 and float16 models with a cache of the same type or fp8 and heads of 16 to 256, not {config.model.dtype} "
            f"with a {config.cache.dtype} cache and heads of {', '.join(map(str, sizes))}"
        )
    return None


def layout_of(config: EngineConfig, layers: tuple[LayerSpec, ...], whole: tuple[LayerSpec, ...]) -> CacheLayout:
    """The kinds of cache that a model has here.

    Args:
        layers: those of this rank. whole: those of all stages of a pipeline, which have one block table.
    """
    kernels = attention_class(config, layers)
    if config.parallel.pipeline > 1:
        layout = cache_layout(whole, config.model.max_model_len, kernels.reads_before_window, two_kinds=False)
        return replace(layout, first=tuple(range(len(layers))))
    return cache_layout(layers, config.model.max_model_len, kernels.reads_before_window, two_kinds=True)


def block_bytes(config: EngineConfig, layers: tuple[LayerSpec, ...]) -> Callable[[tuple[int, ...]], int]:
    """What gives the bytes of a cache block of some of `layers`, by their numbers."""
    kernels, dtype = attention_class(config, layers), getattr(torch, config.cache.dtype)
    return lambda members: int(kernels.bytes_per_block(tuple(layers[i] for i in members), config.cache.block_size, dtype))


def wasted_windows(config: EngineConfig, layout: CacheLayout) -> str | None:
    """What to tell the user of a model whose windows save no memory here; None: they do, or it has none."""
    if not layout.wasted:
        return None
    if config.parallel.pipeline > 1:
        why, instead = "The stages of a pipeline have one block table", "--tensor-parallel-size divides a model without this"
    else:
        why, instead = "FlashInfer keeps every token of a request", "Octavo's own kernels (--attention-backend TRITON_ATTN) do not"
    return f"{why}: {layout.wasted} layers with a sliding window keep what it has left behind. {instead}."


def make_attention(
    config: EngineConfig,
    layers: tuple[LayerSpec, ...],
    layout: CacheLayout,
    num_blocks: int,
    sliding_blocks: int,
    device: torch.device,
    scales: Mapping[int, KvScales] | None = None,
) -> AttentionBackend:
    """An `AttentionBackend` with a cache of `num_blocks` blocks.

    Args:
        sliding_blocks: of the second kind of cache, if `layout` has one.
        scales: of a float8 cache, by layer, as the checkpoint has them. Those of other layers are found while running, if the config
            says so.
    """
    chosen = attention_class(config, layers)
    options: dict[str, Any] = {}
    match chosen.name:
        case "triton":
            most = config.scheduler.max_num_seqs * config.model.max_model_len
            options = {"scales": scales, "model_dtype": getattr(torch, config.model.dtype), "max_gathered": most}
            options["calibrate"] = config.cache.calibrate
        case "flashinfer":
            options = {"scales": scales, "model_dtype": getattr(torch, config.model.dtype)}
        case "triton-invariant":
            options = {"scales": scales}
    if layout.sliding:
        options["sliding"] = SlidingBlocks(frozenset(layout.sliding), sliding_blocks)
    backend: AttentionBackend = chosen(layers, num_blocks, config.cache.block_size, getattr(torch, config.cache.dtype), device, **options)
    return backend
