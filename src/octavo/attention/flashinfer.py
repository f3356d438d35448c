"""Paged attention by the FlashInfer package, where it is installed and asked for.

FlashInfer's paged prefill wrapper (Ye et al. 2025) computes every row of a step, decodes being chunks of one token: one module to
compile. It is planned once a step and layer geometry, on the host. Cache and writes to it are those of `attention/triton.py`,
whose layout FlashInfer calls HND. Steps are not captured as graphs: FlashInfer plans through buffers of its own, not as data.

Seen working with flashinfer-python 0.7.4 on an H200 (torch 2.11, CUDA 13.0): heads of 64, 128 and 256, 16-bit and float8 caches,
windows, soft caps. What it costs there beside Octavo's own kernels is in docs/performance.md.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.attention.base import Attend, KvScales, LayerSpec, StepBatch
from octavo.attention.kinds import CacheKinds
from octavo.attention.kv_calibration import FLOAT8
from octavo.attention.paged_cache import PagedCache
from octavo.config.types import EngineConfig
from octavo.errors import ConfigError
from octavo.layers.attention import QkNorm
from octavo.layers.rope import Rotation
from octavo.ops.transfer import upload_many
from octavo.protocol.step import Int32

WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer's documentation recommends."""
TURNS = 3
"""Wrappers a geometry in turn: planning fills a pinned buffer that the device may still be reading for the step before."""
_HEAD_SIZES = (64, 128, 256)


def unsupported(config: EngineConfig, layers: tuple[LayerSpec, ...]) -> str | None:
    """Why FlashInfer cannot run these layers; None: it can."""
    if importlib.util.find_spec("flashinfer") is None or importlib.util.find_spec("triton") is None:
        return "the package flashinfer-python is not installed (pip install octavo[flashinfer])"
    if config.device.capability < (8, 0):
        return f"{config.device.name} is too old for it; compute capability 8.0 is needed"
    dtype, cache = config.model.dtype, config.cache.dtype
    if dtype not in ("bfloat16", "float16") or cache not in (dtype, "float8_e4m3fn"):
        return f"it runs bfloat16 and float16 models with a cache of the same type or fp8, not {dtype} with a {cache} cache"
    if config.cache.calibrate:
        return "it takes scales as numbers, and cannot have those that --calculate-kv-scales finds while running"
    if any(layer.value_dim is not None or layer.sinks is not None for layer in layers):
        return "latent attention and attention sinks, which this model needs, are not wired to it"
    sizes = sorted({layer.head_dim for layer in layers} - set(_HEAD_SIZES))
    if sizes:
        return f"it has kernels for heads of {', '.join(map(str, _HEAD_SIZES))}, not of {', '.join(map(str, sizes))}"
    return None


@dataclass(frozen=True)
class Pages:
    """A step's cache pages as FlashInfer wants them: lists of pages one behind the other, with the places where rows begin."""

    query_starts: Int32
    """[rows + 1] tokens."""
    page_starts: Int32
    """[rows + 1]"""
    last_page: Int32
    """[rows] tokens in the last page of each row."""
    row: Int32
    """[pages] whose page it is."""
    column: Int32
    """[pages] its place in the row's block table."""


def list_pages(start: Int32, count: Int32, block_size: int) -> Pages:
    """The pages that rows read which compute `count` tokens from `start` on. start, count: [rows]."""
    context = start + count
    pages = -(-context // block_size)
    row = np.repeat(np.arange(len(pages), dtype=np.int32), pages)
    page_starts = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    return Pages(
        query_starts=np.concatenate([[0], np.cumsum(count)]).astype(np.int32),
        page_starts=page_starts,
        last_page=(context - (pages - 1) * block_size).astype(np.int32),
        row=row,
        column=(np.arange(len(row)) - page_starts[row]).astype(np.int32),
    )


class FlashInferAttention:
    """Owns the KV cache of all layers. Implements `AttentionBackend`.

    Args:
        dtype: of the cache: bfloat16, float16 or float8_e4m3fn.
        model_dtype: bfloat16 or float16; default that of the cache.
        scales: of a float8 cache, by layer, one number each; default 1.0.

    Raises:
        ConfigError: scales by head, which FlashInfer does not take; or its kernels cannot be compiled here.
    """

    name = "flashinfer"
    reads_before_window = None

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        model_dtype: torch.dtype | None = None,
        scales: Mapping[int, KvScales] | None = None,
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        if dtype == FLOAT8 and any(s.k.numel() > 1 for s in (scales or {}).values()):
            raise ConfigError("--attention-backend FLASHINFER takes one scale a layer; this checkpoint has KV scales by head. Use auto.")
        self.cache = PagedCache(layers, CacheKinds(num_blocks), block_size, dtype, device, scales)
        self._layers = layers
        self._dtype = dtype
        self._model_dtype = model_dtype or dtype
        self._device = device
        given = {layer: (s.k.item(), s.v.item()) for layer, s in (scales or {}).items()} if dtype == FLOAT8 else {}
        self._scales = [given.get(layer, (1.0, 1.0)) for layer in range(len(layers))]
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[LayerSpec, list[Any]] = {
            layer: [BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2") for _ in range(TURNS)]
            for layer in dict.fromkeys(layers)
        }
        self._turn = 0
        self._compile()

    def _compile(self) -> None:
        """Have the package find its kernels, or compile them, which takes minutes: now, not in a request."""
        pages = list_pages(np.zeros(1, np.int32), np.ones(1, np.int32), self.cache.block_size)
        try:
            for layer, turns in self._wrappers.items():
                self._plan(turns[0], layer, pages, torch.zeros(1, dtype=torch.int32, device=self._device))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError, ImportError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(
                f"--attention-backend FLASHINFER: the package has no kernels for this model and could not compile them: {reason[0]} "
                f"It needs nvcc and ninja for that, or the package flashinfer-jit-cache. --attention-backend TRITON_ATTN needs neither."
            ) from error

    @staticmethod
    def bytes_per_block(layers: tuple[LayerSpec, ...], block_size: int, dtype: torch.dtype) -> int:
        return PagedCache.bytes_per_block(layers, block_size, dtype)

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self.cache.copy_blocks(src, dst)

    def plan(self, batch: StepBatch) -> Attend:
        pages = list_pages(batch.cpu_start, batch.cpu_count, self.cache.block_size)
        row, column = upload_many([pages.row, pages.column], self._device)
        indices = batch.block_tables[row, column]
        self._turn = (self._turn + 1) % TURNS
        wrappers = {layer: turns[self._turn] for layer, turns in self._wrappers.items()}
        for layer, wrapper in wrappers.items():
            self._plan(wrapper, layer, pages, indices)
        return FlashInferAttend(self, [wrappers[layer] for layer in self._layers], batch.cache_slots)

    def _plan(self, wrapper: Any, layer: LayerSpec, pages: Pages, indices: torch.Tensor) -> None:
        """indices: [pages] int32 on the device, the blocks that `pages` names."""
        wrapper.plan(
            torch.from_numpy(pages.query_starts),
            torch.from_numpy(pages.page_starts),
            indices,
            torch.from_numpy(pages.last_page),
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            self.cache.block_size,
            causal=True,
            sm_scale=layer.scale,
            window_left=-1 if layer.sliding_window is None else layer.sliding_window - 1,
            logits_soft_cap=layer.soft_cap,
            q_data_type=self._model_dtype,
            kv_data_type=self._dtype,
            o_data_type=self._model_dtype,
        )

    def run(self, layer: int, wrapper: Any, q: torch.Tensor) -> torch.Tensor:
        """Attend over what is cached. q: [tokens, heads, head_dim], tokens and heads at any distance; the same shape comes back."""
        keys, values = self.cache.of(layer)
        k_scale, v_scale = self._scales[layer]
        scales = {"k_scale": k_scale, "v_scale": v_scale} if self._dtype == FLOAT8 else {}
        # Left to itself it would fill its result with zeros first: a launch more. Every token of a step is computed.
        out: torch.Tensor = wrapper.run(q, (keys, values), out=torch.empty(q.shape, dtype=q.dtype, device=q.device), **scales)
        return out


@dataclass(frozen=True)
class FlashInferAttend:
    """Implements `Attend` and `layers.attention.FusedAttend`."""

    backend: FlashInferAttention
    wrappers: list[Any]
    """By layer, planned."""
    cache_slots: torch.Tensor

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.backend.cache.write(layer, k, v, self.cache_slots)
        return self.backend.run(layer, self.wrappers[layer], q)

    def attend_qkv(self, layer: int, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None) -> torch.Tensor:
        q = self.backend.cache.write_qkv(layer, qkv, rotation, qk_norm, self.cache_slots)
        return self.backend.run(layer, self.wrappers[layer], q).view(len(qkv), -1)
