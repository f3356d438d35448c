"""GPU: what a long prompt does to the streams beside it, with and without a target for the time of a step, and what the target costs.

Random weights, token ids. Eight streams of Llama-3.1-8B's shape; in the middle of them a prompt of 100,000 tokens, and half a second
later four of 60. Then 512 requests at once (the workload of `gpu_throughput.py`), through the same engine process.

    python -m benchmarks.gpu_long_prompt [--targets 0 200]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_throughput import SHAPES
from octavo import AsyncLLM, RequestOutputKind, SamplingParams
from octavo.cli.bench.results import environment, percentile, write_json
from octavo.cli.bench.workload import Span, random_requests
from octavo.config.args import EngineArgs

STREAMS, STREAM_PROMPT, STREAM_OUTPUT = 8, 300, 4000
LONG, SHORT, SHORTS = 100_000, 60, 4
REQUESTS = 512


async def measure(folder: str, target: float) -> dict[str, Any]:
    args = EngineArgs(model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=131072, target_step_ms=target)
    rng = random.Random(1)

    def prompt(tokens: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [rng.randrange(10000) for _ in range(tokens)]}

    async with await AsyncLLM.start(args) as llm:

        async def stream(name: str, given: dict[str, list[int]], tokens: int, gaps: list[float], firsts: list[float]) -> None:
            params = SamplingParams(
                max_tokens=tokens, temperature=0.6, ignore_eos=True, output_kind=RequestOutputKind.DELTA, detokenize=False
            )
            began = last = time.perf_counter()
            async for _ in llm.generate(given, params, name):  # type: ignore[arg-type]
                now = time.perf_counter()
                (firsts if last == began else gaps).append(now - last)
                last = now

        gaps: list[float] = []
        streams = [asyncio.create_task(stream(f"stream-{i}", prompt(STREAM_PROMPT), STREAM_OUTPUT, gaps, [])) for i in range(STREAMS)]
        await asyncio.sleep(2.0)
        calm = gaps[len(gaps) // 2 :]
        gaps.clear()
        of_long: list[float] = []
        firsts: list[float] = []
        long = asyncio.create_task(stream("long", prompt(LONG), 1, [], of_long))
        await asyncio.sleep(0.5)
        await asyncio.gather(long, *[stream(f"short-{i}", prompt(SHORT), 2, [], firsts) for i in range(SHORTS)])
        during = list(gaps)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

        requests, all_firsts = random_requests(REQUESTS, Span(100, 1024), Span(100, 1024)), list[float]()
        start = time.perf_counter()
        await asyncio.gather(
            *[stream(f"r{i}", {"prompt_token_ids": r.prompt}, r.output_len, [], all_firsts) for i, r in enumerate(requests)]
        )
        elapsed = time.perf_counter() - start
    ms = {
        "calm_gap_p50": percentile(calm, 50),
        "gap_p50": percentile(during, 50),
        "gap_p99": percentile(during, 99),
        "gap_max": max(during),
        "short_first_max": max(firsts),
        "long_first": of_long[0],
    }
    return {
        "target_step_ms": target,
        **{f"{name}_ms": round(1000 * seconds, 1) for name, seconds in ms.items()},
        "requests_s": round(elapsed, 2),
        "requests_first_p50_s": round(percentile(all_firsts, 50), 2),
        "requests_first_max_s": round(max(all_firsts), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=float, nargs="+", default=[0.0, 200.0], help="ms; 0 is none")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_long_prompt.json")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"]))
        for target in options.targets:
            results.append(asyncio.run(measure(folder, target)))
            print(results[-1], flush=True)
    write_json(options.out, {"bench": "gpu_long_prompt", "results": results, "environment": environment()})


if __name__ == "__main__":
    main()
