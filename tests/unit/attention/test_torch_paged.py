"""The paged backend against the float64 oracle: random shapes, histories, layouts and dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention import torch_paged
from octavo.attention.base import LayerSpec
from octavo.attention.reference import ReferenceAttention
from octavo.attention.torch_paged import TorchPagedAttention, chunk_tiles, tile_by_length
from tests.support.paged_batches import Pool, step_batch

CPU = torch.device("cpu")


def run_step(backend, layers, starts, counts, tables, block_size, seed):  # type: ignore[no-untyped-def]
    """One step through every layer with random q, k, v; the outputs by layer."""
    generator = torch.Generator().manual_seed(seed)
    attend = backend.plan(step_batch(starts, counts, tables, block_size))
    tokens = sum(counts)
    outputs = []
    for i, layer in enumerate(layers):
        q = torch.randn(tokens, layer.num_heads, layer.head_dim, generator=generator)
        k = torch.randn(tokens, layer.num_kv_heads, layer.head_dim, generator=generator)
        v = torch.randn(tokens, layer.num_kv_heads, layer.head_dim, generator=generator)
        outputs.append(attend(i, q, k, v))
    return outputs


def poison(backend: TorchPagedAttention) -> None:
    """NaN in every place of the cache that is not written later, the null block included."""
    for cache in (*backend._keys, *backend._values):
        cache.fill_(torch.nan)


@st.composite
def layer_stacks(draw: st.DrawFn) -> tuple[LayerSpec, ...]:
    dim = draw(st.sampled_from([3, 8, 16, 40]))
    kv_heads = draw(st.integers(1, 3))
    group = draw(st.integers(1, 4))
    return tuple(
        LayerSpec(
            num_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scale=draw(st.sampled_from([dim**-0.5, 0.31])),
            sliding_window=draw(st.sampled_from([None, 1, 5, 16])),
            soft_cap=draw(st.sampled_from([None, None, 2.0])),
            value_dim=draw(st.sampled_from([None, None, dim - 1])),
            sinks=tuple(draw(st.lists(st.floats(-2, 2), min_size=kv_heads * group, max_size=kv_heads * group)))
            if draw(st.booleans())
            else None,
        )
        for _ in range(draw(st.integers(1, 2)))
    )


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """Some steps over some sequences: each step computes 0 or more new tokens of each sequence."""
    done = [0] * draw(st.integers(1, 5))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        counts = [draw(st.sampled_from([0, 1, 1, 2, 7, 13])) for _ in done]
        if not any(counts):
            counts[0] = 1
        steps.append((list(done), counts))
        done = [d + c for d, c in zip(done, counts, strict=True)]
    return steps


@settings(max_examples=40, deadline=None)
@given(
    layers=layer_stacks(),
    steps=histories(),
    block_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 999),
    tight=st.booleans(),
    bag=st.booleans(),
)
def test_matches_the_oracle(layers, steps, block_size, seed, tight, bag):  # type: ignore[no-untyped-def]
    with pytest.MonkeyPatch.context() as patch:
        if tight:
            patch.setattr(torch_paged, "TILE_BYTES", 4096)
            patch.setattr(torch_paged, "TILE_SLACK_TOKENS", 2)
            patch.setattr(torch_paged, "MASK_ELEMENTS", 32)
            patch.setattr(torch_paged, "MASK_CACHE_ELEMENTS", 64)
        starts, counts = steps[-1]
        contexts = [s + c for s, c in zip(starts, counts, strict=True)]
        num_blocks = 2 + sum(-(-c // block_size) for c in contexts)
        tables = Pool(num_blocks, block_size, seed).tables(contexts)
        oracle = ReferenceAttention(layers, num_blocks, block_size, torch.float32, CPU)
        backend = TorchPagedAttention(layers, num_blocks, block_size, torch.float32, CPU)
        backend._bag = bag
        poison(backend)
        for number, (starts, counts) in enumerate(steps):
            order = sorted((r for r, c in enumerate(counts) if c), key=lambda r: counts[r] > 1)
            args = (layers, [starts[r] for r in order], [counts[r] for r in order], tables[order], block_size, seed + number)
            for expected, got in zip(run_step(oracle, *args), run_step(backend, *args), strict=True):
                torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_cache_equals_an_oracle_with_the_same_cache(dtype: torch.dtype) -> None:
    layers = (LayerSpec(6, 2, 16, 0.25), LayerSpec(6, 2, 16, 0.25, sliding_window=9))
    tables = Pool(40, 4).tables([30, 18, 25])
    oracle = ReferenceAttention(layers, 40, 4, dtype, CPU)
    backend = TorchPagedAttention(layers, 40, 4, dtype, CPU)
    poison(backend)
    for starts, counts, rows in (([0, 0, 0], [29, 17, 20], [0, 1, 2]), ([29, 17, 20], [1, 1, 5], [0, 1, 2])):
        args = (layers, starts, counts, tables[rows], 4, sum(starts))
        for expected, got in zip(run_step(oracle, *args), run_step(backend, *args), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_half_precision_model() -> None:
    """bfloat16 queries with a bfloat16 cache: within bfloat16 rounding of the oracle."""
    layers = (LayerSpec(4, 2, 32, 32**-0.5),)
    generator = torch.Generator().manual_seed(1)
    tables = Pool(20, 4).tables([21, 13])
    oracle = ReferenceAttention(layers, 20, 4, torch.bfloat16, CPU)
    backend = TorchPagedAttention(layers, 20, 4, torch.bfloat16, CPU)
    for starts, counts in (([0, 0], [20, 9]), ([20, 9], [1, 4])):
        batch = step_batch(starts, counts, tables, 4)
        q, k, v = (torch.randn(sum(counts), heads, 32, generator=generator).bfloat16() for heads in (4, 2, 2))
        expected, got = oracle.plan(batch)(0, q, k, v), backend.plan(batch)(0, q, k, v)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Other rows, longer contexts and prompt chunks in the step change a decode by rounding at most."""
    layers = (LayerSpec(9, 3, 64, 0.125),)
    backend = TorchPagedAttention(layers, 80, 16, torch.float32, CPU)
    tables = Pool(80, 16).tables([40, 300, 41, 120])
    for cache in (*backend._keys, *backend._values):
        cache.normal_(generator=torch.Generator().manual_seed(3))
    q, k, v = (torch.randn(3 + 20, heads, 64, generator=torch.Generator().manual_seed(4)) for heads in (9, 3, 3))
    alone = backend.plan(step_batch([39], [1], tables[:1], 16))(0, q[:1], k[:1], v[:1])
    mixed = backend.plan(step_batch([39, 299, 40, 100], [1, 1, 1, 20], tables, 16))(0, q, k, v)
    torch.testing.assert_close(mixed[:1], alone, rtol=1e-5, atol=1e-6)


def test_copy_blocks_reads_before_it_writes() -> None:
    layers = (LayerSpec(2, 1, 4, 0.5), LayerSpec(2, 2, 8, 0.5))
    backend = TorchPagedAttention(layers, 6, 2, torch.float32, CPU)
    for cache in (*backend._keys, *backend._values):
        cache.copy_(torch.arange(6.0).view(6, 1, 1, 1).expand_as(cache))
    backend.copy_blocks(torch.tensor([1, 2, 5], dtype=torch.int32), torch.tensor([2, 1, 4], dtype=torch.int32))
    for cache in (*backend._keys, *backend._values):
        assert [int(block.unique()) for block in cache] == [0, 2, 1, 3, 5, 5]


def test_bytes_per_block_is_what_is_allocated() -> None:
    layers = (LayerSpec(2, 1, 4, 0.5), LayerSpec(2, 2, 8, 0.5))
    backend = TorchPagedAttention(layers, 6, 2, torch.float16, CPU)
    held = sum(t.numel() * t.itemsize for t in (*backend._keys, *backend._values))
    assert held == 6 * TorchPagedAttention.bytes_per_block(layers, 2, torch.float16)
    assert TorchPagedAttention.bytes_per_block(layers, 2, torch.float16) == ReferenceAttention.bytes_per_block(layers, 2, torch.float16)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=70), st.integers(1, 40_000))
def test_tiles_cover_rows_once_and_bound_padding(lengths: list[int], most: int) -> None:
    array = np.asarray(lengths, np.int32)
    tiles = tile_by_length(array, most)
    assert sorted(r for tile in tiles for r in tile.tolist()) == list(range(len(lengths)))
    if len(tiles) == 1:
        assert tiles[0].tolist() == list(range(len(lengths)))
    for tile in tiles:
        longest, shortest = int(array[tile].max()), int(array[tile].min())
        assert shortest >= min(longest - 64, longest * 3 // 4)
        assert len(tile) == 1 or len(tile) * longest <= most


@given(st.integers(0, 500), st.integers(1, 300), st.sampled_from([None, 1, 7, 64, 1000]), st.booleans())
def test_chunk_tiles_cover_queries_once_and_see_what_they_need(start: int, count: int, window: int | None, maskless: bool) -> None:
    tiles = chunk_tiles(10, start, count, window, maskless=maskless)
    assert [q for t in tiles for q in range(t.begin, t.end)] == list(range(10, 10 + count))
    for tile in tiles:
        assert tile.first_position == start + tile.begin - 10
        assert tile.last_key == start + tile.end - 10
        needed = 0 if window is None else max(0, tile.first_position - window + 1)
        assert tiles[0].first_key <= tile.first_key <= needed
        assert not tile.causal or maskless
