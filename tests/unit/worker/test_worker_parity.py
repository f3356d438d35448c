"""The worker against transformers: greedy tokens, logprobs and prompt logprobs, with the paged cache in between."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.checkpoint.gguf_config import gguf_hf_config
from octavo.checkpoint.gguf_file import read_gguf
from octavo.config.types import EngineConfig
from octavo.protocol.params import SamplingParams
from octavo.worker.worker import Worker
from tests.support.bundled import bundled_model_path
from tests.support.engine_configs import engine_config
from tests.support.step_plans import Row, slot_init
from tests.support.tiny_models import save_tiny
from tests.unit.worker.test_worker import Driver

GOLDEN = Path(__file__).parents[2] / "models" / "golden.json"


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=None, **more)


@pytest.mark.parametrize(("family", "more"), [("llama", {}), ("mistral", {"sliding_window": 7}), ("qwen3", {})])
def test_tokens_and_logprobs_equal_transformers(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    model = save_tiny(tmp_path, family, **more)
    hf_config = json.loads((tmp_path / "config.json").read_text())
    worker = Worker(engine_config(path=str(tmp_path), hf_config=hf_config, load_format="auto", vocab_size=128), lambda *_: None)
    prompts = [[5, 9, 13, 2, 77, 41, 100, 3, 8, 60, 61, 62, 63], [7, 7, 90], [30]]
    driver = Driver(worker)
    inits = [slot_init(i, p, driver.blocks(32), sampling=greedy(logprobs=4, prompt_logprobs=2)) for i, p in enumerate(prompts)]
    results = [driver.step([Row(i, 0, len(p), True) for i, p in enumerate(prompts)], init=inits)]
    for step in range(9):
        results.append(driver.step([Row(i, len(p) + step, 1, True) for i, p in enumerate(prompts)]))
    for slot, prompt in enumerate(prompts):
        tokens = [dict(zip(r.slots.tolist(), r.tokens.tolist(), strict=True))[slot] for r in results]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0].double()
        expected = torch.log_softmax(logits, -1)
        outputs = [r.logprobs[slot][0] for r in results if r.logprobs]
        prompt_rows = (results[0].prompt_logprobs or {}).get(slot, [])
        assert [row.token_id for row in prompt_rows] == prompt[1:]
        assert [row.token_id for row in outputs] == tokens
        for position, row in enumerate([*prompt_rows, *outputs]):
            assert row.logprob == pytest.approx(float(expected[position, row.token_id]), abs=2e-4)
            assert row.top_logprobs == pytest.approx(expected[position].topk(len(row.top_ids)).values.tolist(), abs=2e-4)
        best = logits[len(prompt) - 1 : -1].topk(2)
        clear = (best.values[:, 0] - best.values[:, 1] > 1e-3).tolist()
        assert [t for t, c in zip(tokens, clear, strict=True) if c] == [
            t for t, c in zip(best.indices[:, 0].tolist(), clear, strict=True) if c
        ]
        assert sum(clear) >= 8


def bundled_config(**settings: Any) -> EngineConfig:
    path = bundled_model_path()
    parsed = read_gguf(path)
    hf_config = gguf_hf_config(parsed.metadata, parsed.tensors)
    sizes = {"vocab_size": 49152, "max_model_len": 512, "block_size": 16, "num_blocks": 200, "max_num_seqs": 32, **settings}
    return engine_config(path=path, hf_config=hf_config, load_format="auto", **sizes)


@pytest.mark.model
def test_bundled_model_in_one_batch_equals_transformers() -> None:
    """All golden prompts together, their prompts cut into chunks; transformers ran each alone."""
    config = bundled_config(max_num_batched_tokens=256)
    worker = Worker(dataclasses.replace(config, device=dataclasses.replace(config.device, threads=2)), lambda *_: None)
    cases = json.loads(GOLDEN.read_text())["cases"][:8]
    length = 10
    driver = Driver(worker)
    blocks = iter(range(1, 200))
    inits = [
        slot_init(i, c["prompt_ids"], [next(blocks) for _ in range(-(-(len(c["prompt_ids"]) + length) // 16))], sampling=greedy())
        for i, c in enumerate(cases)
    ]
    done, tokens = [0] * len(cases), [[] for _ in cases]  # type: tuple[list[int], list[list[int]]]
    init = inits
    while any(len(t) < length for t in tokens):
        rows = []
        for i, case in enumerate(cases):
            prompt = len(case["prompt_ids"])
            if len(tokens[i]) < length:
                count = 1 if tokens[i] else min(3, prompt - done[i])
                rows.append(Row(i, done[i], count, done[i] + count >= prompt))
                done[i] += count
        result = driver.step(rows, init=init)
        init = []
        for slot, token in zip(result.slots.tolist(), result.tokens.tolist(), strict=True):
            tokens[slot].append(token)
    exact = [i for i, case in enumerate(cases) if min(case["margins"][:length]) > 1e-3]
    assert len(exact) >= 4
    assert [tokens[i] for i in exact] == [cases[i]["greedy_ids"][:length] for i in exact]
