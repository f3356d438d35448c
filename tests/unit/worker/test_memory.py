"""How the KV cache is sized, and what is said when a length does not fit."""

from __future__ import annotations

import dataclasses
import re

import pytest

from octavo.config.types import EngineConfig, NodesConfig, ParallelConfig
from octavo.errors import ConfigError
from octavo.worker import memory
from octavo.worker.memory import Budget, CudaMemory, GraphMemory, cannot_allocate, cpu_budget, cuda_budget, size_cache
from tests.support.engine_configs import engine_config

MIB, GIB = 2**20, 2**30
BLOCK_BYTES = MIB


def budget(cache: int, total: int = 1000 * MIB) -> Budget:
    return Budget(total=total, other=100 * MIB, weights=200 * MIB, activations=50 * MIB, cache=cache)


def on_gpu(config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(config, device=dataclasses.replace(config.device, kind="cuda"))


def test_graphs_are_counted_by_what_this_process_has_reserved() -> None:
    """Whatever others do meanwhile: all of the card is gone, then free again."""
    driver = 28 * memory.DRIVER_BYTES_A_LAYER
    before, after = CudaMemory(80 * GIB, 50 * GIB, GIB, 900 * MIB), CudaMemory(80 * GIB, 0, GIB + 400 * MIB, 930 * MIB)
    another = CudaMemory(80 * GIB, 60 * GIB, GIB + 402 * MIB, 931 * MIB)
    found = GraphMemory.of(before, after, another, layers=28, largest=2, others=60)
    assert found == GraphMemory(400 * MIB + 2 * driver, 60 * (MIB + driver))
    found = GraphMemory.of(before, before, dataclasses.replace(before, allocated=0), layers=28, largest=2, others=60)
    assert found == GraphMemory(2 * driver, 60 * driver)
    assert 70 * 10 * driver < memory.HEADROOM * 80 * GIB


def test_gpu_takes_all_that_is_left() -> None:
    config = on_gpu(engine_config(num_blocks=None, max_model_len=128, block_size=16))
    assert size_cache(config, budget(500 * MIB + 5), BLOCK_BYTES) == memory.CacheSize(500, 128)


def test_cpu_takes_no_more_than_all_requests_need() -> None:
    config = engine_config(num_blocks=None, max_model_len=100, block_size=16, max_num_seqs=4)
    assert size_cache(config, budget(500 * MIB), BLOCK_BYTES).num_blocks == 1 + 4 * 7
    assert size_cache(config, budget(20 * MIB), BLOCK_BYTES).num_blocks == 20


def test_bytes_that_were_asked_for_win_and_are_warned_about() -> None:
    config = engine_config(num_blocks=None, memory_bytes=300 * MIB, max_model_len=64, block_size=16)
    assert size_cache(config, budget(500 * MIB), BLOCK_BYTES) == memory.CacheSize(300, 64)
    size = size_cache(config, budget(200 * MIB), BLOCK_BYTES)
    assert size.num_blocks == 300
    assert "only 200.0 MiB" in size.warnings[0]


def test_override_is_taken_as_it_is() -> None:
    config = engine_config(num_blocks=5, max_model_len=128, block_size=16)
    size = size_cache(config, budget(0), BLOCK_BYTES)
    assert (size.num_blocks, size.max_model_len) == (5, 128)
    assert "64 tokens" in size.warnings[0]
    auto = engine_config(num_blocks=5, max_model_len=128, block_size=16, auto_max_model_len=True)
    assert size_cache(auto, budget(0), BLOCK_BYTES) == memory.CacheSize(5, 64)


def test_the_length_that_an_error_names_fits_and_the_next_does_not() -> None:
    asked = engine_config(num_blocks=None, max_model_len=1000, block_size=16)
    with pytest.raises(ConfigError, match=r"max_model_len=1000 needs 64\.0 MiB .* 10\.0 MiB") as e:
        size_cache(asked, budget(10 * MIB), BLOCK_BYTES)
    fits = int(re.search(r"Lower --max-model-len to (\d+)", str(e.value)).group(1))  # type: ignore[union-attr]
    assert fits == 9 * 16
    assert (
        size_cache(engine_config(num_blocks=None, max_model_len=fits, block_size=16), budget(10 * MIB), BLOCK_BYTES).max_model_len == fits
    )
    with pytest.raises(ConfigError):
        size_cache(engine_config(num_blocks=None, max_model_len=fits + 1, block_size=16), budget(10 * MIB), BLOCK_BYTES)


def test_the_setting_that_an_error_names_is_enough() -> None:
    config = on_gpu(engine_config(num_blocks=None, max_model_len=2000, block_size=16))
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, memory_utilization=0.36))
    with pytest.raises(ConfigError) as e:
        size_cache(config, budget(10 * MIB), BLOCK_BYTES)
    fraction = float(re.search(r"--gpu-memory-utilization to ([0-9.]+)\.$", str(e.value)).group(1))  # type: ignore[union-attr]
    left = int(1000 * MIB * fraction) - 350 * MIB
    assert size_cache(config, budget(left), BLOCK_BYTES).max_model_len == 2000

    asked = engine_config(num_blocks=None, memory_bytes=10 * MIB, max_model_len=2000, block_size=16)
    with pytest.raises(ConfigError) as e:
        size_cache(asked, budget(500 * MIB), BLOCK_BYTES)
    enough = int(re.search(r"--kv-cache-memory-bytes to at least (\d+)", str(e.value)).group(1))  # type: ignore[union-attr]
    config = engine_config(num_blocks=None, memory_bytes=enough, max_model_len=2000, block_size=16)
    assert size_cache(config, budget(500 * MIB), BLOCK_BYTES).max_model_len == 2000


def test_nothing_fits() -> None:
    config = engine_config(num_blocks=None, max_model_len=100)
    for cache in (-5 * MIB, 0, MIB):
        with pytest.raises(ConfigError, match="No length fits"):
            size_cache(config, budget(cache), BLOCK_BYTES)


def test_advice_is_what_would_help_on_a_cpu() -> None:
    """The default takes half of what is free: a size of the user's own may be twice as large, and no larger."""
    config = engine_config(num_blocks=None, max_model_len=100, block_size=16)
    with pytest.raises(ConfigError, match="or set --cpu-kvcache-space to at least 0"):
        size_cache(config, budget(5 * MIB), BLOCK_BYTES)
    with pytest.raises(ConfigError, match=r"Lower --max-model-len to 16 or less \(auto finds it\)\.$"):
        size_cache(config, dataclasses.replace(budget(2 * MIB), activations=MIB), BLOCK_BYTES)
    steps = dataclasses.replace(budget(2 * MIB), activations=9 * MIB)
    with pytest.raises(ConfigError, match=r"A step may take 9\.0 MiB: --max-num-batched-tokens and --max-num-seqs lower that\.$"):
        size_cache(config, steps, BLOCK_BYTES)


def test_auto_asks_for_no_more_than_a_block() -> None:
    config = engine_config(num_blocks=None, max_model_len=1000, block_size=16, auto_max_model_len=True)
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, memory_bytes=BLOCK_BYTES))
    least = 2 * BLOCK_BYTES
    with pytest.raises(ConfigError, match=rf"max_model_len=auto, here the length of one block \(16\),.* to at least {least}\.$"):
        size_cache(config, budget(10 * BLOCK_BYTES), BLOCK_BYTES)
    enough = dataclasses.replace(config, cache=dataclasses.replace(config.cache, memory_bytes=least))
    assert size_cache(enough, budget(10 * BLOCK_BYTES), BLOCK_BYTES).max_model_len == 16


def test_auto_shrinks_and_says_so() -> None:
    config = engine_config(num_blocks=None, max_model_len=1000, block_size=16, auto_max_model_len=True)
    size = size_cache(config, budget(10 * MIB), BLOCK_BYTES)
    assert (size.num_blocks, size.max_model_len) == (10, 144)
    assert "max_model_len is 144" in size.warnings[0]


def test_cpu_budget_leaves_half_and_caps_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(num_blocks=None)
    monkeypatch.setattr(memory, "host_memory", lambda **_: (2**35, 2**31))
    assert cpu_budget(config, 0, 2**20).cache == (2**31 - 2**20) // 2
    monkeypatch.setattr(memory, "host_memory", lambda **_: (2**35, 2**34))
    assert cpu_budget(config, 0, 0).cache == 4 * 2**30
    assert cpu_budget(engine_config(num_blocks=None, memory_bytes=7 * 2**30), 0, 0).cache == 2**34
    several = dataclasses.replace(config, parallel=ParallelConfig(tensor=4, pipeline=2, data=3, nodes=NodesConfig(count=2)))
    assert cpu_budget(several, 0, 0).cache == 2**33 // 12  # four ranks of each of three replicas are here
    asked = dataclasses.replace(several, cache=dataclasses.replace(config.cache, memory_bytes=2**33))
    assert cpu_budget(asked, 0, 0).cache == 2**34 // 12


def test_cpu_budget_within_a_limited_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step and everything else will map is left out; nobody else uses these addresses, so there is no half for others."""
    monkeypatch.setattr(memory, "host_memory", lambda **_: (2**35, 2**34))
    monkeypatch.setattr(memory.address_space, "limit", lambda: 2**30)
    monkeypatch.setattr(memory.address_space, "used", lambda: 2**28)
    config = engine_config(num_blocks=None)
    found = cpu_budget(config, 0, 2**27)
    grammars = memory.address_space.BYTES_A_TOKEN * config.model.vocab_size
    assert found.cache == 2**30 - 2**28 - 2**27 - memory.ADDRESS_GROWTH - grammars
    assert found.total == 2**30
    config = engine_config(num_blocks=None, max_model_len=1000)
    with pytest.raises(
        ConfigError, match=r"Lower --max-model-len to 36 .*, or raise the limit of the address space \(1\.0 GiB, ulimit -v\)\."
    ):
        size_cache(config, budget(10 * MIB), BLOCK_BYTES)
    with pytest.raises(ConfigError, match=r"into the address space of 1\.0 GiB \(ulimit -v\): raise that limit, or use a smaller model\."):
        size_cache(config, budget(0), BLOCK_BYTES)
    config = engine_config(num_blocks=None, max_model_len=100)
    with pytest.raises(ConfigError, match=r"raise that limit, lower what a step may take \(50\.0 MiB\) with --max-num-batched-tokens"):
        size_cache(config, budget(0), BLOCK_BYTES)


@pytest.mark.parametrize(
    ("settings", "flag", "most"),
    [
        ({"num_blocks": 9000}, "--num-gpu-blocks-override", 20),
        ({"num_blocks": None, "memory_bytes": 9000 * MIB}, "--kv-cache-memory-bytes", 20 * MIB),
    ],
)
def test_a_refused_allocation_names_the_setting_and_a_value_that_fits(settings: dict[str, int | None], flag: str, most: int) -> None:
    config = engine_config(max_model_len=64, block_size=16, **settings)
    size = size_cache(config, budget(20 * MIB), BLOCK_BYTES)
    text = cannot_allocate(config, budget(20 * MIB), size.num_blocks, size.num_blocks * BLOCK_BYTES)
    assert "8.8 GiB cannot be allocated: about 20.0 MiB are free" in text
    assert flag in text
    assert f" to {most}" in text


NO_GRAPHS = GraphMemory(0, 0)


def gpu_config(utilization: float, **settings: int) -> EngineConfig:
    config = on_gpu(engine_config(num_blocks=None, max_model_len=64, block_size=16, **settings))
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, memory_utilization=utilization))


def test_a_gpu_gives_its_allowed_fraction_less_everything_else() -> None:
    memory_now = CudaMemory(total=100 * GIB, free=83 * GIB, reserved=16 * GIB)
    budget = cuda_budget(gpu_config(0.9), 16 * GIB, 20 * GIB, GraphMemory(2 * GIB, GIB), memory_now)
    assert (budget.total, budget.other, budget.weights, budget.activations) == (100 * GIB, GIB, 16 * GIB, 7 * GIB)
    assert budget.cache == int(0.9 * 100 * GIB) - GIB - 23 * GIB


def test_what_other_processes_hold_counts_only_where_it_stands_in_the_way() -> None:
    alone = cuda_budget(gpu_config(0.3), 0, 0, NO_GRAPHS, CudaMemory(100 * GIB, 99 * GIB, 0))
    shared = cuda_budget(gpu_config(0.3), 0, 0, NO_GRAPHS, CudaMemory(100 * GIB, 50 * GIB, 0))
    assert shared.other == 50 * GIB
    assert alone.cache == shared.cache == 29 * GIB, "the fraction is of the card, for this process"
    crowded = cuda_budget(gpu_config(0.9), 0, 10 * GIB, NO_GRAPHS, CudaMemory(100 * GIB, 40 * GIB, 10 * GIB))
    assert crowded.cache == 39 * GIB, "what is free, with a little left over"


def test_a_size_that_was_asked_for_may_take_all_that_is_free() -> None:
    config = gpu_config(0.1, memory_bytes=60 * GIB)
    budget = cuda_budget(config, 0, 10 * GIB, NO_GRAPHS, CudaMemory(100 * GIB, 90 * GIB, 10 * GIB))
    assert budget.cache == 89 * GIB
    assert size_cache(config, budget, GIB) == memory.CacheSize(60, 64)


@pytest.mark.parametrize(("utilization", "free", "advised"), [(0.02, 99, "0.04"), (0.02, 5, "0.04"), (0.02, 3, None), (0.5, 3, None)])
def test_a_fraction_is_advised_only_where_it_helps(utilization: float, free: int, advised: str | None) -> None:
    """3 GiB are needed. What others hold does not give way to a larger fraction."""
    config = gpu_config(utilization)
    seen = CudaMemory(100 * GIB, free * GIB, 0)
    with pytest.raises(ConfigError) as e:
        size_cache(config, cuda_budget(config, 0, 0, NO_GRAPHS, seen), 3 * GIB // 5)
    assert ("--gpu-memory-utilization to" in str(e.value)) == (advised is not None)
    if advised is not None:
        raised = dataclasses.replace(config, cache=dataclasses.replace(config.cache, memory_utilization=float(advised)))
        assert f"--gpu-memory-utilization to {advised}" in str(e.value)
        assert size_cache(raised, cuda_budget(raised, 0, 0, NO_GRAPHS, seen), 3 * GIB // 5).max_model_len == 64


def test_whoever_holds_the_memory_is_named() -> None:
    config = gpu_config(0.9)
    with pytest.raises(ConfigError, match=r"Other processes hold 90\.0 GiB of the GPU's 100\.0 GiB") as e:
        size_cache(config, Budget(total=100 * GIB, other=90 * GIB, weights=8 * GIB, activations=GIB, cache=0), GIB)
    assert "gpu-memory-utilization" not in str(e.value), "no fraction would help"
    with pytest.raises(ConfigError, match="--max-num-batched-tokens and --max-num-seqs lower that"):
        size_cache(config, Budget(total=100 * GIB, other=0, weights=60 * GIB, activations=40 * GIB, cache=0), GIB)
