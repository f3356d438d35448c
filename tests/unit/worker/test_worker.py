"""The worker end to end with a small random model: the same tokens however a request is cut, batched, delayed or resumed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from octavo.config.sizes import format_bytes
from octavo.config.types import EngineConfig
from octavo.errors import EngineDead
from octavo.executor.inline import InlineExecutor
from octavo.parallel.group import Ranks
from octavo.protocol.params import SamplingParams
from octavo.protocol.step import StepResult
from octavo.worker.worker import Worker
from tests.support.engine_configs import engine_config
from tests.support.step_plans import Plans, Row, slot_init

BLOCK, VOCAB = 4, 300
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.3,
}


def small_config(**settings: Any) -> EngineConfig:
    return engine_config(hf_config=LLAMA, vocab_size=VOCAB, **{"num_blocks": 200, "max_model_len": 96, **settings})


@pytest.fixture(scope="module")
def worker() -> Worker:
    return Worker(small_config(), lambda *_: None)


class Driver:
    """Plays the core for one worker: blocks are dealt out in order, never reused."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.plans = Plans()
        self.next_block = 1

    def blocks(self, length: int) -> list[int]:
        first, self.next_block = self.next_block, self.next_block + -(-length // BLOCK)
        return list(range(first, self.next_block))

    def step(self, rows: Sequence[Row], **more: Any) -> StepResult:
        self.worker.submit(self.plans(rows, **more))
        return self.worker.collect()

    def generate(
        self, prompt: Sequence[int], steps: int, *, slot: int = 0, chunk: int = 999, sampling: SamplingParams | None = None
    ) -> tuple[list[int], list[StepResult]]:
        """Tokens of one request alone, its prompt cut into chunks."""
        init = [slot_init(slot, prompt, self.blocks(len(prompt) + steps), sampling=sampling)]
        results = []
        for start in range(0, len(prompt), chunk):
            count = min(chunk, len(prompt) - start)
            results.append(self.step([Row(slot, start, count, start + count == len(prompt))], init=init))
            init = []
        for i in range(1, steps):
            results.append(self.step([Row(slot, len(prompt) + i - 1, 1, True)]))
        return [int(t) for r in results for t in r.tokens], results


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def params(i: int, **more: Any) -> SamplingParams:
    """Greedy for even i, sampled for odd."""
    return SamplingParams(temperature=0.9 if i % 2 else 0.0, top_p=0.9 if i % 3 == 1 else 1.0, seed=i, max_tokens=None, **more)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
@pytest.mark.parametrize("kind", [0, 1])
def test_chunked_prompts_give_the_same_tokens(worker: Worker, chunk: int, kind: int) -> None:
    prompt = prompt_of(1, 22)
    whole, _ = Driver(worker).generate(prompt, 8, sampling=params(kind))
    cut, _ = Driver(worker).generate(prompt, 8, chunk=chunk, slot=3, sampling=params(kind))
    assert len(whole) == 8
    assert whole == cut


def test_tokens_depend_on_the_prompt_and_vary(worker: Worker) -> None:
    """Guards the other tests against a model that says one thing whatever it is told."""
    runs = [Driver(worker).generate(prompt_of(i, 12), 8)[0] for i in range(6)]
    assert len({tuple(r) for r in runs}) == 6
    assert len({t for r in runs for t in r}) > 10


def test_mixed_steps_equal_requests_alone(worker: Worker) -> None:
    """Prompt chunks, decodes and different samplers share steps; everyone's tokens are as if alone."""
    prompts = [prompt_of(10 + i, n) for i, n in enumerate([5, 17, 30, 9, 2])]
    alone = [Driver(worker).generate(p, 6, sampling=params(i))[0] for i, p in enumerate(prompts)]
    driver = Driver(worker)
    inits = [slot_init(i, p, driver.blocks(len(p) + 6), sampling=params(i)) for i, p in enumerate(prompts)]
    done, tokens = [0] * 5, [[] for _ in range(5)]  # type: tuple[list[int], list[list[int]]]
    for number in range(40):
        rows, init = [], []
        for i, prompt in enumerate(prompts):
            if number < i or len(tokens[i]) == 6:
                continue
            count = 1 if tokens[i] else min(4 + i, len(prompt) - done[i])
            rows.append(Row(i, done[i], count, done[i] + count >= len(prompt)))
            init += [inits[i]] if number == i else []
            done[i] += count
        if not rows:
            break
        result = driver.step(rows, init=init)
        for slot, token in zip(result.slots.tolist(), result.tokens.tolist(), strict=True):
            tokens[slot].append(token)
    assert tokens == alone


def test_steps_in_flight_give_the_same_tokens(worker: Worker) -> None:
    """k=1: step N+1 is submitted before the tokens of step N are collected."""
    prompt = prompt_of(2, 9)
    for kind in (0, 1):
        expected, _ = Driver(worker).generate(prompt, 7, sampling=params(kind))
        driver, tokens = Driver(worker), []
        init = [slot_init(0, prompt, driver.blocks(20), sampling=params(kind))]
        worker.submit(driver.plans([Row(0, 0, 9, True)], init=init))
        for i in range(6):
            worker.submit(driver.plans([Row(0, 9 + i, 1, True)]))
            tokens += worker.collect().tokens.tolist()
        tokens += worker.collect().tokens.tolist()
        assert tokens == expected


def test_resume_continues_as_if_never_stopped(worker: Worker) -> None:
    """Preempted after 4 outputs: it comes back in another slot and block layout, with penalties counted from its tokens."""
    prompt = prompt_of(3, 10)
    for kind in (0, 1):
        sampling = params(kind, presence_penalty=0.8, frequency_penalty=0.4, repetition_penalty=1.2)
        expected, _ = Driver(worker).generate(prompt, 9, sampling=sampling)
        driver = Driver(worker)
        driver.next_block = 60
        known = prompt + expected[:4]
        init = [slot_init(5, known, driver.blocks(30), sampling=sampling, num_prompt=len(prompt))]
        tokens = driver.step([Row(5, 0, len(known), True)], init=init).tokens.tolist()
        for i in range(4):
            tokens += driver.step([Row(5, len(known) + i, 1, True)]).tokens.tolist()
        assert tokens == expected[4:]


def test_cached_prefix_and_copy_on_write(worker: Worker) -> None:
    """A second request shares the first's full blocks and a copy of its partly filled one, and computes only the rest."""
    prompt = prompt_of(4, 14)
    other = [*prompt[:10], *prompt_of(5, 6)]
    driver = Driver(worker)
    expected_first, _ = driver.generate(prompt, 5, slot=0)
    expected_other, _ = driver.generate(other, 5, slot=1)

    driver.next_block = 100
    first = driver.blocks(20)
    tokens = driver.step([Row(0, 0, 14, True)], init=[slot_init(0, prompt, first)]).tokens.tolist()
    fresh = driver.blocks(12)
    shared = [*first[:2], *fresh]
    result = driver.step([Row(0, 14, 1, True), Row(1, 10, 6, True)], init=[slot_init(1, other, shared)], copies=[(first[2], fresh[0])])
    by_slot = dict(zip(result.slots.tolist(), result.tokens.tolist(), strict=True))
    tokens.append(by_slot[0])
    shared_tokens = [by_slot[1]]
    for i in range(3):
        result = driver.step([Row(0, 15 + i, 1, True), Row(1, 16 + i, 1, True)])
        by_slot = dict(zip(result.slots.tolist(), result.tokens.tolist(), strict=True))
        tokens.append(by_slot[0])
        shared_tokens.append(by_slot[1])
    assert tokens == expected_first
    assert shared_tokens == expected_other[:4]


def test_prompt_logprobs_over_chunks_and_logprobs(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(6, 13)
    sampling = params(0, logprobs=3, prompt_logprobs=2)
    _, whole = Driver(worker).generate(prompt, 3, sampling=sampling)
    monkeypatch.setattr("octavo.worker.runner.SLICE_ELEMENTS", 2 * VOCAB)
    _, cut = Driver(worker).generate(prompt, 3, chunk=5, sampling=sampling)

    def scored(results: list[StepResult]) -> list[Any]:
        return [row for r in results for row in (r.prompt_logprobs or {}).get(0, [])]

    rows = scored(whole)
    assert [row.token_id for row in rows] == prompt[1:]
    for a, b in zip(rows, scored(cut), strict=True):
        assert (a.token_id, a.rank, a.top_ids) == (b.token_id, b.rank, b.top_ids)
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    sampled = [r.logprobs[0][0] for r in whole if r.logprobs]
    assert len(sampled) == 3
    assert all(row.rank == 1 and row.top_ids[0] == row.token_id and len(row.top_ids) == 3 for row in sampled)

    # A greedy continuation scored as a prompt has the logprobs it was sampled with.
    tokens = [row.token_id for row in sampled]
    _, again = Driver(worker).generate([*prompt, *tokens], 1, sampling=params(0, prompt_logprobs=0))
    for row, before in zip(scored(again)[-3:], sampled, strict=True):
        assert row.logprob == pytest.approx(before.logprob, abs=1e-4)
        assert row.rank == 1


def test_a_failing_step_leaves_the_worker_usable(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(7, 9)
    expected, _ = Driver(worker).generate(prompt, 4)
    driver = Driver(worker)
    with monkeypatch.context() as patch:
        patch.setattr(worker._model, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.step([Row(0, 0, 9, True)], init=[slot_init(0, prompt, driver.blocks(12))])
    assert Driver(worker).generate(prompt, 4)[0] == expected


def test_nan_fails_its_request_alone(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt_of(20 + i, 6) for i in range(3)]
    alone = [Driver(worker).generate(p, 1)[0] for p in prompts]
    logits = worker._model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        out = logits(hidden)
        out[1, 3] = torch.nan
        return out

    driver = Driver(worker)
    inits = [slot_init(i, p, driver.blocks(8)) for i, p in enumerate(prompts)]
    with monkeypatch.context() as patch:
        patch.setattr(worker._model, "logits", poisoned)
        result = driver.step([Row(i, 0, 6, True) for i in range(3)], init=inits)
    assert list(result.errors) == [1]
    assert "not a number" in result.errors[1]
    assert [result.tokens[0], result.tokens[2]] == [alone[0][0], alone[2][0]]


def test_a_step_of_frees_only(worker: Worker) -> None:
    result = Driver(worker).step([], free=[0, 1])
    assert len(result.slots) == len(result.tokens) == 0


def test_a_step_that_a_rank_took_no_part_in_has_no_result() -> None:
    gone: list[str] = []

    def check() -> None:
        if gone:
            raise EngineDead(gone[0])

    driver = Driver(Worker(small_config(), lambda *_: None, ranks=Ranks(check=check)))
    init = [slot_init(0, prompt_of(0, 5), driver.blocks(8))]
    assert len(driver.step([Row(0, 0, 5, True)], init=init).tokens) == 1
    gone.append("Rank 1 did not take part")
    with pytest.raises(EngineDead, match="Rank 1"):
        driver.step([Row(0, 5, 1, True)])


def test_report_and_executor() -> None:
    seen = []
    executor = InlineExecutor(lambda: Worker(small_config(num_blocks=None, max_num_seqs=2), lambda *a: seen.append(a)))
    report, shape = executor.ready_report, executor.cache_shape
    assert shape.num_blocks == report.num_blocks == 1 + 2 * 96 // BLOCK
    assert shape.bytes_per_block == 2 * 2 * 2 * BLOCK * 8 * 4
    assert report.cache_bytes == shape.num_blocks * shape.bytes_per_block
    assert report.weights_bytes > 0
    assert [p.name for p in report.phases] == ["load", "tables", "memory", "cache", "graphs", "warm-up"]
    assert seen[-1][1] == seen[-1][2]
    assert Driver(executor).generate(prompt_of(0, 5), 3)[0]  # type: ignore[arg-type]
    executor.shutdown()


def test_phases_within_one_another_count_once() -> None:
    worker = Worker(small_config(max_num_seqs=2), lambda *_: None)
    worker._phases.clear()
    began = time.perf_counter()
    with worker._phase("outer"):
        for _ in range(2):
            with worker._phase("inner"):
                time.sleep(0.02)
    with worker._phase("last"):
        pass
    whole, phases = time.perf_counter() - began, worker._phases
    assert [p.name for p in phases] == ["inner", "inner", "outer", "last"]
    assert sum(p.seconds for p in phases) <= whole
    assert phases[2].seconds < whole - 0.04


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_run(dtype: Any) -> None:
    worker = Worker(small_config(dtype=dtype, max_num_seqs=2), lambda *_: None)
    tokens, results = Driver(worker).generate(prompt_of(0, 9), 4, sampling=params(0, logprobs=1))
    assert len(tokens) == 4
    assert all(r.errors is None for r in results)


def test_memory_that_all_ranks_but_one_have_in_vain_is_said() -> None:
    """What another rank has is played: this one, with the least free, is number 3."""
    free = small_config().device.free_bytes

    def smallest(number: int) -> int:
        return 2 * number if number < 0 else number

    report = Worker(small_config(), lambda *_: None, ranks=Ranks(smallest=smallest, number=3)).ready_report
    assert [w for w in report.warnings if w.startswith("The device of rank 3 had ") and format_bytes(2 * free) in w]
    assert not any("The device of rank" in w for w in Worker(small_config(), lambda *_: None).ready_report.warnings)
