"""Which attention backend runs a model on a device."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from octavo.attention.torch_paged import TorchPagedAttention
from octavo.config.types import EngineConfig

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend, LayerSpec


def attention_class(config: EngineConfig, layers: tuple[LayerSpec, ...]) -> Any:
    """The fastest backend that supports the device, the dtypes and the layers: a class, to be called as `TorchPagedAttention` is."""
    if any(layer.value_dim is not None or layer.sinks is not None for layer in layers):
        return TorchPagedAttention
    if config.device.native_kernels:
        from octavo.attention.native_cpu import NativeCpuAttention

        return NativeCpuAttention
    dtype, cache_dtype = getattr(torch, config.model.dtype), getattr(torch, config.cache.dtype)
    if config.device.kind == "cuda" and config.device.capability >= (8, 0) and importlib.util.find_spec("triton") is not None:
        from octavo.attention.triton import TritonAttention

        if TritonAttention.supports(layers, dtype, cache_dtype):
            return TritonAttention
    return TorchPagedAttention


def make_attention(config: EngineConfig, layers: tuple[LayerSpec, ...], num_blocks: int, device: torch.device) -> AttentionBackend:
    """An `AttentionBackend` with a cache of `num_blocks` blocks."""
    chosen = attention_class(config, layers)
    scheduler = config.scheduler
    make = partial(chosen, layers, num_blocks, config.cache.block_size, getattr(torch, config.cache.dtype), device)
    gathers = config.device.kind == "cuda" and chosen is not TorchPagedAttention
    backend: AttentionBackend = make(max_gathered=scheduler.max_num_seqs * config.model.max_model_len) if gathers else make()
    return backend
