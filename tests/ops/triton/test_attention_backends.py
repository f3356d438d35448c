"""The Triton attention backends as a worker uses them, eagerly and as a graph does, against the oracle; with 16-bit and float8 caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from octavo.attention.base import GraphAttention, GraphShape, KindTables, KvScales, LayerSpec, StepBatch
from octavo.attention.invariant import InvariantAttention
from octavo.attention.reference import ReferenceAttention
from octavo.attention.triton import TritonAttention
from octavo.layers.attention import QkNorm
from octavo.layers.rope import Rotation
from octavo.ops import reference
from tests.support.paged_batches import Pool, step_batch

from .paged import relative_error

BLOCK, BLOCKS = 4, 60
LAYERS = (
    LayerSpec(4, 2, 16, 0.25),
    LayerSpec(4, 2, 16, 0.25, sliding_window=9, soft_cap=3.0),
    LayerSpec(3, 1, 16, 0.25),
)
HALF, FLOAT8 = torch.float16, torch.float8_e4m3fn
Make = Callable[[torch.dtype, torch.device, Mapping[int, KvScales] | None], Any]


def triton_backend(dtype: torch.dtype, device: torch.device, scales: Mapping[int, KvScales] | None) -> TritonAttention:
    return TritonAttention(LAYERS, BLOCKS, BLOCK, dtype, device, model_dtype=HALF, scales=scales)


def invariant_backend(dtype: torch.dtype, device: torch.device, scales: Mapping[int, KvScales] | None) -> InvariantAttention:
    return InvariantAttention(LAYERS, BLOCKS, BLOCK, dtype, device, scales=scales)


backends = pytest.mark.parametrize("make", [triton_backend, invariant_backend])
caches = pytest.mark.parametrize("dtype", [HALF, FLOAT8], ids=["float16", "float8"])


def steps(device: torch.device) -> list[StepBatch]:
    """Prompts of three rows, then decodes of two of them beside a chunk, then decodes."""
    tables = Pool(BLOCKS, BLOCK).tables([41, 30, 20]).to(device)
    batches = [([0, 0, 0], [33, 20, 7]), ([33, 20, 7], [1, 1, 11]), ([34, 21, 18], [1, 1, 1])]
    return [on(step_batch(starts, counts, tables.cpu(), BLOCK), device) for starts, counts in batches]


def on(batch: StepBatch, device: torch.device) -> StepBatch:
    return dataclasses.replace(batch, **{n: v.to(device) for n, v in vars(batch).items() if isinstance(v, torch.Tensor)})


def scales_for(dtype: torch.dtype) -> dict[int, KvScales] | None:
    """Powers of two for one layer, so that a rounding more changes little; the others have none."""
    if dtype != FLOAT8:
        return None
    return {0: KvScales(torch.tensor([0.5, 2.0]), torch.tensor([0.25, 1.0]))}


def inputs(batch: StepBatch, layer: LayerSpec, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    # Coarse numbers, which float8 holds exactly at all of these scales: what is left is the kernels' own rounding.
    q, k, v = ((torch.randn(batch.num_tokens, h, 16, generator=generator) * 2).round() / 2 for h in heads)
    return q.to(HALF).to(device), k.clamp(-4, 4).to(HALF).to(device), v.clamp(-4, 4).to(HALF).to(device)


@backends
@caches
def test_steps_match_the_oracle(make: Make, dtype: torch.dtype, device: torch.device) -> None:
    backend = make(dtype, device, scales_for(dtype))
    oracle = ReferenceAttention(LAYERS, BLOCKS, BLOCK, torch.float32, torch.device("cpu"))
    for step, batch in enumerate(steps(device)):
        attend, expected = backend.plan(batch), oracle.plan(on(batch, torch.device("cpu")))
        for layer, spec in enumerate(LAYERS):
            q, k, v = inputs(batch, spec, 10 * step + layer, device)
            wanted = expected(layer, q.cpu(), k.cpu(), v.cpu())
            assert relative_error(attend(layer, q, k, v).cpu(), wanted.double()) < 5e-3
    # Whole blocks move in every layer, whatever the cache holds.
    before = [backend.cache.of(layer).float().clone() for layer in range(len(LAYERS))]
    backend.copy_blocks(torch.tensor([1, 2], dtype=torch.int32, device=device), torch.tensor([2, 1], dtype=torch.int32, device=device))
    for layer, old in enumerate(before):
        new = backend.cache.of(layer).float()
        assert torch.equal(new[:, [1, 2]].nan_to_num(), old[:, [2, 1]].nan_to_num())


@backends
@caches
def test_the_fused_path_writes_and_attends_alike(make: Make, dtype: torch.dtype, device: torch.device) -> None:
    batch, spec = steps(device)[0], LAYERS[0]
    rotation = Rotation(torch.cat([torch.ones(64, 8), torch.zeros(64, 8)], 1).to(device), batch.positions)
    ones = torch.ones(16, dtype=HALF, device=device)
    # Normed keys are no coarse numbers any more, and Triton's interpreter rounds those to float8 wrongly.
    norm = QkNorm(ones, 2 * ones, 1e-6) if dtype == HALF else None
    q, k, v = inputs(batch, spec, 3, device)
    fused, plain = make(dtype, device, scales_for(dtype)), make(dtype, device, scales_for(dtype))
    qkv = torch.cat([t.reshape(batch.num_tokens, -1) for t in (q, k, v)], 1)
    out = fused.plan(batch).attend_qkv(0, qkv.clone(), rotation, norm)
    if norm is not None:
        q, k = reference.OPS.rms_norm(q, norm.q, 1e-6), reference.OPS.rms_norm(k, norm.k, 1e-6)
    expected = plain.plan(batch)(0, q, k, v)
    assert relative_error(out.view(expected.shape), expected.double()) < 5e-3


@backends
@pytest.mark.parametrize(("step", "shape"), [(2, GraphShape(5, 5)), (1, GraphShape(4, 20, 2)), (2, GraphShape(4, 20, 2))])
def test_a_graphs_plan_gives_what_an_eager_step_gives(make: Make, step: int, shape: GraphShape, device: torch.device) -> None:
    backend = make(HALF, device, None)
    assert isinstance(backend, GraphAttention)
    batches = steps(device)
    for before, batch in enumerate(batches[:step]):
        attend = backend.plan(batch)
        for layer, spec in enumerate(LAYERS):
            attend(layer, *inputs(batch, spec, before, device))
    batch, tokens = batches[step], batches[step].num_tokens
    out = np.full(backend.graph_plan_size(shape), 77, np.int32)
    backend.graph_plan(batch.cpu_start, batch.cpu_count, shape, out, None)
    padded = torch.zeros(shape.rows, batch.block_tables.shape[1], dtype=torch.int32, device=device)
    padded[:3] = batch.block_tables
    slots = torch.zeros(shape.tokens, dtype=torch.int64, device=device)
    slots[:tokens] = batch.cache_slots
    replayed = backend.graph_attend(torch.from_numpy(out).to(device), shape, [KindTables(padded, slots)])
    eager = backend.plan(batch)
    for layer, spec in enumerate(LAYERS):
        q, k, v = inputs(batch, spec, 5, device)
        wide = [torch.cat([t, torch.zeros(shape.tokens - tokens, *t.shape[1:], dtype=t.dtype, device=device)]) for t in (q, k, v)]
        got = replayed(layer, *wide)[:tokens]
        assert relative_error(got, eager(layer, q, k, v).double()) < 1e-3


def test_a_float8_cache_holds_twice_the_tokens() -> None:
    for backend in (TritonAttention, InvariantAttention):
        assert 2 * backend.bytes_per_block(LAYERS, BLOCK, FLOAT8) == backend.bytes_per_block(LAYERS, BLOCK, HALF)
        assert backend.supports(LAYERS, torch.bfloat16, FLOAT8)
        assert not backend.supports(LAYERS, torch.float32, FLOAT8)
        assert not backend.supports((LayerSpec(2, 2, 8, 1.0),), HALF, HALF)


@backends
def test_what_lies_before_the_window_is_not_read(make: Make, device: torch.device) -> None:
    """Blocks that a window has left behind belong to others, and may hold anything: further back than is declared, nothing is loaded."""
    context, window = 600, 9
    layer = LayerSpec(2, 1, 16, 0.25, sliding_window=window)
    kind = type(make(HALF, device, None))
    options = {"model_dtype": HALF} if kind is TritonAttention else {}
    backend = kind((layer,), context // BLOCK + 2, BLOCK, HALF, device, **options)
    table = torch.arange(1, context // BLOCK + 1, dtype=torch.int32).view(1, -1)
    for start, count in ((context - 1, 1), (context - 6, 6)):
        batch = on(step_batch([start], [count], table, BLOCK), device)
        backend.cache.of(0).fill_(1.0)
        left_behind = (start + 1 - window - kind.reads_before_window) // BLOCK
        assert left_behind > 10
        backend.cache.of(0)[:, 1 : left_behind + 1] = float("nan")
        out = backend.plan(batch)(0, *inputs(batch, layer, 1, device))
        assert out.isfinite().all()
