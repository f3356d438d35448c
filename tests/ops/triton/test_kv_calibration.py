"""Scales of a float8 cache that are found while the first tokens are computed, against the oracle with an exact cache."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from octavo.attention.base import Calibrated, GraphShape, KindTables, KvScales
from octavo.attention.kinds import CacheKinds
from octavo.attention.kv_calibration import ENOUGH_STEPS, ENOUGH_TOKENS, KvCalibration, scale_for
from octavo.attention.reference import ReferenceAttention
from octavo.attention.triton import TritonAttention
from octavo.layers.attention import QkNorm
from octavo.layers.rope import Rotation
from octavo.models.decoder import Model
from octavo.protocol.params import SamplingParams
from octavo.worker.runner import Runner, settle
from tests.support.step_plans import Plans, Row, slot_init

from .paged import relative_error
from .test_attention_backends import BLOCK, BLOCKS, FLOAT8, HALF, LAYERS, on, steps
from .test_step_graphs import SHAPES, models, runner_of  # noqa: F401 - models is a fixture

ROUNDING = 0.08
"""Of float8: a sixteenth of a key or a value, in scores of some size."""


def backend_of(device: torch.device, scales: dict[int, KvScales] | None = None) -> TritonAttention:
    return TritonAttention(LAYERS, BLOCKS, BLOCK, FLOAT8, device, model_dtype=HALF, scales=scales, calibrate=True)


def inputs(tokens: int, layer: int, seed: int, device: torch.device, size: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys of about `size`, values of a thousandth of it in the last head, and queries that keep scores small."""
    spec, generator = LAYERS[layer], torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, h, 16, generator=generator) for h in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads))
    v[:, -1] /= 1000
    return (q / size).to(HALF).to(device), (k * size).to(HALF).to(device), (v * size).to(HALF).to(device)


def play(backend: TritonAttention, sizes: list[float], device: torch.device, *, watched: int) -> list[float]:
    """The largest error of each step, of which the first `watched` are observed."""
    oracle = ReferenceAttention(LAYERS, BLOCKS, BLOCK, torch.float32, torch.device("cpu"))
    calibration, errors = backend.calibration, []
    assert calibration is not None
    for step, (batch, size) in enumerate(zip(steps(device), sizes, strict=True)):
        attend, expected = backend.plan(batch), oracle.plan(on(batch, torch.device("cpu")))
        found = []
        with calibration.observing(batch.num_tokens) if step < watched else nullcontext():
            for layer, spec in enumerate(LAYERS):
                q, k, v = inputs(batch.num_tokens, layer, 10 * step + layer, device, size)
                wanted = expected(layer, *(t.float().cpu() for t in (q, k, v))).double()
                out, group = attend(layer, q, k, v).cpu(), spec.num_heads // spec.num_kv_heads
                found += [relative_error(out[:, h : h + group], wanted[:, h : h + group]) for h in range(0, spec.num_heads, group)]
        errors.append(max(found))
    return errors


def test_large_and_small_numbers_keep_their_digits(device: torch.device) -> None:
    backend = backend_of(device)
    assert isinstance(backend, Calibrated) and backend.calibration is not None
    assert max(play(backend, [3000.0, 3000.0, 3000.0], device, watched=0)) > 0.5, "clipped at a scale of 1"
    backend = backend_of(device)
    assert backend.calibration is not None
    backend.calibration.begin()
    assert max(play(backend, [3000.0, 3000.0, 3000.0], device, watched=1)) < ROUNDING
    # By head: the values of the last one are far smaller than those of the first.
    v = backend.cache.scale(0).v
    assert v is not None and float(v[0] / v[1]) > 200


def test_what_is_cached_follows_when_a_scale_grows(device: torch.device) -> None:
    backend = backend_of(device)
    assert backend.calibration is not None
    backend.calibration.begin()
    addresses = [(s.k.data_ptr(), s.v.data_ptr()) for s in map(backend.cache.scale, range(3)) if s.k is not None and s.v is not None]
    assert max(play(backend, [1.0, 40.0, 40.0], device, watched=2)) < ROUNDING
    assert addresses == [
        (s.k.data_ptr(), s.v.data_ptr()) for s in map(backend.cache.scale, range(3)) if s.k is not None and s.v is not None
    ]


def test_copied_blocks_follow_too(device: torch.device) -> None:
    backend = backend_of(device)
    calibration = backend.calibration
    assert calibration is not None
    calibration.begin()
    k = torch.full((BLOCK, 2, 16), 3.0, dtype=HALF, device=device)
    with calibration.observing(BLOCK):
        backend.cache.write(0, k, k, torch.arange(BLOCK, 2 * BLOCK, device=device))
    one, two = (torch.tensor([i], dtype=torch.int32, device=device) for i in (1, 2))
    backend.copy_blocks(one, two)
    with calibration.observing(1):
        backend.cache.write(0, 100 * k[:1], 100 * k[:1], torch.tensor([3 * BLOCK], device=device))
    scale = backend.cache.scale(0).k
    assert scale is not None
    for block in (1, 2):
        assert torch.equal((backend.cache.of(0)[0, block].float() * scale[:, None, None]).to(HALF), k.transpose(0, 1))


def test_scales_of_the_checkpoint_stay(device: torch.device) -> None:
    given = KvScales(torch.tensor([0.5, 2.0]), torch.tensor([0.25, 1.0]))
    backend = backend_of(device, {0: given})
    assert backend.calibration is not None
    backend.calibration.begin()
    play(backend, [300.0, 300.0, 300.0], device, watched=3)
    kept, found = backend.cache.scale(0).k, backend.cache.scale(1).k
    assert kept is not None and torch.equal(kept.cpu(), given.k)
    assert found is not None and bool((found > 1).all())


def test_the_fused_path_finds_the_same(device: torch.device) -> None:
    batch, spec = steps(device)[0], LAYERS[0]
    rotation = Rotation(torch.cat([torch.ones(64, 8), torch.zeros(64, 8)], 1).to(device), batch.positions)
    ones = torch.ones(16, dtype=HALF, device=device)
    fused, plain = backend_of(device), backend_of(device)
    q, k, v = inputs(batch.num_tokens, 0, 3, device, 50.0)
    qkv = torch.cat([t.reshape(batch.num_tokens, -1) for t in (q, k, v)], 1)
    outs = []
    for backend, run in (
        (fused, lambda: fused.plan(batch).attend_qkv(0, qkv.clone(), rotation, None)),  # type: ignore[attr-defined]
        (plain, lambda: plain.plan(batch)(0, q, k, v).flatten(1)),
    ):
        assert backend.calibration is not None
        backend.calibration.begin()
        with backend.calibration.observing(batch.num_tokens):
            outs.append(run())
    assert torch.equal(*outs)
    assert spec.num_kv_heads == 2
    for a, b in zip(*(vars(backend.cache.scale(0)).values() for backend in (fused, plain)), strict=True):
        assert torch.equal(a, b)
    # With a norm, it is the normed keys that count.
    normed = backend_of(device)
    assert normed.calibration is not None
    normed.calibration.begin()
    with normed.calibration.observing(batch.num_tokens):
        normed.plan(batch).attend_qkv(0, qkv.clone(), rotation, QkNorm(ones, 100 * ones, 1e-6))  # type: ignore[attr-defined]
    scale = normed.cache.scale(0).k
    assert scale is not None and float(scale[0]) == float(scale_for(torch.tensor([100.0 * 3.5])))


def test_a_plan_made_before_reads_the_scales_found_after(device: torch.device) -> None:
    """As a captured step does."""
    backend, shape = backend_of(device), GraphShape(5, 5)
    batches = steps(device)
    out = np.zeros(backend.graph_plan_size(shape), np.int32)
    batch = batches[2]
    backend.graph_plan(batch.cpu_start, batch.cpu_count, shape, out, None)
    tables = torch.zeros(5, batch.block_tables.shape[1], dtype=torch.int32, device=device)
    tables[:3] = batch.block_tables
    slots = torch.zeros(5, dtype=torch.int64, device=device)
    slots[:3] = batch.cache_slots
    captured = backend.graph_attend(torch.from_numpy(out).to(device), shape, [KindTables(tables, slots)])
    assert backend.calibration is not None
    backend.calibration.begin()
    play(backend, [200.0, 200.0, 200.0], device, watched=2)
    q, k, v = inputs(3, 0, 20, device, 200.0)
    wide = [torch.cat([t, torch.zeros(2, *t.shape[1:], dtype=t.dtype, device=device)]) for t in (q, k, v)]
    assert relative_error(captured(0, *wide)[:3], backend.plan(batch)(0, q, k, v).double()) < 1e-3


def test_it_ends() -> None:
    device = torch.device("cpu")
    for tokens, steps_taken in ((ENOUGH_TOKENS, 1), (1, ENOUGH_STEPS), (ENOUGH_TOKENS // 2, 2)):
        scales = {0: KvScales(torch.ones(1), torch.ones(1))}
        calibration = KvCalibration(scales, CacheKinds(4), device)
        assert not calibration.running
        calibration.begin()
        for _ in range(steps_taken):
            assert calibration.running
            with calibration.observing(tokens):
                assert calibration.watches(0) and not calibration.watches(1)
        assert not calibration.running and not calibration.watches(0)


def test_a_rehearsal_leaves_nothing_behind() -> None:
    scales = KvScales(torch.ones(1), torch.ones(1))
    calibration, cache = KvCalibration({0: scales}, CacheKinds(4), torch.device("cpu")), torch.zeros(2, 4, 1, 4, 16).to(FLOAT8)
    with calibration.rehearsing():
        for _ in range(2):
            assert calibration.running
            with calibration.observing(ENOUGH_TOKENS):
                calibration.see(0, torch.full((1, 1, 16), 900.0), torch.ones(1, 1, 16), cache, torch.tensor([5]))
        assert float(scales.k) > 1
    assert calibration.running and float(scales.k) == 1.0
    with calibration.observing(1):
        calibration.see(0, torch.full((1, 1, 16), 56.0), torch.ones(1, 1, 16), cache, torch.tensor([5]))
    assert float(scales.k) == 0.25


def test_a_step_that_fails_does_not_count() -> None:
    calibration = KvCalibration({0: KvScales(torch.ones(1), torch.ones(1))}, CacheKinds(4), torch.device("cpu"))
    calibration.begin()
    with pytest.raises(ValueError, match="out"), calibration.observing(ENOUGH_TOKENS):
        raise ValueError("out of memory")
    assert calibration.running and not calibration.watching


def test_numbers_that_are_none_are_passed_over() -> None:
    scales = KvScales(torch.ones(2), torch.ones(2))
    calibration, cache = KvCalibration({0: scales}, CacheKinds(4), torch.device("cpu")), torch.zeros(2, 4, 2, 4, 16).to(FLOAT8)
    calibration.begin()
    k = torch.ones(3, 2, 16)
    k[0, 0], k[1, 1] = float("nan"), float("inf")
    with calibration.observing(3):
        calibration.see(0, 30 * k, torch.zeros(3, 2, 16), cache, torch.arange(3))
    assert scales.k.tolist() == [0.25, 0.25]
    assert scales.v.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("largest", [1e-6, 0.3, 1.0, 56.0, 224.0, 225.0, 3000.0, 60000.0])
def test_a_scale_is_the_next_power_of_two(largest: float) -> None:
    scale = float(scale_for(torch.tensor(largest)))
    assert scale == 2.0 ** round(np.log2(scale))
    assert 2 * largest <= 448 * scale < 4 * largest


def test_steps_are_captured_again_once_scales_are_found(models: dict[str, Model], device: torch.device) -> None:  # noqa: F811
    _, spy = runner_of(models["kernels"], device, kernels=True, graphs=True)
    assert spy is not None
    graphs = spy.graphs
    attention = TritonAttention(models["kernels"].layer_specs, 40, BLOCK, FLOAT8, device, model_dtype=HALF, calibrate=True)
    calibration = attention.calibration
    assert calibration is not None
    calibration.begin()
    from octavo.ops.triton.sampling import draw_tokens
    from octavo.sampling.sampler import Sampler
    from octavo.worker.graphs import StepGraphs
    from tests.ops.triton.test_step_graphs import Spy

    tables, state = graphs._tables, graphs._state
    captured = StepGraphs(models["kernels"], attention, tables, state, draw_tokens, SHAPES, inflight=1)
    for shape in reversed(SHAPES):
        captured.capture(shape)
    spy = Spy(captured)
    sampler = Sampler(state, tables.tokens, draw=draw_tokens)
    runner = Runner(models["kernels"], attention, tables, state, sampler, spy, calibration=calibration)  # type: ignore[arg-type]
    plans, greedy = Plans(), SamplingParams(temperature=0.0, max_tokens=None)
    results = [settle(runner.launch(plans([Row(0, 0, 4, True)], init=[slot_init(0, [5, 6, 7, 8], [1, 2], sampling=greedy)])))]
    found = [s.k.clone() for s in map(attention.cache.scale, range(2)) if s.k is not None]
    assert all(bool((k < 1).all()) for k in found), "a tiny model's keys are small"
    calibration._tokens = ENOUGH_TOKENS - 1
    results.append(settle(runner.launch(plans([Row(0, 4, 1, True)]))))
    assert spy.launches == []
    results.append(settle(runner.launch(plans([Row(0, 5, 1, True)]))))
    assert spy.launches == [SHAPES[0]]
    assert all(not r.errors and r.tokens[0] >= 0 for r in results)
