"""`PagedCache`: the KV cache tensors of a GPU backend, how tokens are written to them, and the scales of a float8 one.

Layout: all layers of one shape and kind of cache in one allocation, [layers, 2, blocks, kv_heads, block_size, head_dim] (keys, then values), so
that one launch copies a block in every layer, and one head's block is one contiguous run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from octavo.attention.base import KvScales, LayerSpec
from octavo.attention.kinds import CacheKinds
from octavo.attention.kv_calibration import FLOAT8, LARGEST_FLOAT8, KvCalibration
from octavo.layers.attention import QkNorm
from octavo.layers.rope import Rotation
from octavo.ops.triton.copy_blocks import copy_blocks
from octavo.ops.triton.rope_cache import rope_cache


@dataclass(frozen=True)
class ScaleOfLayer:
    """What a cached number must be multiplied with to give the value: float32 on the device, [1] or [kv_heads]; None is 1."""

    k: torch.Tensor | None
    v: torch.Tensor | None


class PagedCache:
    """Owns the cache of all layers.

    Args:
        dtype: of the cache: bfloat16, float16 or float8_e4m3fn.
        scales: of a float8 cache, by layer; layers without any have 1.0. Other caches ignore them.
        batch_invariant: what is written for a token has the same bits however many are written with it.
        calibrate: find those of layers without any while the first tokens are computed.
    """

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        kinds: CacheKinds,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Mapping[int, KvScales] | None = None,
        *,
        batch_invariant: bool = False,
        calibrate: bool = False,
    ) -> None:
        self.block_size = block_size
        self.dtype = dtype
        self._batch_invariant = batch_invariant
        self.kinds = kinds
        self._allocations: list[tuple[int, torch.Tensor]] = []
        """With their kinds."""
        self._caches: list[torch.Tensor] = [torch.empty(0)] * len(layers)
        shapes = [(kinds.of(i), layer.num_kv_heads, layer.head_dim) for i, layer in enumerate(layers)]
        for shape in dict.fromkeys(shapes):
            members = [i for i, s in enumerate(shapes) if s == shape]
            kind, heads, dim = shape
            whole = torch.empty(len(members), 2, kinds.blocks(members[0]), heads, block_size, dim, dtype=dtype, device=device)
            self._allocations.append((kind, whole))
            for place, layer in enumerate(members):
                self._caches[layer] = whole[place]
        one = torch.ones(1, dtype=torch.float32, device=device)
        self._scales = [ScaleOfLayer(None, None)] * len(layers)
        self.calibration: KvCalibration | None = None
        if dtype == FLOAT8:
            given = {layer: KvScales(s.k.to(device), s.v.to(device)) for layer, s in (scales or {}).items()}
            if calibrate:
                sought = {i: KvScales(*torch.ones(2, s.num_kv_heads, device=device)) for i, s in enumerate(layers) if i not in given}
                self.calibration = KvCalibration(sought, kinds, device)
                given |= sought
            self._scales = [ScaleOfLayer(given[i].k, given[i].v) if i in given else ScaleOfLayer(one, one) for i in range(len(layers))]

    @staticmethod
    def bytes_per_block(layers: tuple[LayerSpec, ...], block_size: int, dtype: torch.dtype) -> int:
        return sum(2 * block_size * layer.num_kv_heads * layer.head_dim * dtype.itemsize for layer in layers)

    def of(self, layer: int) -> torch.Tensor:
        """[2, blocks, kv_heads, block_size, head_dim]"""
        return self._caches[layer]

    def scale(self, layer: int) -> ScaleOfLayer:
        return self._scales[layer]

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """See `AttentionBackend.copy_blocks`."""
        for kind, whole in self._allocations:
            source, destination = self.kinds.copies(kind, src, dst)
            copy_blocks(whole, source, destination)
            if self.calibration is not None:
                self.calibration.copied(kind, source, destination)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, cache_slots: torch.Tensor) -> None:
        """Store rotated keys, and values. k, v: [tokens, kv_heads, head_dim]; cache_slots: [tokens] int64."""
        if self.calibration is not None and self.calibration.watches(layer):
            self.calibration.see(layer, k, v, self._caches[layer], cache_slots)
        block, offset = cache_slots // self.block_size, cache_slots % self.block_size
        scale = self._scales[layer]
        for cache, x, factor in ((self._caches[layer][0], k, scale.k), (self._caches[layer][1], v, scale.v)):
            if factor is None:
                cache[block, :, offset] = x.to(cache.dtype)
            else:
                scaled = (x.float() / factor[:, None]).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
                cache.view(torch.uint8)[block, :, offset] = scaled.to(FLOAT8).view(torch.uint8)

    def write_qkv(
        self, layer: int, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, cache_slots: torch.Tensor
    ) -> torch.Tensor:
        """Norm and rotate q and k, store k and v: one launch, unless scales are being sought.

        Args:
            qkv: [tokens, (heads + 2 * kv_heads) * head_dim]; q is overwritten.

        Returns:
            [tokens, heads, head_dim] the rotated q, a view of qkv.
        """
        keys, values = self._caches[layer]
        scale = self._scales[layer]
        sought = self.calibration is not None and self.calibration.watches(layer)
        kv_heads, head_dim = keys.shape[1], keys.shape[3]
        q = rope_cache(
            qkv,
            rotation.positions,
            rotation.table,
            torch.full_like(cache_slots, -1) if sought else cache_slots,
            keys,
            values,
            qkv.shape[1] // head_dim - 2 * kv_heads,
            q_weight=None if qk_norm is None else qk_norm.q,
            k_weight=None if qk_norm is None else qk_norm.k,
            eps=1e-6 if qk_norm is None else qk_norm.eps,
            k_scale=scale.k,
            v_scale=scale.v,
            batch_invariant=self._batch_invariant,
            keep_keys=sought,
        )
        if sought:
            heads = qkv.view(len(qkv), -1, head_dim)
            self.write(layer, heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:], cache_slots)
        return q
