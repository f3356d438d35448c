"""The inline executor: construction, order and shutdown are the worker's."""

from __future__ import annotations

import json
from pathlib import Path

from octavo.executor.base import Executor
from octavo.executor.inline import InlineExecutor
from octavo.worker.scripted import ScriptedWorker
from tests.support.engine_configs import engine_config
from tests.support.step_plans import Plans, Row, slot_init


def test_passes_steps_through_in_order_and_shuts_down_once(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"default": [4, 5, 6]}))
    shutdowns = []

    class Counting(ScriptedWorker):
        def shutdown(self) -> None:
            shutdowns.append(1)
            super().shutdown()

    executor: Executor = InlineExecutor(lambda: Counting(engine_config(scripted_model=str(path)), lambda *_: None))
    assert executor.cache_shape.num_blocks == executor.ready_report.num_blocks == 96
    plans = Plans()
    executor.submit(plans([Row(0, 0, 2, True)], init=[slot_init(0, [1, 2], [1])]))
    executor.submit(plans([Row(0, 2, 1, True)]))
    results = [executor.collect(), executor.collect()]
    assert [r.step_id for r in results] == [0, 1]
    assert [r.tokens.tolist() for r in results] == [[4], [5]]
    executor.shutdown()
    executor.shutdown()
    assert shutdowns == [1]
