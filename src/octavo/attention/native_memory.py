"""The KV cache of the compiled CPU kernels. No torch.

Layout of a layer's cache: keys [num_blocks, kv_heads, head_dim, padded block], so that a vector of scores is made without a
horizontal sum; values [num_blocks, kv_heads, block_size, padded head_dim], so that their weighted sum is too. Both paddings are
to whole vectors. Only places that hold a token of a row are ever read into its result, whatever lies beside them.

All layers of a block lie together, a layer's values behind its keys. Large pages were tried: reading is 3% faster, but a virtual
machine that is handed its memory by the host pays ten times as much for the first touch of each.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.attention.base import LayerSpec
from octavo.attention.kinds import CacheKinds
from octavo.ops.cpu import abi
from octavo.ops.cpu.pages import fresh_bytes
from octavo.protocol.step import Int32

LANES = 16
"""Numbers in the widest vector that the kernels are compiled for."""


class NativeCacheMemory:
    """Owns the keys and values of all layers.

    Args:
        dtype: float32 or float16.

    Raises:
        MemoryError: the system does not give so much.
    """

    def __init__(self, layers: tuple[LayerSpec, ...], kinds: CacheKinds, block_size: int, dtype: npt.DTypeLike) -> None:
        self.kinds = kinds
        itemsize = np.dtype(dtype).itemsize
        sizes = [_numbers(s, block_size) for s in layers]
        # A block is what all layers of its kind have of it. Never written means never touched: the system hands out these pages only
        # when a block is first used.
        strides = [sum(sum(size) for i, size in enumerate(sizes) if kinds.of(i) == kind) for kind in (0, 1)]
        counts = (kinds.num_blocks, 0 if kinds.sliding is None else kinds.sliding.num_blocks)
        self.blocks = [
            fresh_bytes(count * stride * itemsize).view(dtype).reshape(count, stride) for count, stride in zip(counts, strides, strict=True)
        ]
        """By kind: [blocks, numbers of a block]."""
        self.keys: list[npt.NDArray[Any]] = []
        """By layer: [blocks, kv_heads, head_dim, padded block]."""
        self.values: list[npt.NDArray[Any]] = []
        """By layer: [blocks, kv_heads, block_size, padded head_dim]."""
        at = [0, 0]
        for i, (spec, (keys, values)) in enumerate(zip(layers, sizes, strict=True)):
            whole, first = self.blocks[kinds.of(i)], at[kinds.of(i)]
            shapes = (
                (spec.num_kv_heads, spec.head_dim, padded(block_size)),
                (spec.num_kv_heads, block_size, padded(spec.head_dim)),
            )
            for of, begin, shape in zip((self.keys, self.values), (first, first + keys), shapes, strict=True):
                of.append(whole[:, begin : begin + math.prod(shape)].reshape(len(whole), *shape))
            at[kinds.of(i)] += keys + values
        described = [
            abi.Cache(
                keys=abi.address(keys),
                values=abi.address(values),
                block_stride=strides[kinds.of(i)],
                heads=spec.num_heads,
                kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                padded_dim=padded(spec.head_dim),
                block_size=block_size,
                padded_block=padded(block_size),
                half=int(np.dtype(dtype) == np.float16),
                window=spec.sliding_window or 0,
                scale=spec.scale,
                soft_cap=spec.soft_cap or 0.0,
                sliding=kinds.of(i),
            )
            for i, (spec, keys, values) in enumerate(zip(layers, self.keys, self.values, strict=True))
        ]
        self.caches: ctypes.Array[abi.Cache] = abi.array_of(abi.Cache, described)
        """By layer; points into this object's arrays."""

    @staticmethod
    def bytes_per_block(layers: tuple[LayerSpec, ...], block_size: int, itemsize: int) -> int:
        return sum(sum(_numbers(s, block_size)) for s in layers) * itemsize

    def copy_blocks(self, source: Int32, destination: Int32) -> None:
        """Copy whole blocks, all layers of them.

        Args:
            source, destination: [copies] as plans name blocks, see `CacheKinds.copies`.
        """
        first = self.kinds.num_blocks
        for kind, blocks in enumerate(self.blocks):
            mine = (source >= first) == bool(kind)
            blocks[destination[mine] - first * kind] = blocks[source[mine] - first * kind]


def padded(count: int) -> int:
    return -(-count // LANES) * LANES


def _numbers(spec: LayerSpec, block_size: int) -> tuple[int, int]:
    """Of a block's keys, and of its values."""
    return spec.num_kv_heads * spec.head_dim * padded(block_size), spec.num_kv_heads * block_size * padded(spec.head_dim)
