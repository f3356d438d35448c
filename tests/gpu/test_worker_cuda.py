"""The worker and the sampler on a GPU against themselves on the CPU, with reference operations: what the device must not change."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.attention.base import LayerSpec
from octavo.attention.torch_paged import TorchPagedAttention
from octavo.config.types import EngineConfig
from octavo.models import loader
from octavo.ops.registry import load_ops
from octavo.protocol.params import SamplingParams
from octavo.protocol.step import StepResult
from octavo.sampling.keys import row_keys
from octavo.sampling.random import uniforms
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplerState
from octavo.worker.worker import Worker
from tests.support.engine_configs import engine_config
from tests.support.paged_batches import Pool, step_batch
from tests.support.step_plans import Row, slot_init
from tests.support.tiny_models import save_tiny
from tests.unit.worker.test_worker import VOCAB, Driver, params, prompt_of, small_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def on_gpu(config: EngineConfig) -> EngineConfig:
    total = torch.cuda.mem_get_info()[1]
    return dataclasses.replace(config, device=dataclasses.replace(config.device, kind="cuda", total_bytes=total))


@pytest.fixture
def reference_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.worker.worker.load_ops", lambda _, **settings: load_ops("reference", **settings))


def test_random_numbers_are_the_same_bits() -> None:
    seeds, positions = np.arange(50, dtype=np.int64) * 2**55 - 7, np.arange(50, dtype=np.int32)
    keys = torch.from_numpy(row_keys(seeds, np.zeros(50, np.int32), positions))
    assert torch.equal(uniforms(keys, 2**31 - 5, 900), uniforms(keys.to(GPU), 2**31 - 5, 900).cpu())


def test_sampler_gives_the_same_tokens_and_logprobs() -> None:
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 3},
        {"top_k": 20},
        {"top_p": 0.8, "logprobs": -1},
        {"min_p": 0.1, "presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"logit_bias": {3: 5.0}, "min_tokens": 4, "stop_token_ids": [7], "logprob_token_ids": [1, 2]},
        {"allowed_token_ids": [4, 5, 6], "bad_words_token_ids": [[9, 5]]},
        {},
    ] * 4
    sampling = [SamplingParams(max_tokens=None, seed=i, **w) for i, w in enumerate(wishes)]
    tokens = [[*prompt_of(i, 6 + i % 3), 9] for i in range(len(wishes))]
    logits = torch.randn(len(wishes), VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    slots = np.arange(len(wishes), dtype=np.int32)
    lengths = np.asarray([len(t) for t in tokens], np.int32)
    results = []
    for device in (CPU, GPU):
        state = SamplerState(len(wishes), device)
        state.enter([slot_init(i, t, [1], sampling=p, num_prompt=3) for i, (t, p) in enumerate(zip(tokens, sampling, strict=True))])
        table = torch.zeros(len(wishes), 32, dtype=torch.int32)
        for i, t in enumerate(tokens):
            table[i, : len(t)] = torch.tensor(t)
        sampled = Sampler(state, table.to(device)).sample(logits.clone().to(device), slots, lengths).to_host()
        torch.cuda.synchronize()
        results.append(sampled)
    cpu, gpu = results
    assert cpu.tokens.tolist() == gpu.tokens.tolist()
    assert cpu.valid.tolist() == gpu.valid.tolist()
    expected, got = cpu.logprob_rows(), gpu.logprob_rows()
    assert expected is not None
    assert got is not None
    assert list(expected) == list(got)
    for slot, (row,) in expected.items():
        assert (row.token_id, row.rank, row.top_ids) == (got[slot][0].token_id, got[slot][0].rank, got[slot][0].top_ids)
        assert row.top_logprobs == pytest.approx(got[slot][0].top_logprobs, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_attention_equals_the_cpu(dtype: torch.dtype) -> None:
    layers = (LayerSpec(6, 2, 32, 0.2), LayerSpec(6, 2, 32, 0.2, sliding_window=9), LayerSpec(6, 2, 32, 0.2, soft_cap=3.0))
    tables = Pool(60, 4).tables([41, 9, 30, 150 // 4])
    cpu, gpu = (TorchPagedAttention(layers, 60, 4, dtype, device) for device in (CPU, GPU))
    for starts, counts in (([0, 0, 0, 0], [40, 8, 21, 30]), ([40, 8, 21, 30], [1, 1, 9, 7])):
        batch = step_batch(starts, counts, tables, 4)
        moved = dataclasses.replace(batch, **{n: v.to(GPU) for n, v in vars(batch).items() if isinstance(v, torch.Tensor)})
        attend, attend_gpu = cpu.plan(batch), gpu.plan(moved)
        for layer in range(3):
            q, k, v = (torch.randn(sum(counts), heads, 32).to(dtype) for heads in (6, 2, 2))
            expected, got = attend(layer, q, k, v), attend_gpu(layer, q.to(GPU), k.to(GPU), v.to(GPU)).cpu()
            tolerance = 1e-4 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    gpu.copy_blocks(torch.tensor([1, 2], dtype=torch.int32, device=GPU), torch.tensor([2, 1], dtype=torch.int32, device=GPU))


@pytest.mark.usefixtures("reference_ops")
def test_worker_gives_the_cpus_tokens_with_a_step_in_flight(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    hf_config = json.loads((tmp_path / "config.json").read_text())
    config = engine_config(path=str(tmp_path), hf_config=hf_config, load_format="auto", vocab_size=128)
    prompts = [[t % 128 for t in prompt_of(i, 11)] for i in range(4)]
    expected = [Driver(Worker(config, lambda *_: None)).generate(p, 8, sampling=params(i))[0] for i, p in enumerate(prompts)]
    worker = Worker(on_gpu(config), lambda *_: None)
    for i, prompt in enumerate(prompts):
        driver, results = Driver(worker), list[StepResult]()
        init = [slot_init(0, prompt, driver.blocks(20), sampling=params(i))]
        worker.submit(driver.plans([Row(0, 0, 11, True)], init=init))
        for step in range(7):
            worker.submit(driver.plans([Row(0, 11 + step, 1, True)]))
            results.append(worker.collect())
        results.append(worker.collect())
        tokens = [int(t) for r in results for t in r.tokens]
        assert tokens == expected[i]
        assert all(r.step_seconds > 0 for r in results)
    worker.shutdown()


def test_weights_are_there_when_loading_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products do not wait for what has written them: see `ops.registry.Linear`."""
    build = loader.build_decoder

    def slowly(*args: Any, **settings: Any) -> Any:
        torch.cuda._sleep(500_000_000)  # some 0.3 s, as if much were still on its way
        return build(*args, **settings)

    monkeypatch.setattr(loader, "build_decoder", slowly)
    loader.load_model(on_gpu(small_config()), load_ops("cuda"), GPU, lambda *_: None)
    assert torch.cuda.current_stream().query()


@pytest.mark.usefixtures("reference_ops")
@pytest.mark.alone
def test_memory_is_measured() -> None:
    config = on_gpu(small_config(num_blocks=None, max_num_seqs=4))
    worker = Worker(dataclasses.replace(config, cache=dataclasses.replace(config.cache, memory_utilization=0.05)), lambda *_: None)
    report = worker.ready_report
    assert report.total_bytes == torch.cuda.mem_get_info()[1]
    assert report.activation_bytes > 0
    used = report.cache_bytes + report.activation_bytes + report.weights_bytes + report.other_bytes
    assert used <= 0.05 * report.total_bytes
    assert used > 0.049 * report.total_bytes
    assert Driver(worker).generate(prompt_of(0, 5), 3)[0]
    worker.shutdown()
