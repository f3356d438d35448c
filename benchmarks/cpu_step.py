"""What a decode step costs beside the compiled code: Python's part of planning, launching, settling and delivering.

CPU time of the thread that runs the engine (other processes do not count), one kernel thread so that the kernels' time is that
thread's too. `engine` is the core's turn less the native call; `delivery` what the offline client adds for its requests.

    python benchmarks/cpu_step.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.checkpoint.bundled import ensure_bundled_model
from octavo.cli.bench.results import environment, write_json
from octavo.core.loop import EngineCore
from octavo.ops.cpu.steps import CpuSteps

OUTPUT_TOKENS = 128
WARM_STEPS = 16
"""Not counted: admissions, prompts, and the first uses of everything."""


class Stopwatch:
    """A function whose CPU time in this thread is kept, call by call."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self.seconds: list[float] = []

    def __call__(self, *arguments: Any) -> Any:
        start = time.thread_time()
        try:
            return self._run(*arguments)
        finally:
            self.seconds.append(time.thread_time() - start)


class Watched:
    """An object one of whose functions is replaced."""

    def __init__(self, inner: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def only(kind: type) -> Any:
    found = [o for o in gc.get_objects() if type(o) is kind]
    assert len(found) == 1, f"{len(found)} objects of {kind}"
    return found[0]


def measure(llm: LLM, count: int, native: Stopwatch, turn: Stopwatch) -> dict[str, float]:
    """Milliseconds a step."""
    prompts = [{"prompt_token_ids": [random.randrange(1000, 40_000) for _ in range(16)]} for _ in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS + WARM_STEPS, ignore_eos=True, detokenize=False)
    native.seconds.clear(), turn.seconds.clear()
    start = time.thread_time()
    llm.generate(prompts, params, use_tqdm=False)
    whole = time.thread_time() - start
    steps = min(len(native.seconds), len(turn.seconds))
    engine = sum(turn.seconds[-OUTPUT_TOKENS:]) - sum(native.seconds[-OUTPUT_TOKENS:])
    delivery = whole - sum(turn.seconds)  # all of it: also what the client does for its prompts
    return {
        "engine_ms": round(engine / OUTPUT_TOKENS * 1e3, 4),
        "delivery_ms": round(delivery / steps * 1e3, 4),
        "native_ms": round(sum(native.seconds[-OUTPUT_TOKENS:]) / OUTPUT_TOKENS * 1e3, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Python's part of a decode step on a CPU.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    options = parser.parse_args()
    with LLM(ensure_bundled_model(), device="cpu", threads=1) as llm:
        steps, core = only(CpuSteps), only(EngineCore)
        native, turn = Stopwatch(steps._library.octavo_step), Stopwatch(core.step)
        steps._library, core.step = Watched(steps._library, octavo_step=native), turn
        results = {}
        print(f"{'requests':>8}{'engine ms':>12}{'delivery ms':>13}{'native ms':>11}")
        for count in options.batches:
            rounds = [measure(llm, count, native, turn) for _ in range(options.rounds + 1)][1:]
            best = results[str(count)] = {key: min(r[key] for r in rounds) for key in rounds[0]}
            print(f"{count:>8}{best['engine_ms']:>12.3f}{best['delivery_ms']:>13.3f}{best['native_ms']:>11.2f}")
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    path = Path(__file__).parent / "results" / "cpu_step.json"
    write_json(path, {"bench": "cpu_step", "date": date, "results": results, "environment": environment()})
    print(f"Written to {path}.")


if __name__ == "__main__":
    main()
