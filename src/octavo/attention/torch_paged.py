"""Paged attention in plain torch, for CPUs and for any device without its own kernel.

Layout: one K and one V tensor a layer, [num_blocks, kv_heads, block_size, head_dim], so that (block, head, offset) names a
contiguous row of head_dim numbers. Reading the cache is then a gather of such rows, and every gather names only rows that
hold a token of the sequence: what lies in unused parts of blocks, or in the null block, is never read, whatever it is.

Decodes (rows of one token) run together, without a Python loop over sequences. Rows are grouped into tiles of similar length,
so that one long context does not make short ones pay for it. Per tile: gather K, scores by batched matmul with the query heads
of a group side by side (K and V are not repeated), float32 softmax, and the weighted sum of V rows, which on a CPU is an
embedding bag: it reads V where it lies, without a gathered copy.

Prompt chunks run row by row through scaled_dot_product_attention, in tiles of queries that bound the size of the mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from octavo.attention.base import Attend, LayerSpec, StepBatch
from octavo.attention.kinds import CacheKinds, SlidingBlocks
from octavo.ops.transfer import upload
from octavo.protocol.step import Int32

TILE_BYTES = 16 * 2**20
"""Most bytes of gathered keys at once in a decode tile: bounds temporary memory and stays near the last-level cache."""
TILE_SLACK_TOKENS = 64
"""Contexts that differ by less than this share a tile: a further tile costs more than so much padding."""
MASK_ELEMENTS = 2**21
"""Most elements of one prompt mask tile."""
MASK_CACHE_ELEMENTS = 2**24
"""Masks of a step are kept from layer to layer up to this size in all, else made again in each layer."""


@dataclass(frozen=True)
class Geometry:
    """What the indices into a layer's cache depend on; layers that share it share the plan."""

    num_heads: int
    num_kv_heads: int
    sliding_window: int | None
    by_hand: bool
    """Scores are changed in a way that torch's fused attention does not know."""
    kind: int
    """Of cache."""

    @staticmethod
    def of(layer: LayerSpec, kind: int) -> Geometry:
        by_hand = layer.soft_cap is not None or layer.sinks is not None
        return Geometry(layer.num_heads, layer.num_kv_heads, layer.sliding_window, by_hand, kind)


@dataclass(frozen=True)
class DecodeTile:
    """Decodes of similar context length. n rows, padded to `length` keys each."""

    rows: torch.Tensor | None
    """[n] which rows of the step; None when they are all the decodes, in order."""
    num_rows: int
    length: int
    key_rows: torch.Tensor
    """[n * kv_heads * length] cache rows. Padding names the row's own first key: harmless to read."""
    value_rows: torch.Tensor | None
    """[n * heads, length] the same for each query head, for the embedding bag; None where that is not used."""
    padding: torch.Tensor | None
    """[n, 1, length] true where there is no key; None when nothing is padded."""


@dataclass(frozen=True)
class ChunkTile:
    """Queries `begin .. end - 1` of the step's tokens attend to keys `first_key .. last_key - 1` of their row."""

    begin: int
    end: int
    first_key: int
    last_key: int
    first_position: int
    """Position in the sequence of the first query."""
    causal: bool
    """Query i sees keys 0 .. i: no mask needed."""


@dataclass(frozen=True)
class Chunk:
    """One row's prompt chunk: keys `first_key .. first_key + length - 1` are gathered once a layer."""

    key_rows: torch.Tensor
    """[kv_heads * length] cache rows."""
    first_key: int
    length: int
    tiles: list[ChunkTile]
    masks: list[torch.Tensor | None] | None
    """By tile; None when they would take too much memory to keep."""


@dataclass(frozen=True)
class LayerPlan:
    """A step, seen by the layers of one geometry."""

    decode_tiles: list[DecodeTile]
    chunks: list[Chunk]
    write_rows: torch.Tensor
    """[tokens * kv_heads] cache rows of the step's own tokens."""


class TorchPagedAttention:
    """Owns the KV cache of all layers. Implements `AttentionBackend`.

    Args:
        dtype: of the cache. Narrower than the model's is converted on the way in and out.
        sliding: a second kind of cache, for some of the layers.
    """

    name = "torch-paged"
    reads_before_window = 0

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        sliding: SlidingBlocks | None = None,
    ) -> None:
        self._layers = layers
        self._kinds = kinds = CacheKinds(num_blocks, sliding)
        self._geometries = [Geometry.of(layer, kinds.of(i)) for i, layer in enumerate(layers)]
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        # Never written means never touched: on a CPU the system hands out these pages only when a block is first used.
        shapes = [(kinds.blocks(i), layer.num_kv_heads, block_size, layer.head_dim) for i, layer in enumerate(layers)]
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        self._values = [
            keys if layer.value_dim is not None else torch.empty_like(keys) for layer, keys in zip(layers, self._keys, strict=True)
        ]
        """Of a layer whose values are part of its keys: the keys."""
        self._sinks = [None if layer.sinks is None else torch.tensor(layer.sinks, device=device) for layer in layers]
        most_rows = max((blocks * heads * places for blocks, heads, places, _ in shapes), default=0)
        self._index_dtype = torch.int32 if most_rows < 2**31 else torch.int64
        self._bag = device.type == "cpu" and dtype == torch.float32

    @staticmethod
    def bytes_per_block(layers: tuple[LayerSpec, ...], block_size: int, dtype: torch.dtype) -> int:
        numbers = sum((2 if layer.value_dim is None else 1) * layer.num_kv_heads * layer.head_dim for layer in layers)
        return numbers * block_size * dtype.itemsize

    def plan(self, batch: StepBatch) -> Attend:
        plans = {geometry: self._plan_geometry(batch.of_kind(geometry.kind), geometry) for geometry in dict.fromkeys(self._geometries)}

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self._attend(layer, plans[self._geometries[layer]], q, k, v)

        return attend

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        copies = [self._kinds.copies(kind, src, dst) for kind in (0, 1)]
        for layer, spec in enumerate(self._layers):
            source, destination = copies[self._kinds.of(layer)]
            for cache in (self._keys[layer], self._values[layer]) if spec.value_dim is None else (self._keys[layer],):
                cache.index_copy_(0, destination, cache.index_select(0, source))

    def _plan_geometry(self, batch: StepBatch, geometry: Geometry) -> LayerPlan:
        write_rows = self._cache_rows(batch.cache_slots.view(1, -1), geometry.num_kv_heads)
        write_rows = write_rows.view(geometry.num_kv_heads, -1).t().reshape(-1).long()
        return LayerPlan(self._decode_tiles(batch, geometry), self._chunks(batch, geometry), write_rows)

    def _cache_rows(self, cache_slots: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """[n, length] token places (block * block_size + offset) -> [n, kv_heads, length] rows of head_dim numbers."""
        block, offset = cache_slots // self._block_size, cache_slots % self._block_size
        head = torch.arange(kv_heads, device=cache_slots.device, dtype=cache_slots.dtype).view(1, -1, 1)
        return (block.unsqueeze(1) * kv_heads + head) * self._block_size + offset.unsqueeze(1)

    def _decode_tiles(self, batch: StepBatch, geometry: Geometry) -> list[DecodeTile]:
        if batch.num_decodes == 0:
            return []
        context = batch.cpu_start[: batch.num_decodes] + 1
        first = _first_key(context, geometry.sliding_window)
        lengths = context - first
        widest = max(layer.head_dim for layer, g in zip(self._layers, self._geometries, strict=True) if g == geometry)
        tiles = tile_by_length(lengths, TILE_BYTES // (geometry.num_kv_heads * widest * self._dtype.itemsize))
        return [self._decode_tile(batch, geometry, rows, first, lengths, alone=len(tiles) == 1) for rows in tiles]

    def _decode_tile(self, batch: StepBatch, geometry: Geometry, rows: Int32, first: Int32, lengths: Int32, *, alone: bool) -> DecodeTile:
        length, n = int(lengths[rows].max()), len(rows)
        device_rows = None if alone else upload(rows, self._device).long()
        tables = batch.block_tables[:n] if device_rows is None else batch.block_tables.index_select(0, device_rows)
        offsets = torch.arange(length, device=self._device, dtype=torch.int32)
        row_first = upload(first[rows], self._device).unsqueeze(1)
        padding = None
        if int(lengths[rows].min()) < length:
            padding = offsets.unsqueeze(0) >= upload(lengths[rows], self._device).unsqueeze(1)
            offsets = torch.where(padding, 0, offsets)
        positions = row_first + offsets
        blocks = tables.gather(1, (positions // self._block_size).long())
        cache_slots = blocks.to(self._index_dtype) * self._block_size + positions % self._block_size
        key_rows = self._cache_rows(cache_slots, geometry.num_kv_heads)
        value_rows = None
        if self._bag:
            group = geometry.num_heads // geometry.num_kv_heads
            value_rows = key_rows.unsqueeze(2).expand(n, geometry.num_kv_heads, group, length).reshape(-1, length)
        return DecodeTile(device_rows, n, length, key_rows.reshape(-1), value_rows, None if padding is None else padding.unsqueeze(1))

    def _chunks(self, batch: StepBatch, geometry: Geometry) -> list[Chunk]:
        window = geometry.sliding_window
        begins = np.cumsum(batch.cpu_count) - batch.cpu_count
        described = []
        mask_elements = 0
        for row in range(batch.num_decodes, len(batch.cpu_start)):
            start, count, begin = int(batch.cpu_start[row]), int(batch.cpu_count[row]), int(begins[row])
            tiles = chunk_tiles(begin, start, count, window, maskless=not geometry.by_hand)
            mask_elements += sum((t.end - t.begin) * (t.last_key - t.first_key) for t in tiles if not t.causal)
            described.append((row, start + count, tiles))
        keep_masks = mask_elements <= MASK_CACHE_ELEMENTS
        chunks = []
        for row, context, tiles in described:
            first_key = tiles[0].first_key
            positions = torch.arange(first_key, context, device=self._device, dtype=torch.int32)
            blocks = batch.block_tables[row].index_select(0, positions // self._block_size)
            cache_slots = blocks.to(self._index_dtype) * self._block_size + positions % self._block_size
            key_rows = self._cache_rows(cache_slots.unsqueeze(0), geometry.num_kv_heads).view(-1)
            masks = [None if t.causal else self._mask(t, window) for t in tiles] if keep_masks else None
            chunks.append(Chunk(key_rows, first_key, context - first_key, tiles, masks))
        return chunks

    def _mask(self, tile: ChunkTile, window: int | None) -> torch.Tensor:
        """[queries, keys] float32: 0 where a query sees a key, -inf elsewhere."""
        query = torch.arange(tile.first_position, tile.first_position + tile.end - tile.begin, device=self._device).unsqueeze(1)
        key = torch.arange(tile.first_key, tile.last_key, device=self._device).unsqueeze(0)
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        return torch.zeros(hidden.shape, device=self._device).masked_fill_(hidden, -torch.inf)

    def _attend(self, layer: int, plan: LayerPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        spec = self._layers[layer]
        keys, values = self._keys[layer].view(-1, spec.head_dim), self._values[layer].view(-1, spec.head_dim)
        keys.index_copy_(0, plan.write_rows, k.reshape(-1, spec.head_dim).to(self._dtype))
        if spec.value_dim is None:
            values.index_copy_(0, plan.write_rows, v.reshape(-1, spec.head_dim).to(self._dtype))
        # The weighted sum takes whole rows of the cache; numbers past the values are dropped in the end.
        return self._outputs(layer, plan, keys, values, q)[..., : spec.value_dim]

    def _outputs(self, layer: int, plan: LayerPlan, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim]"""
        spec, sinks = self._layers[layer], self._sinks[layer]
        if len(plan.decode_tiles) == 1 and not plan.chunks:
            return self._decode(plan.decode_tiles[0], spec, sinks, keys, values, q)
        out = torch.empty_like(q)
        for tile in plan.decode_tiles:
            if tile.rows is None:
                out[: tile.num_rows] = self._decode(tile, spec, sinks, keys, values, q[: tile.num_rows])
            else:
                out.index_copy_(0, tile.rows, self._decode(tile, spec, sinks, keys, values, q.index_select(0, tile.rows)))
        for chunk in plan.chunks:
            self._prefill(chunk, spec, sinks, keys, values, q, out)
        return out

    def _decode(
        self, tile: DecodeTile, spec: LayerSpec, sinks: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor
    ) -> torch.Tensor:
        """q: [n, heads, head_dim] of the tile's rows; the same shape comes back."""
        n, heads, dim = q.shape
        batch, group = n * spec.num_kv_heads, heads // spec.num_kv_heads
        gathered = keys.index_select(0, tile.key_rows).view(batch, tile.length, dim).float()
        scores = torch.bmm((q.float() * spec.scale).reshape(batch, group, dim), gathered.transpose(1, 2))
        if spec.soft_cap is not None:
            scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
        scores = scores.view(n, heads, tile.length)
        if tile.padding is not None:
            scores.masked_fill_(tile.padding, -torch.inf)
        weights = _softmax(scores, None if sinks is None else sinks[:, None].expand(n, -1, -1))
        if tile.value_rows is not None:
            bag = F.embedding_bag(tile.value_rows, values, mode="sum", per_sample_weights=weights.view(-1, tile.length))
            return bag.view(n, heads, dim).to(q.dtype)
        gathered = values.index_select(0, tile.key_rows).view(batch, tile.length, dim).float()
        return torch.bmm(weights.view(batch, group, tile.length), gathered).view(n, heads, dim).to(q.dtype)

    def _prefill(
        self,
        chunk: Chunk,
        spec: LayerSpec,
        sinks: torch.Tensor | None,
        keys: torch.Tensor,
        values: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of a chunk's tokens into their rows of `out` [tokens, heads, head_dim]."""
        kv_heads, dim = spec.num_kv_heads, spec.head_dim
        group = spec.num_heads // kv_heads
        k = keys.index_select(0, chunk.key_rows).view(kv_heads, 1, chunk.length, dim).to(q.dtype)
        v = values.index_select(0, chunk.key_rows).view(kv_heads, 1, chunk.length, dim).to(q.dtype)
        # A key head serves its whole group of query heads through a stride of 0: nothing is repeated.
        k, v = k.expand(-1, group, -1, -1), v.expand(-1, group, -1, -1)
        for i, tile in enumerate(chunk.tiles):
            mask = None
            if not tile.causal:
                mask = self._mask(tile, spec.sliding_window) if chunk.masks is None else chunk.masks[i]
            queries = q[tile.begin : tile.end].view(-1, kv_heads, group, dim).permute(1, 2, 0, 3)
            seen = slice(tile.first_key - chunk.first_key, tile.last_key - chunk.first_key)
            if mask is None or (spec.soft_cap is None and sinks is None):
                mask = None if mask is None else mask.to(q.dtype)
                result = F.scaled_dot_product_attention(
                    queries, k[:, :, seen], v[:, :, seen], attn_mask=mask, is_causal=tile.causal, scale=spec.scale
                )
            else:
                result = _attention_by_hand(queries, k[:, :, seen], v[:, :, seen], mask, spec.scale, spec.soft_cap, sinks)
            out[tile.begin : tile.end] = result.permute(2, 0, 1, 3).reshape(-1, spec.num_heads, dim)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Over the last dimension, with one more score whose weight is dropped.

    Args:
        sinks: [..., 1]
    """
    if sinks is None:
        return torch.softmax(scores, -1)
    return torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1].contiguous()


def _attention_by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with soft-capped scores or sinks, one head at a time to bound memory.

    Args:
        q: [kv_heads, group, queries, head_dim]
        k, v: [kv_heads, group, keys, head_dim], the same for each of a group.
        mask: [queries, keys]
        sinks: [kv_heads * group]
    """
    out = torch.empty_like(q)
    for kv_head in range(q.shape[0]):
        keys, values = k[kv_head, 0].float(), v[kv_head, 0].float()
        for head in range(q.shape[1]):
            scores = (q[kv_head, head].float() * scale) @ keys.t()
            if soft_cap is not None:
                scores.div_(soft_cap).tanh_().mul_(soft_cap)
            sink = None if sinks is None else sinks[kv_head * q.shape[1] + head].expand(len(scores), 1)
            out[kv_head, head] = (_softmax(scores.add_(mask), sink) @ values).to(q.dtype)
    return out


def _first_key(context: Int32, window: int | None) -> Int32:
    """The first position that the last token of each context sees."""
    return np.zeros_like(context) if window is None else np.maximum(context - np.int32(window), 0).astype(np.int32)


def tile_by_length(lengths: Int32, most_tokens: int) -> list[Int32]:
    """Group rows of similar length, so that padding each to its group's longest wastes little.

    Args:
        lengths: [rows]
        most_tokens: rows * longest of a group stays below this (a single row may exceed it).

    Returns:
        Row numbers of each group. One group holds the rows in their given order.
    """

    def near(length: int, longest: int) -> bool:
        return length >= min(longest - TILE_SLACK_TOKENS, longest * 3 // 4)

    longest = int(lengths.max())
    if near(int(lengths.min()), longest) and len(lengths) * longest <= most_tokens:
        return [np.arange(len(lengths), dtype=np.int32)]
    order = np.argsort(-lengths, kind="stable").astype(np.int32)
    descending = lengths[order].tolist()
    groups, begin = [], 0
    for i in range(1, len(descending)):
        longest = descending[begin]
        if not near(descending[i], longest) or (i - begin + 1) * longest > most_tokens:
            groups.append(order[begin:i])
            begin = i
    return [*groups, order[begin:]]


def chunk_tiles(begin: int, start: int, count: int, window: int | None, *, maskless: bool) -> list[ChunkTile]:
    """Cut a chunk's queries so that no mask exceeds MASK_ELEMENTS by much.

    Args:
        begin: the chunk's first token in the step. start: its position in the sequence.
        maskless: a whole prompt, where causality is all there is to mask, needs no mask and no cut.
    """
    context = start + count
    if maskless and start == 0 and (window is None or window >= context):
        return [ChunkTile(begin, begin + count, 0, context, 0, causal=True)]
    keys = context if window is None else min(context, window + count)
    size = max(16, min(count, MASK_ELEMENTS // keys))
    if window is not None:
        size = min(size, max(16, window))
    tiles = []
    for first in range(0, count, size):
        last = min(first + size, count)
        first_key = 0 if window is None else max(0, start + first - window + 1)
        tiles.append(ChunkTile(begin + first, begin + last, first_key, start + last, start + first, causal=False))
    return tiles
