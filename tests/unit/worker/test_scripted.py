"""The scripted worker: what a script says is what comes out, through the real step contract."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.protocol.params import SamplingParams
from octavo.worker.scripted import ScriptedWorker
from tests.support.engine_configs import engine_config
from tests.support.step_plans import Plans, Row, slot_init


def make(tmp_path: Path, script: dict[str, Any], **settings: Any) -> ScriptedWorker:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(script))
    return ScriptedWorker(engine_config(scripted_model=str(path), **settings), lambda *_: None)


def play(worker: ScriptedWorker, prompt: list[int], steps: int, **init: Any) -> list[int]:
    """Prefill one request, then decode; the tokens that came back."""
    plans, tokens = Plans(), []
    for step in range(steps):
        inits = [slot_init(0, prompt, [1], **init)] if step == 0 else []
        row = Row(0, 0, len(prompt), True) if step == 0 else Row(0, len(prompt) + step - 1, 1, True)
        worker.submit(plans([row], init=inits))
        tokens += worker.collect().tokens.tolist()
    return tokens


def test_first_matching_rule_decides_then_eos(tmp_path: Path) -> None:
    script = {
        "default": [9],
        "rules": [{"prompt_contains_ids": [3, 4], "tokens": [7, 8]}, {"prompt_length": 2, "tokens": [5], "cycle": True}],
    }
    worker = make(tmp_path, script)
    assert play(worker, [1, 3, 4, 2], 4, eos=[60]) == [7, 8, 60, 60]
    assert play(worker, [4, 3], 3) == [5, 5, 5]
    assert play(worker, [4, 3, 1], 2, eos=[61]) == [9, 61]


def test_siblings_and_resumed_requests(tmp_path: Path) -> None:
    worker = make(tmp_path, {"rules": [{"index": 1, "tokens": [11, 12, 13]}, {"tokens": [21]}]})
    assert play(worker, [1], 1) == [21]
    plan = Plans()([Row(2, 0, 4, True)], init=[slot_init(2, [1, 2, 11, 12], [1], num_prompt=2, index=1)])
    worker.submit(plan)
    assert worker.collect().tokens.tolist() == [13]


def test_logprob_rows_when_asked(tmp_path: Path) -> None:
    worker = make(tmp_path, {"default": [62]})
    sampling = SamplingParams(logprobs=3, prompt_logprobs=1)
    plans = Plans()
    worker.submit(plans([Row(0, 0, 2, False)], init=[slot_init(0, [5, 6, 7], [1], sampling=sampling)]))
    first = worker.collect()
    assert first.logprobs is None
    assert [r.token_id for r in first.prompt_logprobs[0]] == [6, 7]
    worker.submit(plans([Row(0, 2, 1, True)]))
    second = worker.collect()
    assert second.prompt_logprobs is None
    (row,) = second.logprobs[0]
    assert (row.token_id, row.rank, row.top_ids) == (62, 1, [62, 63, 0])
    assert row.top_logprobs == pytest.approx([-0.1, -0.2, -0.3])


def test_failures(tmp_path: Path) -> None:
    marker = tmp_path / "failed-once"
    script = {
        "default": [1],
        "rules": [
            {"prompt_contains_ids": [30], "fail": {"at_output": 1, "how": "error", "message": "boom"}},
            {"prompt_contains_ids": [31], "fail": {"how": "raise", "once_file": str(marker)}, "tokens": [2]},
            {"prompt_contains_ids": [32], "fail": {"how": "raise_collect"}},
        ],
    }
    worker, plans = make(tmp_path, script), Plans()
    both = [slot_init(0, [30], [1]), slot_init(1, [5], [2])]
    worker.submit(plans([Row(0, 0, 1, True), Row(1, 0, 1, True)], init=both))
    assert worker.collect().errors is None
    worker.submit(plans([Row(0, 1, 1, True), Row(1, 1, 1, True)]))
    assert worker.collect().errors == {0: "boom"}
    with pytest.raises(RuntimeError):
        play(worker, [31], 1)
    assert marker.exists()
    assert play(worker, [31], 1) == [2]
    worker.submit(plans([Row(0, 0, 1, True)], init=[slot_init(0, [32], [1])]))
    with pytest.raises(RuntimeError):
        worker.collect()
    assert play(worker, [9], 1) == [1]


def test_shape_honours_override_and_fits_one_request(tmp_path: Path) -> None:
    assert make(tmp_path, {}, num_blocks=7).cache_shape.num_blocks == 7
    shape = make(tmp_path, {}, num_blocks=None, max_model_len=100, block_size=16, max_num_seqs=1).cache_shape
    assert shape.num_blocks == 1 + 7


@pytest.mark.parametrize("text", ["{", '{"rule": []}', '{"fail": {"how": "explode"}}'])
def test_bad_scripts_are_config_errors(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.json"):
        ScriptedWorker(engine_config(scripted_model=str(path)), lambda *_: None)
    with pytest.raises(ConfigError, match="cannot be read"):
        ScriptedWorker(engine_config(scripted_model=str(tmp_path / "absent.json")), lambda *_: None)


def test_imports_no_torch() -> None:
    code = "import sys, octavo.worker.scripted, octavo.executor.inline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
