import math
import random

import pytest

from octavo.core.step_time import GROWTH, StepTimeModel, chunk_pairs

FIRST_CHUNK = 128


def true_seconds(tokens: int, pairs: float) -> float:
    return 0.004 + 2e-4 * tokens + 3e-8 * pairs


def trained(steps: int = 200, noise: float = 0.0) -> StepTimeModel:
    rng = random.Random(0)
    model = StepTimeModel(FIRST_CHUNK)
    for _ in range(steps):
        tokens = rng.choice([1, 4, 16, 64, 200, 512])
        pairs = chunk_pairs(rng.randrange(4000), tokens)
        model.observe(tokens, pairs, true_seconds(tokens, pairs) * (1 + noise * rng.uniform(-1, 1)))
    return model


def test_pairs_of_a_chunk() -> None:
    assert chunk_pairs(0, 3) == 1 + 2 + 3
    assert chunk_pairs(10, 2) == 11 + 12


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.05), (0.2, 0.25)])
def test_it_learns_the_machine(noise: float, tolerance: float) -> None:
    model = trained(noise=noise)
    for tokens, start in ((32, 0), (256, 1000), (512, 3000)):
        pairs = chunk_pairs(start, tokens)
        assert model.predict(tokens, pairs) == pytest.approx(true_seconds(tokens, pairs), rel=tolerance)


@pytest.mark.parametrize("start", [0, 500, 30000])
def test_the_largest_chunk_costs_what_it_may(start: int) -> None:
    model = trained()
    count = model.largest_chunk(start, 0.1)
    assert model.cost(start, count) <= 0.1 < model.cost(start, count + 1)


def test_later_chunks_of_a_long_prompt_are_smaller() -> None:
    model = trained()
    assert model.largest_chunk(30000, 0.1) < model.largest_chunk(0, 0.1)


def test_a_sudden_stall_is_not_believed() -> None:
    model = trained()
    before = model.predict(64, 2080.0)
    model.observe(64, 2080.0, 30.0)
    assert model.predict(64, 2080.0) < 3 * before


def test_it_follows_a_machine_that_slows_down() -> None:
    model = trained()
    rng = random.Random(1)
    for _ in range(300):
        tokens = rng.choice([1, 16, 64, 200])
        model.observe(tokens, chunk_pairs(100, tokens), 3 * true_seconds(tokens, chunk_pairs(100, tokens)))
    assert model.predict(128, chunk_pairs(100, 128)) == pytest.approx(3 * true_seconds(128, chunk_pairs(100, 128)), rel=0.15)


def test_long_steady_decoding_does_not_upset_it() -> None:
    model = trained()
    for i in range(20_000):
        model.observe(8, 8 * 500.0, true_seconds(8, 4000.0) * (1 + 0.05 * math.sin(i)))
    assert all(math.isfinite(c) for c in model.coefficients())
    assert model.predict(8, 4000.0) == pytest.approx(true_seconds(8, 4000.0), rel=0.1)
    assert max(abs(c) for c in model._covariance) < 1e4


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_ignored(seconds: float) -> None:
    model = StepTimeModel(FIRST_CHUNK)
    model.observe(10, 55.0, seconds)
    assert model.observations == 0


def test_before_it_knows_anything_chunks_are_small_and_grow_gradually() -> None:
    model = StepTimeModel(FIRST_CHUNK)
    assert model.largest_chunk(0, 1.0) > 10_000
    assert model.most_tokens() == FIRST_CHUNK
    model.observe(400, 80200.0, 0.1)
    assert model.most_tokens() == 400 * GROWTH
    assert model.largest_chunk(0, 0.0) == 0
