"""Time to first token of 32 requests that share a 400-token system prompt, with the prefix cache on and off.

One after the other (what a lone user feels), and all at once (what a busy server feels). CPU, the bundled model.

    python benchmarks/prefix_cache_ttft.py
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.cli.bench.latency import token_times
from octavo.cli.bench.results import environment, percentile, write_json

SHARED, OWN, REQUESTS, OUTPUT = 400, 40, 32, 8


def workload(seed: int) -> list[dict[str, Any]]:
    source = random.Random(seed)
    shared = [source.randrange(1000, 40_000) for _ in range(SHARED)]
    return [{"prompt_token_ids": shared + [source.randrange(1000, 40_000) for _ in range(OWN)]} for _ in range(REQUESTS)]


def measure(enabled: bool, settings: dict[str, Any]) -> dict[str, Any]:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    with LLM(enable_prefix_caching=enabled, **settings) as llm:
        llm.generate(workload(99)[:1], params, use_tqdm=False)
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in workload(1)]
        together = llm.generate(workload(2), params, use_tqdm=False)
    return {
        # The first request of each group finds nothing cached, and is not what the cache is for.
        "one_by_one_ttft_ms": round(percentile([token_times(o)[0] for o in alone[1:]], 50) * 1000, 2),
        "all_at_once_ttft_ms": round(percentile([token_times(o)[0] for o in together], 50) * 1000, 2),
        "cached_tokens": sum(o.num_cached_tokens or 0 for o in [*alone, *together]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to first token with and without the prefix cache.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "prefix_cache_ttft.json")
    options = parser.parse_args()
    on, off = measure(True, {"device": "cpu"}), measure(False, {"device": "cpu"})
    ratios = {key: round(off[key] / on[key], 2) for key in ("one_by_one_ttft_ms", "all_at_once_ttft_ms")}
    print(f"median TTFT, {REQUESTS} requests, {SHARED} shared + {OWN} own prompt tokens")
    for key, label in (("one_by_one_ttft_ms", "one by one"), ("all_at_once_ttft_ms", "all at once")):
        print(f"  {label:<12} cache on {on[key]:>8.1f} ms   off {off[key]:>8.1f} ms   {ratios[key]:.1f} times less")
    write_json(
        options.output,
        {
            "bench": "prefix_cache_ttft",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "shared_tokens": SHARED,
            "own_tokens": OWN,
            "requests": REQUESTS,
            "on": on,
            "off": off,
            "off_over_on": ratios,
            "environment": environment(),
        },
    )
    print(f"Written to {options.output}.")


if __name__ == "__main__":
    main()
