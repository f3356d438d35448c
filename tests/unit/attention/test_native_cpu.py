"""The compiled kernels' paged attention against the float64 oracle, and its promise that batches change no bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.attention.base import KindTables, LayerSpec
from octavo.attention.kinds import SlidingBlocks
from octavo.attention.reference import ReferenceAttention
from octavo.errors import ConfigError
from octavo.ops.cpu import abi
from tests.support.paged_batches import Pool, step_batch

if abi.library() is None:
    pytest.skip("the compiled kernels were not built", allow_module_level=True)

from octavo.attention.native_cpu import NativeCpuAttention

CPU = torch.device("cpu")


@pytest.fixture(params=abi.LEVELS, autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    library = abi.loaded()
    best = library.octavo_level()
    if not library.octavo_set_level(abi.LEVELS.index(request.param)):
        pytest.skip("this machine cannot run it")
    yield request.param
    library.octavo_set_level(best)


def inputs(layer: LayerSpec, tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as the decoder has them: slices of one fused buffer."""
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    fused = torch.randn(tokens, heads + 2 * kv_heads, layer.head_dim, generator=generator)
    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def run_step(backend, layers, starts, counts, tables, block_size, seed):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    attend = backend.plan(step_batch(starts, counts, tables, block_size))
    return [attend(i, *inputs(layer, sum(counts), generator)) for i, layer in enumerate(layers)]


def poison(backend: NativeCpuAttention) -> None:
    """NaN in every place of the cache that is not written later, the null block included."""
    for cache in (*backend._keys, *backend._values):
        cache.fill_(torch.nan)


@st.composite
def layer_stacks(draw: st.DrawFn) -> tuple[LayerSpec, ...]:
    dim = draw(st.sampled_from([3, 8, 16, 40, 64, 80]))
    kv_heads = draw(st.integers(1, 3))
    group = draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16]))
    return tuple(
        LayerSpec(
            num_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scale=draw(st.sampled_from([dim**-0.5, 0.31])),
            sliding_window=draw(st.sampled_from([None, 1, 5, 16, 300])),
            soft_cap=draw(st.sampled_from([None, None, 2.0])),
        )
        for _ in range(draw(st.integers(1, 2)))
    )


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    done = [0] * draw(st.integers(1, 4))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        counts = [draw(st.sampled_from([0, 1, 1, 2, 7, 13])) for _ in done]
        if not any(counts):
            counts[0] = 1
        steps.append((list(done), counts))
        done = [d + c for d, c in zip(done, counts, strict=True)]
    return steps


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layers=layer_stacks(),
    steps=histories(),
    block_size=st.sampled_from([1, 4, 16, 17, 32]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_matches_the_oracle(layers, steps, block_size, dtype, threads, seed):  # type: ignore[no-untyped-def]
    starts, counts = steps[-1]
    contexts = [s + c for s, c in zip(starts, counts, strict=True)]
    num_blocks = 2 + sum(-(-c // block_size) for c in contexts)
    tables = Pool(num_blocks, block_size, seed).tables(contexts)
    oracle = ReferenceAttention(layers, num_blocks, block_size, dtype, CPU)
    backend = NativeCpuAttention(layers, num_blocks, block_size, dtype, CPU, threads)
    poison(backend)
    for number, (starts, counts) in enumerate(steps):
        order = sorted((r for r, c in enumerate(counts) if c), key=lambda r: counts[r] > 1)
        args = (layers, [starts[r] for r in order], [counts[r] for r in order], tables[order], block_size, seed + number)
        for expected, got in zip(run_step(oracle, *args), run_step(backend, *args), strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("window", [None, 70, 256, 300])
@pytest.mark.parametrize("block_size", [16, 48, 100, 256])
def test_long_contexts_rescale_right(block_size: int, window: int | None) -> None:
    """More than one chunk of keys, with scores that grow along the way."""
    layer = LayerSpec(6, 2, 24, 0.7, sliding_window=window)
    tables = Pool(80, block_size).tables([700, 513])
    oracle = ReferenceAttention((layer,), 80, block_size, torch.float32, CPU)
    backend = NativeCpuAttention((layer,), 80, block_size, torch.float32, CPU)
    poison(backend)
    generator = torch.Generator().manual_seed(5)
    for starts, counts in (([0, 0], [690, 512]), ([512, 690], [1, 10])):
        order = [0, 1] if counts[0] > 1 else [1, 0]
        batch = step_batch(starts, counts, tables[order], block_size)
        q, k, v = inputs(layer, sum(counts), generator)
        k = k * (1 + batch.positions[:, None, None] / 100)
        chosen = slice(None) if counts[1] == 10 else slice(680, 692)  # the oracle is slow: a few of the long chunk's tokens
        got = backend.plan(batch)(0, q, k, v)
        if counts[1] == 10:
            torch.testing.assert_close(got[chosen], oracle.plan(batch)(0, q, k, v)[chosen], rtol=5e-4, atol=5e-5)
        else:
            for token in range(sum(counts)):  # only the cache matters here
                block, offset = divmod(int(batch.cache_slots[token]), block_size)
                oracle._caches[0][0, block, offset], oracle._caches[0][1, block, offset] = k[token], v[token]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_a_token_is_the_same_bits_in_any_batch_and_any_chunk(group: int, dtype: torch.dtype) -> None:
    layer = LayerSpec(2 * group, 2, 64, 0.125)
    context = 330
    generator = torch.Generator().manual_seed(1)
    q, k, v = inputs(layer, context, generator)
    others = inputs(layer, 40, generator)

    def compute(sizes: list[int], threads: int, *, crowded: bool) -> torch.Tensor:
        tables = Pool(80, 16, seed=len(sizes)).tables([context, 41])
        backend = NativeCpuAttention((layer,), 80, 16, dtype, CPU, threads)
        poison(backend)
        out, start = [], 0
        for size in sizes:
            parts = [t[start : start + size] for t in (q, k, v)]
            if crowded and size > 1:
                batch = step_batch([start, 0], [size, 40], tables, 16)
                parts = [torch.cat(pair) for pair in zip(parts, others, strict=True)]
            else:
                batch = step_batch([start], [size], tables[:1], 16)
            out.append(backend.plan(batch)(0, *parts)[:size])
            start += size
        return torch.cat(out)

    expected = compute([context], 1, crowded=False)
    assert torch.equal(compute([1] * context, 2, crowded=False), expected)
    assert torch.equal(compute([7, 1, 249, 16, 57], 3, crowded=True), expected)


def test_bad_numbers_stay_in_their_sequence() -> None:
    layer = LayerSpec(4, 2, 16, 0.25)
    backend = NativeCpuAttention((layer,), 20, 4, torch.float16, CPU)
    poison(backend)
    tables = Pool(20, 4).tables([9, 9])
    q, k, v = inputs(layer, 18, torch.Generator().manual_seed(2))
    k[13, 0, 3] = torch.nan
    out = backend.plan(step_batch([0, 0], [9, 9], tables, 4))(0, q, k, v)
    assert out[:13].isfinite().all()
    assert out[13:, :2].isnan().all()
    assert out[13:, 2:].isfinite().all()


def test_half_precision_queries() -> None:
    layer = LayerSpec(4, 2, 32, 32**-0.5)
    tables = Pool(20, 4).tables([20])
    oracle = ReferenceAttention((layer,), 20, 4, torch.float32, CPU)
    backend = NativeCpuAttention((layer,), 20, 4, torch.float32, CPU)
    q, k, v = (t.bfloat16() for t in inputs(layer, 20, torch.Generator().manual_seed(2)))
    batch = step_batch([0], [20], tables, 4)
    got = backend.plan(batch)(0, q, k, v)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, oracle.plan(batch)(0, q, k, v), rtol=1e-2, atol=1e-2)


def test_copy_blocks_reads_before_it_writes() -> None:
    layers = (LayerSpec(2, 1, 4, 0.5), LayerSpec(2, 2, 8, 0.5))
    backend = NativeCpuAttention(layers, 6, 2, torch.float32, CPU)
    for cache in (*backend._keys, *backend._values):
        cache.copy_(torch.arange(6.0).view(6, 1, 1, 1).expand_as(cache))
    backend.copy_blocks(torch.tensor([1, 2, 5], dtype=torch.int32), torch.tensor([2, 1, 4], dtype=torch.int32))
    for cache in (*backend._keys, *backend._values):
        assert [int(block.unique()) for block in cache] == [0, 2, 1, 3, 5, 5]


def test_bytes_per_block_is_what_is_allocated() -> None:
    layers = (LayerSpec(2, 1, 4, 0.5), LayerSpec(2, 2, 24, 0.5))
    backend = NativeCpuAttention(layers, 6, 3, torch.float16, CPU)
    held = sum(t.numel() * t.itemsize for t in (*backend._keys, *backend._values))
    assert held == 6 * NativeCpuAttention.bytes_per_block(layers, 3, torch.float16)


def test_other_cache_types_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bfloat16.*float16 or float32"):
        NativeCpuAttention((LayerSpec(2, 1, 4, 0.5),), 6, 2, torch.bfloat16, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_second_kind_of_cache_changes_no_bit(block_size: int, dtype: torch.dtype) -> None:
    """Layers that slide have tables and blocks of their own, whose old ones were given to others: the same bits as with one table."""
    layers = tuple(LayerSpec(4, 2, 24, 0.3, sliding_window=w) for w in (7, None, 20, None))
    second = SlidingBlocks(frozenset({0, 2}), 40)
    tables, others = Pool(90, block_size).tables([150, 90]), Pool(40, block_size, seed=1).tables([60, 60])
    one, two = (NativeCpuAttention(layers, 90, block_size, dtype, CPU, sliding=kind) for kind in (None, second))
    for backend in (one, two):
        poison(backend)
    # Blocks of the second kind come round again: a row writes over what its windows have left behind.
    turns = torch.arange(tables.shape[1]) % others.shape[1]
    for number, (starts, counts) in enumerate([([0, 0], [19, 12]), ([19, 12], [19, 17]), ([38, 29], [1, 1]), ([39, 30], [1, 15])]):
        batch = step_batch(starts, counts, tables, block_size)
        theirs = step_batch(starts, counts, others[:, turns], block_size)
        both = replace(batch, sliding=KindTables(theirs.block_tables, theirs.cache_slots))
        generators = [torch.Generator().manual_seed(number) for _ in range(2)]
        plans = [backend.plan(b) for backend, b in ((one, batch), (two, both))]
        for i, layer in enumerate(layers):
            expected, got = (
                plan(i, *inputs(layer, batch.num_tokens, generator)) for plan, generator in zip(plans, generators, strict=True)
            )
            assert expected.isfinite().all()
            assert torch.equal(got, expected)
    pairs = torch.tensor([[1, 2], [90 + 3, 90 + 4]], dtype=torch.int32)
    before = [keys.clone() for keys in two._keys]
    two.copy_blocks(pairs[:, 0], pairs[:, 1])
    for layer, keys in enumerate(before):
        source, destination = (3, 4) if layer in second.layers else (1, 2)
        keys[destination] = keys[source]
        assert torch.equal(keys.nan_to_num(), two._keys[layer].nan_to_num())
